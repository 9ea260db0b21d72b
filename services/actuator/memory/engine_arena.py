"""The engine's end of relocation: tickets over a pool, their leases, and the swap at the iteration boundary.

A caller prepares, copies in the shared arena, commits. The engine stops for nothing but the re-pointing of tables,
which happens in :meth:`EngineArena.boundary` between two iterations. A ticket ends at its lease; while its copier
still writes (the gate says so) the blocks stay as they are, because what is reserved may only change hands when
nobody writes there. One ticket is open at a time. Pure: time comes in, frames come and go as structs.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final, Generic, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.engine import Failure, Move, Prepare, Receipt, Ticket
from services.actuator.memory.states import BlockState
from services.actuator.memory.tickets import (
    Fence,
    Figures,
    Held,
    NoCopiers,
    P,
    Planned,
    Planner,
    failure_of,
    moves_of,
)
from services.errors import MemoryPlaneError

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

REMEMBERED: Final = 64
"""Ended tickets kept for repeats and late questions."""


class EngineArena(Generic[P]):
    """Relocation in one worker's pool.

    ``first_ticket`` (> 0) must differ between lives of the engine, so that a ticket of an earlier life is unknown
    and never somebody else's. ``plan`` chooses moves for a byte budget. ``base`` makes an action's receipt
    with the quota in force. ``same`` (optional check at run time) tells for bool [n] whether both blocks of each
    move hold the same bytes. ``copy`` is the engine's own mover, None where it has none. ``scale``: bytes told per
    byte of the arena.
    """

    def __init__(
        self,
        pool: P,
        *,
        first_ticket: int,
        plan: Planner[P],
        base: Callable[[str], Receipt],
        fence: Fence | None = None,
        same: Callable[[I8], Bool] | None = None,
        copy: Callable[[I8], object] | None = None,
        scale: int = 1,
        timer_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.pool = pool
        self.figures = Figures()
        self._next = first_ticket
        self._plan = plan
        self._base = base
        self._fence = fence or NoCopiers()
        self._same = same
        self._copy = copy
        self._block_bytes = pool.geometry.block_bytes * scale
        self._timer_ns = timer_ns
        self._open: Held | None = None
        self._ended: OrderedDict[int, Held] = OrderedDict()

    @property
    def open_ticket(self) -> Ticket | None:
        """The ticket that is not at its end yet, if any."""
        return self._open.wire if self._open is not None else None

    def prepare(self, command: Prepare, now_ns: int) -> Ticket | Failure:
        """Reserve destinations and pin sources; an empty ticket when nothing can be gained.

        ``busy`` (with the open ticket's number and lease) while another is open, ``late`` when the lease is not in
        the future, else what the pool says about the moves. The same action's repeat gets the ticket it has.
        """
        self._expire(now_ns)
        held = self._open
        if held is not None:
            again = held.stage == "open" and command.action_id and held.action_id == command.action_id
            if again and command.moves in ((), held.wire.plan):
                return held.wire
            numbers = {"ticket": float(held.wire.ticket), "lease_ns": float(held.lease_ns), "now_ns": float(now_ns)}
            return Failure("busy", f"ticket {held.wire.ticket} is {held.stage}", numbers)
        if now_ns >= command.lease_ns:
            return Failure("late", numbers={"now_ns": float(now_ns), "lease_ns": float(command.lease_ns)})
        try:
            chosen = Planned(moves_of(command.moves)) if command.moves else self._plan(self.pool, command.budget_bytes)
            moves = chosen.moves
            if not len(moves):
                return Ticket(0, 0, 0)
            prepared = self.pool.prepare(moves)
        except MemoryPlaneError as error:
            return failure_of(error)
        number, self._next = self._next, self._next + 1
        plan = command.moves or tuple(Move(int(source), int(destination)) for source, destination in moves)
        least = chosen.lower_bound_blocks * self._block_bytes
        wire = Ticket(number, len(moves), len(moves) * self._block_bytes, plan, least)
        self._open = Held(wire, prepared, command.action_id, command.lease_ns)
        self._fence.open(number)
        self.figures.prepared += 1
        return wire

    def copy(self, number: int, now_ns: int) -> Receipt | Failure:
        """Copy with the engine's own mover."""
        held = self._find(number, now_ns)
        if isinstance(held, Failure):
            return held
        if self._copy is None:
            return Failure("unsupported", "the caller copies in the shared arena")
        if held.stage == "open" and not held.copied:
            self._copy(held.pool.moves)
            held.copied = True
        return held.receipt or self._base(held.action_id)

    def commit(self, number: int, now_ns: int) -> Receipt | Failure | None:
        """Have the tables re-pointed at the next boundary: None, the receipt comes from there. A repeat after
        that gets the receipt. ``busy`` while somebody copies, or when bytes are checked and differ."""
        held = self._find(number, now_ns)
        if isinstance(held, Failure):
            return held
        if held.stage == "committed":
            return held.receipt
        if held.stage != "open":
            return None if held.stage == "committing" else self._unknown(number)
        if not self._fence.close():
            return Failure("busy", f"ticket {number} is being copied", {"ticket": float(number)})
        differing = self._differing(held)
        if differing:
            self._fence.open(number)
            numbers = {"ticket": float(number), "differing": float(differing), "moves": float(held.wire.moves)}
            return Failure("busy", f"ticket {number} is not copied: {differing} blocks differ", numbers)
        held.stage = "committing"
        return None

    def abort(self, number: int, now_ns: int) -> Receipt | Failure:
        """Give a ticket up. Its blocks are free at once, or as soon as its copier stops."""
        held = self._find(number, now_ns)
        if isinstance(held, Failure):
            return held
        if held.stage in ("committing", "committed"):
            return self._unknown(number)
        if held.stage == "open":
            self._end(held)
        return self._base(held.action_id)

    def boundary(self, now_ns: int) -> list[tuple[int, Receipt]]:
        """Between two iterations: the grace period ends, committed tables are re-pointed, leases are looked at.
        Gives the receipts of what was committed, each with its pause."""
        self.pool.tick()
        held = self._open
        if held is None:
            return []
        if held.stage != "committing":
            if held.stage == "ending":
                self._end(held)
            else:
                self._expire(now_ns)
            return []
        before_ns = self._timer_ns()
        done = self.pool.commit(held.pool)
        pause_us = (self._timer_ns() - before_ns) / 1e3
        figures = self.figures
        figures.committed += 1
        figures.moved += done.moved
        figures.dropped += done.dropped
        figures.longest_pause_us = max(figures.longest_pause_us, pause_us)
        held.receipt = msgspec.structs.replace(
            self._base(held.action_id),
            compacted_bytes=done.moved * self._block_bytes,
            pages_freed=self._emptied(done.moves),
            pause_us=pause_us,
            lower_bound_bytes=held.wire.lower_bound_bytes,
            dropped_moves=done.dropped,
            detail=f"{done.moved} moved, {done.dropped} dropped",
        )
        self._close(held, "committed")
        return [(held.wire.ticket, held.receipt)]

    def receipt(self, action_id: str) -> Receipt | Failure:
        """What became of an action's relocation; ``done`` is False while its ticket is open."""
        held = self._open
        if held is not None and held.action_id == action_id:
            return msgspec.structs.replace(self._base(action_id), done=False, detail=held.stage)
        for ended in reversed(self._ended.values()):
            if ended.action_id == action_id:
                return ended.receipt or msgspec.structs.replace(self._base(action_id), detail=ended.stage)
        return Failure("unknown_ticket", f"action {action_id}")

    def _find(self, number: int, now_ns: int) -> Held | Failure:
        self._expire(now_ns)
        held = self._open
        if held is not None and held.wire.ticket == number:
            return held
        ended = self._ended.get(number)
        return ended if ended is not None else self._unknown(number)

    def _unknown(self, number: int) -> Failure:
        held = self._ended.get(number)
        numbers = {"ticket": float(number), "newest": float(self._next - 1), "open": float(self._open is not None)}
        return Failure("unknown_ticket", f"ticket {number}" + (f" was {held.stage}" if held else ""), numbers)

    def _differing(self, held: Held) -> int:
        if self._same is None:
            return 0
        moves = held.pool.moves
        unchanged = self.pool.epoch[moves[:, 0]] == held.pool.epochs  # a changed one is dropped by the commit
        return int(np.count_nonzero(~self._same(moves[unchanged])))

    def _expire(self, now_ns: int) -> None:
        held = self._open
        if held is not None and held.stage == "open" and now_ns >= held.lease_ns:
            self.figures.lapsed += 1
            self._end(held)

    def _end(self, held: Held) -> None:
        """Sources rest at once; destinations go through the grace period as soon as nobody writes there."""
        stopped = self._fence.close()
        if held.stage == "open":
            self.pool.abort(held.pool, copier_stopped=stopped)
            self.figures.aborted += 1
            self.figures.fenced += not stopped
            held.stage = "ending"
        elif stopped:
            self.pool.release_held(held.pool.number)
        if stopped:
            self._close(held, "aborted")

    def _close(self, held: Held, stage: Literal["committed", "aborted"]) -> None:
        held.stage = stage
        self._open = None
        self._ended[held.wire.ticket] = held
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)

    def _emptied(self, moves: I8) -> int:
        """Page groups among the sources' in which nothing but the grace period's blocks is left."""
        groups = np.unique(self.pool.geometry.group_of(moves[:, 0]))
        states = self.pool.state.reshape(self.pool.geometry.groups, -1)[groups]
        left = (states != BlockState.FREE) & (states != BlockState.QUARANTINED)
        return int(np.count_nonzero(~left.any(axis=1)))
