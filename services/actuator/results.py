"""From what an engine did with a command to the WorkerOutcome that says so. Pure.

Requested and effective stay apart: an outcome's quota is what the engine reported in force, and the executed
action is ``hold`` whenever the engine does not show the effect.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.actions import Action, WorkerAction
from schemas.engine import Receipt
from schemas.outcomes import OutcomeKind, Status, WorkerOutcome
from services.actuator.account import Known
from services.actuator.effects import MOVES, Command
from services.actuator.leases import BUDGET_EXHAUSTED, CLASS_FORBIDS, ENGINE_REFUSED, NONE, RHO_SLACK

HOLD: Final = int(Action.HOLD)
ACCEPTED: Final = int(Status.ACCEPTED)
CLIPPED: Final = int(Status.CLIPPED)
DEFERRED: Final = int(Status.DEFERRED)
REFUSED: Final = int(Status.REFUSED)
_RECEIPT: Final = int(OutcomeKind.RECEIPT)


class Done(msgspec.Struct):
    """What one worker's engine said in a step."""

    refusal: int = NONE
    detail: str = ""
    moved: Receipt | None = None
    """Answer to compact or evict."""
    quota: Receipt | None = None
    """Answer to set_quota; None when it was refused or never came."""


def outcome_of(action: WorkerAction, command: Command | None, done: Done, known: Known | None) -> WorkerOutcome:
    """The receipt of a command. ``command`` None: it was never made; ``known`` None: nobody knows the worker."""
    status, executed, refusal = _judge(action, command, done)
    rho, generation, max_running, soft, hard = 0.0, 0, 0, 0, 0
    if known is not None:  # it follows the engine's answers
        rho, generation, max_running = known.rho, known.generation, known.max_running
        soft, hard = known.soft_bytes, known.hard_bytes
    outcome = WorkerOutcome(
        action.worker, action.action_id, _RECEIPT, status, action.action, executed, refusal, action.target_rho,
        rho, generation, max_running, action.policy, action.probability, action.mask, action.hold, soft, hard,
        detail=done.detail,
    )  # fmt: skip
    return outcome if done.moved is None else _with_effect(outcome, done.moved)


def completion_of(receipt: WorkerOutcome, effect: Receipt, known: Known, detail: str = "") -> WorkerOutcome:
    """The later word on an effect that outlasted its step, by the action's id."""
    return msgspec.structs.replace(
        _with_effect(receipt, effect),
        kind=int(OutcomeKind.COMPLETION),
        effective_rho=known.rho,
        effective_generation=known.generation,
        effective_max_running=known.max_running,
        quota_soft_bytes=known.soft_bytes,
        quota_hard_bytes=known.hard_bytes,
        detail=detail or effect.detail,
    )


def _with_effect(outcome: WorkerOutcome, effect: Receipt) -> WorkerOutcome:
    return msgspec.structs.replace(
        outcome,
        compacted_bytes=effect.compacted_bytes,
        evicted_bytes=effect.evicted_bytes,
        prefetched_bytes=effect.prefetched_bytes,
        pages_freed=effect.pages_freed,
        pause_us=effect.pause_us,
    )


def _judge(action: WorkerAction, command: Command | None, done: Done) -> tuple[int, int, int]:
    """Status, executed action and refusal. What the engine did counts, also beside something it refused."""
    if command is None:
        return REFUSED, HOLD, done.refusal
    chosen, refusal = action.action, done.refusal
    moves = chosen in MOVES
    took = done.quota is not None and -RHO_SLACK <= done.quota.rho - command.rho <= RHO_SLACK
    executed = chosen if (done.moved is not None if moves else took) else HOLD
    if refusal != NONE:
        return REFUSED, executed, refusal
    if moves and done.moved is None:
        return DEFERRED, executed, BUDGET_EXHAUSTED
    if command.rho < action.target_rho - RHO_SLACK:
        return CLIPPED, executed, CLASS_FORBIDS
    if not took:
        return CLIPPED, executed, ENGINE_REFUSED
    return ACCEPTED, executed, NONE
