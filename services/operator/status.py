"""`tidegate status`: every worker that is heard of, beside what operators ordered."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from typing import Final, TextIO

import msgspec

from schemas.actions import OPERATOR_HOLDS, Action, Hold
from schemas.outcomes import Status
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer, expired
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY
from services.bus import Bus
from services.decision.modes import Modes, stands
from services.decision.settings import Settings
from services.operator.changes import about, by, told, what
from services.operator.live import Heard, Listener
from services.operator.session import check_filters, settings_of, shown_time, table

WORDS: Final = {Hold.MODE_OFF: "off", Hold.SHADOW: "shadow", Hold.PAUSED: "paused", Hold.OVERRIDE: "override",
                Hold.KILLED: "killed"}  # fmt: skip


async def status(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Listen for ``--wait`` seconds and show what was heard. 1 when nobody was, or a part of the loop is silent."""
    check_filters(options)
    listener = Listener(bus, options.node or "")
    await listener.start()
    modes = await modes_of(bus, settings_of(options, Settings, "decision"))
    await asyncio.sleep(options.wait)
    now_ns = time.time_ns()
    everybody = [one for _, one in sorted(listener.workers.items())]
    heard = [one for one in everybody if options.worker in (None, one.worker)]
    rows = [row_of(one, modes, now_ns) for one in heard]
    orders = [f"{about(key)}: {what(order)}{by(order)} (revision {revision})"
              for key, (order, revision) in sorted(modes.orders().items())
              if stands(order, now_ns)]  # fmt: skip
    pointers, doubts = [], silent(heard)
    failed = not rows or bool(doubts)
    for key in (KEY_CHAMPION, KEY_CANDIDATE):
        entry = await bus.kv_get(BUCKET_POLICY, key)
        if entry is not None and entry.value is not None:
            pointers.append(f"{key}: {told(key, entry.value)} (revision {entry.revision})")
            if key == KEY_CHAMPION:
                doubts += idle_champion(entry.value, heard, now_ns)
    if listener.bad:
        doubts.append(f"{listener.bad} messages could not be read: a service of another version?")
    if not everybody:
        doubts.append("nobody was heard: telemetry and featurizer are silent, or no step came in that time")
    elif options.worker and not rows:
        doubts.append(f"{options.worker} is not among the {len(everybody)} workers heard")
    if options.json:
        out.write(json.dumps({"workers": rows, "orders": orders, "policies": pointers, "unreadable": listener.bad,
                              "doubts": doubts}) + "\n")  # fmt: skip
    else:
        out.write(_rendered(rows, orders, pointers, doubts, modes, options.wait))
    return 1 if failed else 0


def silent(heard: list[Heard]) -> list[str]:
    """The first part of the loop from which nothing came for any worker; those after it have nothing to answer."""
    if not any(one.state is not None for one in heard):
        return ["no states were heard: telemetry or featurizer is silent"] if heard else []
    if not any(one.action is not None for one in heard):
        return ["no commands were heard: decision is silent; engines return to rho 1.0 as leases end"]
    if not any(one.outcome is not None for one in heard):
        return ["no outcomes were heard: the actuators are silent"]
    return []


def idle_champion(value: bytes, heard: list[Heard], now_ns: int) -> list[str]:
    """Whether another policy acts than the champion's pointer names: promoting it was not all that it needs."""
    acting = {one.policy_version for one in heard if one.policy_version}
    try:
        pointer = msgspec.json.decode(value, type=PolicyPointer)
    except msgspec.DecodeError:
        return [f"the champion's pointer cannot be read; what acts: {', '.join(sorted(acting)) or 'nothing heard'}"]
    if expired(pointer, now_ns):
        return [f"the champion {pointer.version} expired at {shown_time(pointer.expires_ns)}: the heuristic acts"]
    if not acting or pointer.version in acting:
        return []
    return [
        f"the champion {pointer.version} does not act, {', '.join(sorted(acting))} does: decision refused the pointer "
        "(its log says why), has not read it yet, or its setting `policy` names another"
    ]


async def modes_of(bus: Bus, settings: Settings) -> Modes:
    """The orders as decision sees them; entries that cannot be read are passed over, as it does."""
    modes = Modes(settings.mode)
    for entry in await bus.kv_history(BUCKET_CONFIG):
        try:
            modes.enter(entry.key, entry.value, entry.revision)
        except ValueError:
            continue
    return modes


def row_of(heard: Heard, modes: Modes, now_ns: int) -> dict[str, object]:
    """What is shown of a worker; None where it was not heard."""
    state, action, outcome = heard.state, heard.action, heard.outcome
    kind = state.service_class if state is not None else 0
    (ordered,) = modes.standings([heard.worker], [kind], now_ns)
    mode = WORDS.get(Hold(action.hold), "") if action is not None and action.hold in OPERATOR_HOLDS else ""
    doubt = Hold(action.hold).name.lower() if action is not None and action.hold and not mode else ""
    return {
        "node": heard.node,
        "worker": heard.worker,
        # What was commanded, not what was ordered: an order that nobody carries out is no mode.
        "mode": "-" if action is None else mode or ("enforce" if ordered.mode in ("off", "shadow") else ordered.mode),
        "held": doubt,
        "policy": heard.policy_version or None,
        "rho_asked": action.target_rho if action is not None else None,
        "rho_real": round(outcome.effective_rho, 4) if outcome is not None else None,
        "u_alloc": _number(state.value("u_alloc")) if state is not None else None,
        "tpot_over_limit": _number(state.value("tpot_p95")) if state is not None else None,
        "action": Action(outcome.executed_action).name.lower() if outcome is not None
        else Action(action.action).name.lower() if action is not None else None,
        "status": Status(outcome.status).name.lower() if outcome is not None else None,
        "age_s": round(time.monotonic() - heard.at_s, 1),
    }  # fmt: skip


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


def _rendered(
    rows: list[dict[str, object]],
    orders: list[str],
    pointers: list[str],
    doubts: list[str],
    modes: Modes,
    wait_s: float,
) -> str:
    nodes = len({row["node"] for row in rows})
    lines = [f"{nodes} node{'s' * (nodes != 1)}, {len(rows)} worker{'s' * (len(rows) != 1)} heard in {wait_s:g} s\n"]
    if rows:
        head = ["node", "worker", "mode", "policy", "rho asked", "real", "u_alloc", "TPOT/SLO", "last action", "age"]
        cells = []
        for row in rows:
            acted = f"{row['action'] or '-'}" + (
                f" ({row['status']})" if row["status"] not in (None, "accepted") else ""
            )
            mode = f"{row['mode']}" + (f" ({row['held']})" if row["held"] else "")
            cells.append([str(row["node"]), str(row["worker"]), mode, str(row["policy"] or "-"),
                          _cell(row["rho_asked"]), _cell(row["rho_real"]), _cell(row["u_alloc"]),
                          _cell(row["tpot_over_limit"]), acted, f"{row['age_s']} s"])  # fmt: skip
        lines.append(table(head, cells))
    lines += [f"warning: {line}\n" for line in doubts]
    lines += [f"{line}\n" for line in pointers]
    lines += [f"{line}\n" for line in orders] or [f"no orders in {BUCKET_CONFIG}; mode by settings: {modes.default}\n"]
    return "".join(lines)


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.2f}"
