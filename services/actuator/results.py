"""From what an engine did with a command to the OutcomeBatch that says so. Pure.

Requested and effective stay apart: an outcome's quota is what the engine reported in force, and the executed
action is ``hold`` whenever the engine does not show the effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from schemas.actions import Action, ActionBatch, Columns
from schemas.codec import pack_row
from schemas.engine import Receipt
from schemas.identity import SCHEMA_VERSION
from schemas.outcomes import (
    Effect,
    OutcomeBatch,
    OutcomeKind,
    Status,
    WorkerOutcome,
    outcome_batch,
    outcomes_of,
)
from services.actuator.account import Known
from services.actuator.effects import MOVES, Command
from services.actuator.leases import BUDGET_EXHAUSTED, CLASS_FORBIDS, ENGINE_REFUSED, NONE, RHO_SLACK
from services.actuator.memory.receipts import IN_CARD

HOLD: Final = int(Action.HOLD)
ACCEPTED: Final = int(Status.ACCEPTED)
CLIPPED: Final = int(Status.CLIPPED)
DEFERRED: Final = int(Status.DEFERRED)
REFUSED: Final = int(Status.REFUSED)


class Results:
    """The outcome columns of a batch, filled in while its engines answer.

    They begin as what nearly all commands come to (accepted, executed as asked); :meth:`settle` is told of every
    command that may have come to something else.
    """

    def __init__(self, batch: ActionBatch, columns: Columns) -> None:
        rows = len(batch.workers)
        self.refusals = bytearray(rows)
        """A Refusal each: of the planner's at first, the engines' may follow."""
        self._batch = batch
        self._target_rho = columns.target_rho
        self._statuses = bytearray(rows)
        self._executed = bytearray(batch.actions)
        self._effects: dict[int, Effect] = {}
        self._details: dict[int, str] = {}

    def explain(self, row: int, detail: str) -> None:
        """Words for a row, after those it has; empty ones are none."""
        if detail:
            before = self._details.get(row)
            self._details[row] = detail if before is None else f"{before}; {detail}"

    def moved(self, row: int, said: Receipt) -> None:
        """Note what a row's engine moved, beside what it moved before in this step."""
        effect, before = effect_of(row, said), self._effects.get(row)
        self._effects[row] = effect if before is None else both(before, effect)

    def refuse(self, row: int) -> None:
        """A command that was never made, for the refusal already noted."""
        self._statuses[row], self._executed[row] = REFUSED, HOLD

    def settle(self, row: int, command: Command, moved: Receipt | None, quota: Receipt | None) -> None:
        """Judge a command. ``moved``: the answer to compact or evict; ``quota``: to set_quota, None when it was
        refused or never came."""
        action, target_rho, refusal = self._batch.actions[row], self._target_rho[row], self.refusals[row]
        judged = judge(action, target_rho, command, refusal, moved, quota)
        self._statuses[row], self._executed[row], self.refusals[row] = judged

    def batch(self, node: str, t_ns: int, known: Sequence[Known | None]) -> OutcomeBatch:
        """The receipts: what was asked is echoed, what is in force is what ``known`` says, which follows the
        engines' answers; None: nobody knows the worker."""
        asked = self._batch
        return OutcomeBatch(
            node,
            asked.boot_id,
            asked.step,
            SCHEMA_VERSION,
            t_ns,
            asked.workers,
            asked.policies,
            asked.policy_index,
            bytes(self._statuses),
            asked.actions,
            bytes(self._executed),
            bytes(self.refusals),
            asked.target_rho,
            pack_row([one.rho if one is not None else 0.0 for one in known], "d"),
            pack_row([one.generation if one is not None else 0 for one in known], "q"),
            pack_row([one.max_running if one is not None else 0 for one in known], "q"),
            pack_row([one.soft_bytes if one is not None else 0 for one in known], "q"),
            pack_row([one.hard_bytes if one is not None else 0 for one in known], "q"),
            asked.probabilities,
            asked.masks,
            asked.holds,
            tuple(self._effects.values()),
            (),
            self._details,
        )


def completed(batch: OutcomeBatch, ended: Sequence[WorkerOutcome]) -> OutcomeBatch:
    """The receipts of a step and, after them, the later words on effects of earlier ones."""
    rows = [*outcomes_of(batch), *ended]
    return outcome_batch(batch.node, batch.boot_id, batch.step, batch.t_ns, rows)


def completion_of(receipt: WorkerOutcome, effect: Receipt, known: Known, detail: str = "") -> WorkerOutcome:
    """The later word on an effect that outlasted its step, by the action's id: all of it, what the actuator itself
    copied in the step included."""
    copied = tuple(one for one in receipt.moved if one.kind == IN_CARD and one not in effect.moved)
    return receipt._replace(
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
        lower_bound_bytes=effect.lower_bound_bytes or (receipt.lower_bound_bytes if copied else 0),
        dropped_moves=effect.dropped_moves,
        moved=copied + effect.moved,
        detail=detail or effect.detail,
    )


def effect_of(row: int, said: Receipt) -> Effect:
    """The bytes in a receipt."""
    return Effect(
        row,
        said.compacted_bytes,
        said.evicted_bytes,
        said.prefetched_bytes,
        said.pages_freed,
        said.pause_us,
        said.lower_bound_bytes,
        said.dropped_moves,
        said.moved,
    )


def both(one: Effect, other: Effect) -> Effect:
    """Two effects of a row together."""
    return Effect(
        one.row,
        one.compacted_bytes + other.compacted_bytes,
        one.evicted_bytes + other.evicted_bytes,
        one.prefetched_bytes + other.prefetched_bytes,
        one.pages_freed + other.pages_freed,
        one.pause_us + other.pause_us,
        one.lower_bound_bytes + other.lower_bound_bytes,
        one.dropped_moves + other.dropped_moves,
        one.moved + other.moved,
    )


def judge(
    action: int, target_rho: float, command: Command, refusal: int, moved: Receipt | None, quota: Receipt | None
) -> tuple[int, int, int]:
    """Status, executed action and refusal. What the engine did counts, also beside something it refused."""
    moves = action in MOVES
    took = quota is not None and -RHO_SLACK <= quota.rho - command.rho <= RHO_SLACK
    executed = action if (moved is not None if moves else took) else HOLD
    if refusal != NONE:
        return REFUSED, executed, refusal
    if moves and moved is None:
        return DEFERRED, executed, BUDGET_EXHAUSTED
    if command.rho < target_rho - RHO_SLACK:
        return CLIPPED, executed, CLASS_FORBIDS
    if not took:
        return CLIPPED, executed, ENGINE_REFUSED
    return ACCEPTED, executed, NONE
