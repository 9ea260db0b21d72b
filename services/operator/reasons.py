"""Why a policy chose what it chose, and the smallest change that would have made it choose otherwise. Pure.

The heuristic's rules stand here a second time, as data: ``tests/services/operator/test_reasons.py`` holds them to
``services.decision.heuristic.choose`` on thousands of random states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, Action, MaskReason
from schemas.features import FEATURE, FEATURES
from services.decision.heuristic import HeuristicSettings
from services.decision.shield import ShieldSettings

Row = NDArray[np.float32]
"""A state: float32 [FEATURE_COUNT], raw, NaN = absent."""

FORECAST: Final = "forecast_use"
"""Not a feature: forecast physical KV over the hard quota, as the heuristic reckons it."""
_UNITS: Final = {feature.name: feature.unit for feature in FEATURES} | {FORECAST: "1", "running_share": "1"}


class Comparison(NamedTuple):
    """A comparison of a rule: ``value`` at or above ``threshold``, or with ``below`` not at or above it."""

    name: str
    value: float
    threshold: float
    below: bool = False

    @property
    def met(self) -> bool:
        # As numpy compares float32 with a Python number; an absent value is never at or above anything.
        at = bool(np.float32(self.value) >= np.float32(self.threshold))
        return not at if self.below else at

    @property
    def gap(self) -> float:
        """How far the value is from the threshold, over the threshold; infinite where it is absent."""
        if not math.isfinite(self.value):
            return math.inf
        return abs(self.value - self.threshold) / max(abs(self.threshold), 1e-9)

    def __str__(self) -> str:
        unit = _UNITS.get(self.name, "")
        unit = "" if unit == "1" else f" {unit}"
        value = f"{self.value:.4g}" if math.isfinite(self.value) else "absent"
        return f"{self.name} {value} {'<' if self.met == self.below else '>='} {self.threshold:g}{unit}"


class Rule(NamedTuple):
    """A rule of the heuristic: it fires when all tests of one of its ways are met."""

    action: Action
    ways: tuple[tuple[Comparison, ...], ...]

    @property
    def fires(self) -> bool:
        return any(all(test.met for test in way) for way in self.ways)

    def met_way(self) -> tuple[Comparison, ...]:
        """The first way whose tests are all met."""
        return next(way for way in self.ways if all(test.met for test in way))


class Flip(NamedTuple):
    """A change that makes another choice: ``size`` compares them, 0.1 = a tenth of the threshold."""

    to: str
    size: float
    words: str


def heuristic_rules(row: Row, s: HeuristicSettings) -> tuple[Rule, ...]:
    """The rules in their order of priority, for one state."""

    def get(name: str) -> float:
        return float(row[FEATURE[name]])

    def at_least(name: str, threshold: float) -> Comparison:
        return Comparison(name, get(name), threshold)

    def under(name: str, threshold: float) -> Comparison:
        return Comparison(name, get(name), threshold, below=True)

    use = Comparison(FORECAST, forecast_use(row, s.horizon_s), s.evict_high)
    rested = at_least("since_tighten", s.tighten_every_steps)
    host = under("host_use", s.evict_host_use)
    spaced = at_least("since_evict", s.evict_every_steps)
    waiting = at_least("l_queue_memory", s.queue_low)
    # running >= near x ceiling, told in requests
    slots = Comparison("running", get("running"), float(np.float32(s.ceiling_near) * row[FEATURE["max_running"]]))
    neighbours = at_least("neighbour_queue", s.queue_low)
    calm = under("preemption_rate", s.preemption_high)
    queued = (at_least("l_queue", s.queue_low), slots, calm)
    memory = (waiting, under("neighbour_queue", s.queue_low), at_least("u_reserved", s.reserved_high), calm)
    room = (under("tpot_p95", s.latency_low),)
    late = (at_least("ttft_p95", s.first_token_late),)
    return (
        Rule(
            Action.TIGHTEN,
            (
                (at_least("tpot_p95", s.latency_high), under("ttft_p95", s.first_token_late), rested),
                (at_least("preemption_rate", s.preemption_high), rested),
            ),
        ),
        Rule(
            Action.EVICT,
            ((use, host, spaced), (waiting, use._replace(threshold=s.evict_waiting), host, spaced)),
        ),
        Rule(Action.WIDEN, (room + memory, late + memory, (under("tpot_p95", s.slots_low), *queued))),
        Rule(Action.COMPACT, ((neighbours, at_least("f_frag", s.frag_high)),)),
    )


@np.errstate(invalid="ignore", over="ignore", divide="ignore")
def forecast_use(row: Row, horizon_s: float) -> float:
    """(u_alloc + growth over the horizon) x q0_share / quota_hard, as the heuristic reckons it in float32."""
    slope, hard = row[FEATURE["du_alloc"]], row[FEATURE["quota_hard"]]
    growth = np.float32(max(slope, np.float32(0)) if np.isfinite(slope) else 0.0) * np.float32(horizon_s)
    if not hard > 0:
        return math.nan
    return float((row[FEATURE["u_alloc"]] + growth) * row[FEATURE["q0_share"]] / hard)


def heuristic_choice(rules: Sequence[Rule], mask: int) -> Action:
    """The first rule that fires and is allowed; hold if none does."""
    return next((rule.action for rule in rules if rule.fires and mask >> rule.action & 1), Action.HOLD)


def heuristic_flips(rules: Sequence[Rule], mask: int) -> list[Flip]:
    """Changes of the state that would have flipped the heuristic's choice, the smallest first. The mask is taken as
    it was: a change may move that as well."""
    chosen = heuristic_choice(rules, mask)
    flips: list[Flip] = []
    for rule in rules:
        if not mask >> rule.action & 1:
            continue
        if rule.action == chosen:
            broken = [min(way, key=lambda t: t.gap) for way in rule.ways if all(test.met for test in way)]
            # One comparison may serve several ways: it is told once.
            flips += _flip(rules, mask, list({(test.name, test.threshold): test for test in broken}.values()))
            break
        ways = [[test for test in way if not test.met] for way in rule.ways]
        flips += _flip(rules, mask, min(ways, key=_size))
    return sorted(flips, key=lambda flip: flip.size)


def _flip(rules: Sequence[Rule], mask: int, turned: Sequence[Comparison]) -> list[Flip]:
    """What is chosen once these comparisons come out the other way, with all others of the same values; nothing
    where that is the same choice."""
    values: dict[str, float] = {}
    for test in turned:
        falls = test.met != test.below
        value = float(np.nextafter(np.float32(test.threshold), np.float32(-np.inf))) if falls else test.threshold
        values[test.name] = (
            min(value, values.get(test.name, value)) if falls else max(value, values.get(test.name, value))
        )
    changed = [
        Rule(rule.action, tuple(tuple(t._replace(value=values.get(t.name, t.value)) for t in way) for way in rule.ways))
        for rule in rules
    ]
    to = heuristic_choice(changed, mask)
    if to == heuristic_choice(rules, mask):
        return []
    return [Flip(to.name.lower(), _size(turned), " and ".join(map(_crossing, turned)))]


def _size(turned: Sequence[Comparison]) -> float:
    return max((test.gap for test in turned), default=0.0)


def q_flips(q_values: Sequence[float], mask: int, reasons: Sequence[int]) -> list[Flip]:
    """What stood nearest to a network's choice: the second-best allowed action, and forbidden ones above the choice."""
    vetoed = [a for a in range(ACTION_COUNT) if reasons[a] == MaskReason.RISK_VETO]
    allowed = [a for a in range(ACTION_COUNT) if mask >> a & 1 and a not in vetoed]
    best = max(allowed, key=lambda a: (q_values[a], -a))
    flips = []
    others = [a for a in allowed if a != best]
    if others:
        second = max(others, key=lambda a: (q_values[a], -a))
        margin = q_values[best] - q_values[second]
        flips.append(Flip(Action(second).name.lower(), margin, f"its Q is {margin:.4g} below"))
    above = [a for a in range(ACTION_COUNT) if a not in allowed and q_values[a] > q_values[best]]
    for action in sorted(above, key=lambda a: -q_values[a]):
        reason = MaskReason(reasons[action]).name.lower()
        against = "its own risk head vetoes it" if action in vetoed else f"the mask forbids it: {reason}"
        above_by = q_values[action] - q_values[best]
        flips.append(Flip(Action(action).name.lower(), 0.0, f"its Q is {above_by:.4g} above, but {against}"))
    return flips


def _crossing(test: Comparison) -> str:
    if not math.isfinite(test.value):
        return f"{test.name} known at all"
    there = "below" if test.met != test.below else "at or above"
    return f"{test.name} {there} {test.threshold:g} instead of {test.value:.4g}"


def mask_words(reason: int, row: Row, s: ShieldSettings) -> str:
    """What a mask reason compared, with the state's numbers; empty where the reason's name says it all."""

    def get(name: str) -> str:
        value = float(row[FEATURE[name]])
        return f"{name} {value:.4g}" if math.isfinite(value) else f"{name} absent"

    words: dict[MaskReason, Callable[[], str]] = {
        MaskReason.AT_RHO_MAX: lambda: f"{get('rho')}, {get('max_running')} >= {s.max_running_start}",
        MaskReason.AT_MAX_RUNNING_LOW: lambda: f"{get('rho')}, {get('max_running')} <= {s.max_running_low}",
        MaskReason.COOL_DOWN: lambda: f"{get('since_tighten')} (widen waits {s.widen_after_tighten_steps}), "
        f"{get('since_compact')} (compact waits {s.compact_every_steps})",
        MaskReason.FORECAST_EXHAUSTION: lambda: f"{get('u_alloc')}, {get('du_alloc')}, {get('idle_share')}: "
        f"forecast at or above {s.exhaustion:g} of {get('quota_hard')}",
        MaskReason.LATENCY_AT_LIMIT: lambda: f"{get('tpot_p95')} > {s.latency_limit:g}, "
        f"{get('ttft_p95')} < {s.first_token_late:g}",
        MaskReason.NOTHING_FRAGMENTED: lambda: f"{get('f_frag')} <= {s.frag_low:g}",
        MaskReason.NOTHING_IDLE: lambda: f"{get('idle_share')} <= {s.idle_low:g}",
        MaskReason.HOST_FULL: lambda: f"{get('host_free')} <= {s.host_free_low:g} or "
        f"{get('host_use')} >= {s.host_full:g}",
        MaskReason.LINK_BUSY: lambda: f"{get('link_use')} >= {s.link_busy:g}",
    }  # fmt: skip
    found = words.get(MaskReason(reason)) if reason in MaskReason.__members__.values() else None
    return found() if found is not None else ""
