"""Compaction in a running vLLM: prepare plans, commit copies and re-points between two steps, some moves a call.

A ticket reserves nothing, so an actuator that dies leaves nothing behind: whatever is no longer as it was planned is
left out at commit. The caller's copy has nothing to do, because bytes and tables change in one call.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.engine import Failure, Move, Prepare, Receipt, ReplyBody, Ticket
from schemas.movement import Moved
from services.actuator.engines.vllm import tables
from services.actuator.engines.vllm.holders import Holders
from services.actuator.memory import planner
from services.actuator.memory.mover import checked_moves
from services.errors import MemoryPlaneError

if TYPE_CHECKING:
    from services.actuator.engines.vllm.steward import Steward

I8 = NDArray[np.int64]
log = logging.getLogger(__name__)

MOVES_FIRST: Final = 32
"""Moves in the first call; later ones have as many as took the allowed pause."""
MOVES_MOST: Final = 4096


class Compaction:
    """Of one engine; one ticket at a time."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self._problem: str | None = None
        self._ticket: tuple[int, str, I8, int, int] | None = None
        """Number, action id, moves left, lower bound in bytes, lease."""
        self._next = 1
        self._receipt: Receipt | None = None
        """Of the ticket being committed, so far."""
        self._per_call = MOVES_FIRST
        self._holders = Holders()
        self._waited_s = 0.0
        """Of the latest call: for steps under way and for the way to the workers and back. No move less saves it."""
        self.compacted_bytes = 0

    def capabilities(self) -> tuple[str, ...]:
        """``compact`` where every worker can; the first question loads what moving needs."""
        return () if self.problem() else ("compact",)

    def problem(self) -> str:
        """Why this engine cannot compact; empty: it can. Asked of the workers once."""
        if self._problem is None:
            steward = self._steward
            try:
                tables.table_of(steward.scheduler)
                tables.offloader(steward.scheduler)
                answers = steward.core.model_executor.collective_rpc("tidegate_problem")
                self._problem = next((str(one) for one in answers if one), "")
            except (TypeError, AttributeError, NotImplementedError) as error:
                self._problem = f"{type(error).__name__}: {error}"
            if self._problem:
                log.warning("Tidegate does not compact here: %s", self._problem)
        return self._problem

    def prepare(self, ask: Prepare, now_ns: int) -> ReplyBody:
        """Plan within the budget, or take the caller's moves."""
        steward = self._steward
        if self.problem():
            return Failure("unsupported", self.problem())
        if now_ns >= ask.lease_ns:
            return Failure("late", numbers={"now_ns": float(now_ns), "lease_ns": float(ask.lease_ns)})
        lower_bound_bytes = 0
        if ask.moves:
            moves = np.array([(one.source, one.destination) for one in ask.moves], np.int64)
            try:
                checked_moves(moves, steward.geometry)
            except MemoryPlaneError as error:
                return Failure("out_of_range", str(error))
        else:
            seen = tables.layout(steward.pool, steward.geometry, self._held())
            plan = planner.plan(
                seen.occupancy, steward.geometry, movable=seen.movable, holes=seen.free, budget_bytes=ask.budget_bytes
            )
            moves, lower_bound_bytes = plan.moves, plan.lower_bound_bytes
        number, self._next = self._next, self._next + 1
        self._receipt = None
        self._ticket = (number, ask.action_id, moves, lower_bound_bytes, ask.lease_ns) if len(moves) else None
        return Ticket(
            number,
            len(moves),
            len(moves) * steward.block_bytes,
            tuple(Move(source, destination) for source, destination in moves.tolist()),
            lower_bound_bytes,
        )

    def copy(self, number: int) -> ReplyBody:
        """Nothing yet: see the module."""
        if self._ticket is None or self._ticket[0] != number:
            return self._unknown(number)
        return self._steward.receipt(self._ticket[1])

    def commit(self, number: int, now_ns: int) -> ReplyBody | None:
        """Some moves now; None while moves are left for after the next step."""
        if self._ticket is None or self._ticket[0] != number:
            return self._unknown(number)
        _, action_id, left, lower_bound_bytes, lease_ns = self._ticket
        steward = self._steward
        so_far = self._receipt or msgspec.structs.replace(
            steward.receipt(action_id), lower_bound_bytes=lower_bound_bytes
        )
        if now_ns >= lease_ns:
            return self._finish(msgspec.structs.replace(so_far, dropped_moves=so_far.dropped_moves + len(left)))
        started = time.perf_counter()
        empty_before = self._empty_groups()
        part, left = left[: self._per_call], left[self._per_call :]
        valid = tables.still_valid(steward.pool, part, self._held())
        valid = tables.held_by_tables(steward.scheduler, self._holders, valid)
        self._waited_s = 0.0
        try:
            copy_s = self._move(valid)
        except Exception as error:
            log.exception("Tidegate compacts no more in this engine")
            return self._failed(error)
        pause_s = time.perf_counter() - started
        self._adapt(len(part), pause_s - self._waited_s)
        size = len(valid) * steward.block_bytes
        self.compacted_bytes += size
        moved = Moved("move", "worker", size, len(valid), copy_s, asked_by=action_id)
        so_far = msgspec.structs.replace(
            so_far,
            compacted_bytes=so_far.compacted_bytes + size,
            dropped_moves=so_far.dropped_moves + len(part) - len(valid),
            pages_freed=so_far.pages_freed + max(self._empty_groups() - empty_before, 0),
            pause_us=max(so_far.pause_us, pause_s * 1e6),
            moved=_added(so_far.moved, moved),
        )
        if len(left):
            self._ticket, self._receipt = (number, action_id, left, lower_bound_bytes, lease_ns), so_far
            return None
        return self._finish(so_far)

    def abort(self, number: int) -> ReplyBody:
        if self._ticket is not None and self._ticket[0] == number:
            self._ticket = self._receipt = None
        return self._steward.receipt("")

    def _move(self, moves: I8) -> float:
        """Bytes first: should a worker fail, the scheduler's tables still say the truth, and the workers go back to it.
        Seconds of the slowest worker."""
        if not len(moves):
            return 0.0
        steward = self._steward
        call = steward.core.model_executor.collective_rpc
        asked = time.perf_counter()
        try:
            answers = call("tidegate_relocate", args=(moves.tolist(),))
        except Exception:
            call("tidegate_undo", args=(moves.tolist(),))
            raise
        copy_s = max(map(float, answers))
        self._waited_s = max(time.perf_counter() - asked - copy_s, 0.0)
        tables.repoint(steward.scheduler, self._holders, moves)
        return copy_s

    def _failed(self, error: Exception) -> Failure:
        """What failed once is not tried again."""
        self._problem = f"{type(error).__name__}: {error}"[:200]
        self._ticket = self._receipt = None
        return Failure("failed", self._problem)

    def _held(self) -> set[int]:
        queue: Any = self._steward.core.batch_queue
        return tables.busy(self._steward.scheduler, in_flight=bool(queue))

    def _empty_groups(self) -> int:
        steward = self._steward
        used = np.zeros(steward.geometry.blocks, np.bool_)
        used[: steward.pool.num_gpu_blocks] = steward.pool.holding
        return int((~used.reshape(steward.geometry.groups, -1).any(axis=1)).sum())

    def _adapt(self, moves: int, pause_s: float) -> None:
        allowed_s = self._steward.settings.pause_ms / 1e3
        if moves and pause_s > 0:
            fitting = int(moves * allowed_s / pause_s)
            self._per_call = min(max(fitting, 1), 2 * self._per_call, MOVES_MOST)

    def _finish(self, said: Receipt) -> Receipt:
        self._ticket = self._receipt = None
        return self._steward.receipts.keep(msgspec.structs.replace(said, mapped_bytes=self._steward.mapped_bytes))

    def _unknown(self, number: int) -> Failure:
        return Failure("unknown_ticket", numbers={"ticket": float(number)})


def _added(before: tuple[Moved, ...], more: Moved) -> tuple[Moved, ...]:
    if not before:
        return (more,)
    (one,) = before
    return (
        msgspec.structs.replace(
            one, bytes=one.bytes + more.bytes, pieces=one.pieces + more.pieces, seconds=one.seconds + more.seconds
        ),
    )
