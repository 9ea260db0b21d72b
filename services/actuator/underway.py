"""Movements that outlast their step: asked about until they are done, then told by their command's id."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from schemas.engine import Receipt
from schemas.outcomes import WorkerOutcome
from services.actuator.members import Member, Pending
from services.actuator.memory.receipts import Ledger
from services.actuator.moves import tell
from services.actuator.results import completion_of
from services.errors import EngineRefused, EngineUnreachable
from services.spans import Span

LIMIT_STEPS: Final = 30
"""After so many steps an effect that never ended is reported as it is, and asked about no more."""


def remember(members: Iterable[Member], receipts: Sequence[WorkerOutcome]) -> None:
    """Keep the receipts of movements that began in this step, for their completions."""
    for member in members:
        for row, action_id in member.begun:
            member.pending[action_id] = Pending(receipts[row])
        member.begun.clear()


async def ended(member: Member, ledger: Ledger, span: Span) -> list[WorkerOutcome]:
    """The later words on a worker's effects of earlier steps that have ended; ``span`` is this step's."""
    told = []
    for action_id, pending in list(member.pending.items()):
        pending.asked_steps += 1
        try:
            effect = await member.engine.receipt(action_id)
        except (EngineRefused, EngineUnreachable) as error:
            if pending.asked_steps < LIMIT_STEPS and isinstance(error, EngineUnreachable):
                continue
            effect = _nothing(action_id)
        late = pending.asked_steps >= LIMIT_STEPS
        if (effect.done or late) and member.known is not None:
            detail = "" if effect.done else f"not done after {pending.asked_steps} steps"
            outcome = completion_of(pending.receipt, effect, member.known, detail)
            ledger.effect(outcome)
            if span.recording:
                with span.child("completion", {"tidegate.action": action_id}) as child:
                    tell(child, outcome)
            told.append(outcome)
            del member.pending[action_id]
    return told


def _nothing(action_id: str) -> Receipt:
    return Receipt(action_id, True, 0, 0.0, 0, 0, 0, 0, detail="unknown to the engine")
