"""From what an engine did with a command to the WorkerOutcome that says so. Pure.

Requested and effective stay apart: an outcome's quota is what the engine reported in force, and the executed
action is ``hold`` whenever the engine does not show the effect.
"""

from __future__ import annotations

import msgspec

from schemas.actions import Action, WorkerAction
from schemas.engine import Receipt
from schemas.outcomes import OutcomeKind, Refusal, Status, WorkerOutcome
from services.actuator.account import Known
from services.actuator.effects import Command
from services.actuator.leases import RHO_SLACK


class Done(msgspec.Struct):
    """What one worker's engine said in a step."""

    refusal: Refusal = Refusal.NONE
    detail: str = ""
    moved: Receipt | None = None
    """Answer to compact or evict."""
    quota: Receipt | None = None
    """Answer to set_quota; None when it was refused or never came."""


def outcome_of(action: WorkerAction, command: Command | None, done: Done, known: Known | None) -> WorkerOutcome:
    """The receipt of a command. ``command`` None: it was never made; ``known`` None: nobody knows the worker."""
    status, refusal = _judge(action, command, done)
    moved = done.moved
    quota = done.quota
    return WorkerOutcome(
        action.worker,
        action.action_id,
        OutcomeKind.RECEIPT,
        status,
        action.action,
        _executed(action, command, done),
        refusal,
        action.target_rho,
        quota.rho if quota is not None else known.rho if known is not None else 0.0,
        quota.generation if quota is not None else known.generation if known is not None else 0,
        quota.max_running if quota is not None else known.max_running if known is not None else 0,
        action.policy,
        action.probability,
        action.mask,
        action.hold,
        quota.quota_soft_bytes if quota is not None else known.soft_bytes if known is not None else 0,
        quota.quota_hard_bytes if quota is not None else known.hard_bytes if known is not None else 0,
        moved.compacted_bytes if moved is not None else 0,
        moved.evicted_bytes if moved is not None else 0,
        moved.prefetched_bytes if moved is not None else 0,
        moved.pages_freed if moved is not None else 0,
        moved.pause_us if moved is not None else 0.0,
        done.detail,
    )


def completion_of(receipt: WorkerOutcome, effect: Receipt, known: Known, detail: str = "") -> WorkerOutcome:
    """The later word on an effect that outlasted its step, by the action's id."""
    return msgspec.structs.replace(
        receipt,
        kind=int(OutcomeKind.COMPLETION),
        effective_rho=known.rho,
        effective_generation=known.generation,
        effective_max_running=known.max_running,
        quota_soft_bytes=known.soft_bytes,
        quota_hard_bytes=known.hard_bytes,
        compacted_bytes=effect.compacted_bytes,
        evicted_bytes=effect.evicted_bytes,
        prefetched_bytes=effect.prefetched_bytes,
        pages_freed=effect.pages_freed,
        pause_us=effect.pause_us,
        detail=detail or effect.detail,
    )


def _took_quota(command: Command, quota: Receipt | None) -> bool:
    return quota is not None and abs(quota.rho - command.rho) <= RHO_SLACK


def _executed(action: WorkerAction, command: Command | None, done: Done) -> int:
    if command is None:
        return Action.HOLD
    if action.action in (Action.WIDEN, Action.TIGHTEN):
        return action.action if _took_quota(command, done.quota) else Action.HOLD
    if action.action in (Action.COMPACT, Action.EVICT):
        return action.action if done.moved is not None else Action.HOLD
    return Action.HOLD


def _judge(action: WorkerAction, command: Command | None, done: Done) -> tuple[Status, Refusal]:
    if done.refusal is not Refusal.NONE or command is None:
        return Status.REFUSED, done.refusal
    if action.action in (Action.COMPACT, Action.EVICT) and done.moved is None:
        return Status.DEFERRED, Refusal.BUDGET_EXHAUSTED
    if command.rho < action.target_rho - RHO_SLACK:
        return Status.CLIPPED, Refusal.CLASS_FORBIDS
    if not _took_quota(command, done.quota):
        return Status.CLIPPED, Refusal.ENGINE_REFUSED
    return Status.ACCEPTED, Refusal.NONE
