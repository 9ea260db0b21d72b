"""What was decided about each worker, counted from the audit stream. Pure but for the walk over the stream."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from schemas.actions import OPERATOR_HOLDS, RHO_MAX, RHO_MIN, RHO_STEP, Action, Hold, MaskReason, WorkerAction
from schemas.codec import DecodeError
from schemas.outcomes import AUDIT_RECORD, OutcomeKind, Refusal, WorkerOutcome
from schemas.subjects import STREAM_AUDIT, subject, wildcard
from services.bus import Bus
from services.operator.entries import rows_of
from services.operator.story import recommended

_ALWAYS_OPEN: Final = Action.HOLD


class Decisions(msgspec.Struct, kw_only=True):
    """One worker's. Counts are steps."""

    worker: str
    steps: int = 0
    begin_ns: int = 0
    """Server's wall clock of the first and the last."""
    end_ns: int = 0
    policy: str = ""
    """The newest that chose."""
    would: dict[str, int] = {}
    """What the acting policy chose, whether it was carried out or only recorded."""
    spells: dict[str, int] = {}
    """How often it began to choose it: a state that stays makes the same choice in every step."""
    acted: dict[str, int] = {}
    """What was executed where the policy's choice counted (mode enforce), hold left out."""
    held: dict[str, int] = {}
    """Steps in which nobody chose, by the doubt about the state."""
    orders: dict[str, int] = {}
    """Steps in which an operator's word stood above the policy: ``shadow``, ``paused``, ..."""
    refused: dict[str, int] = {}
    forbidden: dict[str, dict[str, int]] = {}
    """By action and reason, in the steps in which somebody chose."""
    rho_high: float = RHO_MIN
    """Where rho would have got at most, had each choice been followed in turn from 1.0."""
    _rho: float = RHO_MIN
    _last: int = 0

    def told(self) -> dict[str, Any]:
        """For programs."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if not name.startswith("_")}

    def add(self, action: WorkerAction, outcome: WorkerOutcome, stored_ns: int) -> None:
        """Count one step."""
        self.steps += 1
        self.begin_ns = self.begin_ns or stored_ns
        self.end_ns = stored_ns
        if outcome.refusal:
            _count(self.refused, Refusal(outcome.refusal).name.lower())
        hold = Hold(action.hold)
        if hold in OPERATOR_HOLDS:
            _count(self.orders, hold.name.lower())
        if (hold and hold not in OPERATOR_HOLDS) or hold == Hold.MODE_OFF:
            if hold != Hold.MODE_OFF:
                _count(self.held, hold.name.lower())
            self._last = 0
            return
        if action.mask_reasons and all(reason == MaskReason.HELD for reason in action.mask_reasons[1:]):
            # An operator's word covers a doubt about the state: nothing was chosen, whatever stands in the row.
            _count(self.held, "state in doubt")
            self._last = 0
            return
        self.policy, wish = recommended(action)
        name = Action(wish).name.lower()
        _count(self.would, name)
        if wish != self._last and wish:
            _count(self.spells, name)
        self._last = wish
        if wish == Action.WIDEN:
            self._rho = min(self._rho + RHO_STEP, RHO_MAX)
        elif wish == Action.TIGHTEN:
            self._rho = max(self._rho - RHO_STEP, RHO_MIN)
        self.rho_high = max(self.rho_high, round(self._rho, 4))
        if hold == Hold.NONE and outcome.executed_action:
            _count(self.acted, Action(outcome.executed_action).name.lower())
        for other, reason in enumerate(action.mask_reasons):
            if reason and other != _ALWAYS_OPEN:
                _count(self.forbidden.setdefault(Action(other).name.lower(), {}), MaskReason(reason).name.lower())


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


async def decisions(bus: Bus, since_ns: int, worker: str | None, node: str | None) -> dict[str, Decisions]:
    """By worker, from the audit stream; empty where there is none. Records that cannot be read are passed over."""
    found: dict[str, Decisions] = {}
    if await bus.stream_span(STREAM_AUDIT) is None:
        return found
    where = subject("audit", node) if node else wildcard("audit")
    async for delivery in bus.stream_read(STREAM_AUDIT, where, since_ns=since_ns):
        try:
            rows = rows_of(AUDIT_RECORD.decode(delivery.data))
        except DecodeError:
            continue
        for action, outcome in rows:
            if action is None or outcome.kind != OutcomeKind.RECEIPT or worker not in (None, action.worker):
                continue
            one = found.setdefault(action.worker, Decisions(worker=action.worker))
            try:
                one.add(action, outcome, delivery.stored_ns)
            except ValueError:  # an action, hold or reason of a later version
                continue
    return found
