"""Sessions that leave the card so that their memory can be given back: dropped, swapped out or preempted.

Each is two-phase as all that moves memory: the pool marks the session as leaving, the effect is had, and only then
are the blocks free; a swap-out that fails leaves the session where it was.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import IllegalTransition
from services.actuator.memory.pool import Pool, SessionState
from services.actuator.memory.shrink_terms import Stage

I8 = NDArray[np.int64]


class Effects(Protocol):
    """What a shrink has done outside the pool; each returns when it is done. Blocks are int64 [n]."""

    def swap_out(self, owner: int, blocks: I8) -> bool:
        """Copy an idle session's blocks to a lower tier; False: it did not, and nothing is kept there."""
        ...

    def dropped(self, owner: int, blocks: I8, has_copy: bool) -> None:
        """These blocks of an idle session are about to be freed; without a copy its next turn recomputes them."""
        ...

    def preempt(self, owner: int, blocks: I8) -> bool:
        """Take a running request off the card, to be run again later; False: it stays."""
        ...

    def move(self, moves: I8) -> bool:
        """Copy blocks int64 [n, 2] of (source, destination) inside the arena; False: it failed and has stopped."""
        ...

    def unmap(self, groups: I8) -> None:
        """Give the memory of these groups, int64 [n], back to the card."""
        ...

    def boundary(self) -> None:
        """Wait until the engine has passed an iteration boundary, where it calls ``Pool.tick``."""
        ...


class Departures:
    """Who left one pool for one shrink, and who could not."""

    def __init__(self, pool: Pool, effects: Effects) -> None:
        self.evicted = Stage()
        self.preempted = Stage()
        self.copied_out_bytes = 0
        self.forgotten_bytes = 0
        self.tier_failed = False
        """A swap-out failed: the tier is full or broken, so no other is tried."""
        self._pool = pool
        self._effects = effects
        self._stay: set[int] = set()

    def may_go(self, owner: int, state: SessionState) -> bool:
        """Whether ``owner`` is in ``state`` now and did not refuse before."""
        session = self._pool.sessions.get(owner)
        return session is not None and session.state == state and not session.readers and owner not in self._stay

    def bytes_of(self, owner: int) -> int:
        """Of all its blocks on the card."""
        return len(self._pool.table(owner)) * self._pool.geometry.block_bytes

    def drop(self, owner: int, has_copy: bool) -> None:
        """An idle session goes at once: away when a lower tier has it, forgotten otherwise."""
        blocks = self._begin(owner)
        if blocks is None:
            return
        size = self.bytes_of(owner)
        self._effects.dropped(owner, blocks, has_copy)
        self._pool.complete_leave(owner)
        if not has_copy:
            self._pool.free(owner)
            self.forgotten_bytes += size
        _book(self.evicted, size)

    def swap(self, owner: int) -> None:
        """An idle session goes to a lower tier, or stays when that fails."""
        blocks = None if self.tier_failed else self._begin(owner)
        if blocks is None:
            return
        size = self.bytes_of(owner)
        if not self._effects.swap_out(owner, blocks):
            self._pool.abort_leave(owner)
            self.tier_failed = True
            return
        self._pool.complete_leave(owner)
        self.copied_out_bytes += size
        _book(self.evicted, size)

    def preempt(self, owner: int) -> None:
        """A running request goes, unless the engine keeps it."""
        if not self.may_go(owner, SessionState.LIVE):
            return
        size = self.bytes_of(owner)
        if not self._effects.preempt(owner, self._pool.table(owner)):
            self._stay.add(owner)
            return
        self._pool.free(owner)
        _book(self.preempted, size)

    def _begin(self, owner: int) -> I8 | None:
        if not self.may_go(owner, SessionState.IDLE):
            return None  # its next turn began while others left
        try:
            return self._pool.begin_leave(owner)
        except IllegalTransition:  # under relocation for somebody else
            self._stay.add(owner)
            return None


def _book(stage: Stage, size_bytes: int) -> None:
    stage.bytes += size_bytes
    stage.pieces += 1
