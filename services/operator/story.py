"""How a decision is told: state, choice, reasons, what would have flipped it, what happened."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from schemas.actions import OPERATOR_HOLDS, Action, Hold, MaskReason, WorkerAction
from schemas.classes import ServiceClass
from schemas.features import FEATURES
from schemas.outcomes import OutcomeKind, Refusal, Status, WorkerOutcome
from services.decision.modes import Modes
from services.decision.settings import Settings, shield_settings
from services.operator.changes import about, by, what
from services.operator.reasons import (
    Flip,
    heuristic_choice,
    heuristic_flips,
    heuristic_rules,
    mask_words,
    q_flips,
)

if TYPE_CHECKING:
    from services.operator.explain import Case
    from services.operator.live import StateRow

RULE_WORDS = {
    "static": "it holds, always",
    "random": "it takes any allowed action, all alike",
    "one_line": "it widens to rho 1.6, and evicts while u_alloc is above 0.5",
}


def recommended(action: WorkerAction) -> tuple[str, int]:
    """The acting policy and what it chose, also where an operator's word stood against it."""
    if action.hold in OPERATOR_HOLDS and action.shadows:
        return action.shadows[-1].policy, action.shadows[-1].action  # the acting policy comes last
    return action.policy, action.action


def flips_of(action: WorkerAction, state: StateRow | None, settings: Settings) -> list[Flip]:
    """The smallest changes first; empty where the policy or the state tells nothing."""
    policy, _ = recommended(action)
    if action.q_values and not any(math.isnan(q) for q in action.q_values):
        return q_flips(action.q_values, action.mask, action.mask_reasons)
    if policy == "heuristic" and state is not None:
        return heuristic_flips(heuristic_rules(state.features, settings.heuristic), action.mask)
    return []


def as_text(case: Case, settings: Settings, modes: Modes) -> str:
    lines = [f"decision {case.worker}@{case.order.boot_id}.{case.order.step}, from {case.source}"]
    action, state = case.action, case.state
    if action is not None:
        lines += _choice(action, state, modes)
        lines += _mask(action, state, settings)
        lines += _why(action, state, settings)
    lines += _state(state)
    lines += ["what happened:"] + ([line for one in case.outcomes for line in _outcome(one)] or ["  nothing was told"])
    return "\n".join(lines) + "\n"


def as_json(case: Case, settings: Settings) -> dict[str, Any]:
    """The same for programs; a state's absent values are null."""
    action, state = case.action, case.state
    story: dict[str, Any] = {
        "decision": f"{case.worker}@{case.order.boot_id}.{case.order.step}", "source": case.source,
    }  # fmt: skip
    if action is not None:
        policy, wish = recommended(action)
        story["action"] = {
            "action": Action(action.action).name.lower(), "policy": action.policy, "probability": action.probability,
            "target_rho": action.target_rho, "target_max_running": action.target_max_running,
            "hold": Hold(action.hold).name.lower(),
            "recommended": {"policy": policy, "action": Action(wish).name.lower()},
            "q_values": {a.name.lower(): q for a, q in zip(Action, action.q_values, strict=False)},
            "forbidden": {a.name.lower(): MaskReason(r).name.lower()
                          for a, r in zip(Action, action.mask_reasons, strict=False) if r},
        }  # fmt: skip
        story["flips"] = [
            {"to": f.to, "size": f.size if math.isfinite(f.size) else None, "change": f.words}
            for f in flips_of(action, state, settings)
        ]
    if state is not None:
        story["state"] = {
            f.name: float(v) if math.isfinite(v) else None for f, v in zip(FEATURES, state.features, strict=True)
        }
    story["outcomes"] = [
        {k: v for k, v in one._asdict().items() if k != "moved"} | {"moved": len(one.moved)} for one in case.outcomes
    ]
    return story


def _choice(action: WorkerAction, state: StateRow | None, modes: Modes) -> list[str]:
    policy, wish = recommended(action)
    lines = [
        f"{Action(action.action).name.lower()} by {action.policy}"
        + (f" with probability {action.probability:.3g}" if action.probability < 1 else "")
        + f": rho {action.target_rho:g}, max running {action.target_max_running}"
    ]
    if action.hold in OPERATOR_HOLDS:
        hold = Hold(action.hold)
        lines.append(f"held by an operator ({hold.name.lower()}): {_order(action.worker, hold, state, modes)}")
        if hold != Hold.MODE_OFF:
            lines.append(f"{policy} would have chosen {Action(wish).name.lower()}")
    elif action.hold:
        lines.append(f"held: {Hold(action.hold).name.lower()}")
    for shadow in action.shadows:
        if shadow.policy != policy:
            lines.append(f"shadow {shadow.policy} would have chosen {Action(shadow.action).name.lower()}")
    return lines


def _order(worker: str, hold: Hold, state: StateRow | None, modes: Modes) -> str:
    """The order that holds a worker, if it stands still."""
    kinds = [state.service_class] if state is not None and state.service_class >= 0 else list(ServiceClass)
    for standing in modes.standings([worker] * len(kinds), kinds, time.time_ns()):
        if standing.hold == hold:
            if (known := modes.order(standing.key)) is None:
                return "by settings"
            return f"{about(standing.key)}: {what(known[0])}{by(known[0])} (revision {known[1]})"
    return "by an order that stands no longer (tidegate audit --changes)"


def _mask(action: WorkerAction, state: StateRow | None, settings: Settings) -> list[str]:
    shield = shield_settings(settings)
    _, wish = recommended(action)
    held = action.hold in OPERATOR_HOLDS and wish != action.action
    lines = ["actions:"]
    for k, reason in enumerate(action.mask_reasons):
        q = f"Q {action.q_values[k]:+.4g}  " if action.q_values else ""
        verdict = ("would have been chosen" if held else "chosen") if k == wish else "allowed"
        if reason:
            numbers = mask_words(reason, state.features, shield) if state is not None else ""
            verdict = f"forbidden, {MaskReason(reason).name.lower()}" + (f": {numbers}" if numbers else "")
        lines.append(f"  {Action(k).name.lower():8}{q}{verdict}")
    return lines


def _why(action: WorkerAction, state: StateRow | None, settings: Settings) -> list[str]:
    policy, wish = recommended(action)
    lines = []
    if policy == "heuristic" and state is not None and not (action.hold and action.hold not in OPERATOR_HOLDS):
        rules = heuristic_rules(state.features, settings.heuristic)
        lines.append("rules of the heuristic, in their order:")
        for rule in rules:
            allowed = action.mask >> rule.action & 1
            if rule.fires:
                told = "fires: " + ", ".join(map(str, rule.met_way())) + ("" if allowed else " (but forbidden)")
            else:
                way = min(rule.ways, key=lambda way: max((t.gap for t in way if not t.met), default=0.0))
                told = "does not: " + ", ".join(str(test) for test in way if not test.met)
            lines.append(f"  {rule.action.name.lower():8}{told}")
        if heuristic_choice(rules, action.mask) != wish and action.probability >= 1:
            lines.append("  decision's thresholds differ from the settings read here (--config): it chose otherwise")
    elif policy in RULE_WORDS:
        lines.append(f"{policy}: {RULE_WORDS[policy]}")
    elif policy.startswith("fixed:"):
        lines.append(f"{policy}: it widens or tightens until that rho is in force")
    flips = flips_of(action, state, settings)
    if flips:
        lines.append("what would have flipped it, the smallest change first:")
        lines += [f"  {flip.to}: {flip.words}" for flip in flips]
    return lines


def _state(state: StateRow | None) -> list[str]:
    if state is None:
        return ["state: not kept (the step made no transition, or its stream has dropped it)"]
    kind = f", class {ServiceClass(state.service_class).name.lower()}" if 0 <= state.service_class < 5 else ""
    lines = [f"state{kind}:"]
    cells = []
    for feature, value in zip(FEATURES, state.features, strict=True):
        if feature.name.startswith(("context_", "class_")) and not value > 0:
            continue
        unit = "" if feature.unit == "1" else f" {feature.unit}"
        cells.append(f"{feature.name} {float(value):.4g}{unit}" if math.isfinite(value) else f"{feature.name} absent")
    width = max(map(len, cells)) + 2
    lines += ["  " + "".join(cell.ljust(width) for cell in cells[k : k + 3]).rstrip() for k in range(0, len(cells), 3)]
    return lines


def _outcome(one: WorkerOutcome) -> list[str]:
    kind = OutcomeKind(one.kind).name.lower()
    refusal = f" ({Refusal(one.refusal).name.lower()})" if one.refusal else ""
    lines = [
        f"  {kind}: {Status(one.status).name.lower()}{refusal}, asked {Action(one.requested_action).name.lower()}, "
        f"done {Action(one.executed_action).name.lower()}",
        f"    rho {one.requested_rho:g} asked, {one.effective_rho:g} in force; "
        f"max running {one.effective_max_running}; generation {one.effective_generation}; "
        f"quota soft {one.quota_soft_bytes / 1e9:.2f} GB, hard {one.quota_hard_bytes / 1e9:.2f} GB",
    ]
    moved = [f"{word} {amount / 1e6:.1f} MB" for word, amount in
             (("evicted", one.evicted_bytes), ("compacted", one.compacted_bytes), ("prefetched", one.prefetched_bytes))
             if amount]  # fmt: skip
    if moved or one.pages_freed:
        lines.append(f"    {', '.join(moved) or 'nothing moved'}; pages freed {one.pages_freed}; "
                     f"pause {one.pause_us:.0f} us; {one.dropped_moves} moves dropped")  # fmt: skip
    if one.detail:
        lines.append(f"    {one.detail}")
    return lines
