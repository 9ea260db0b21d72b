"""A card in simulated time: effects of a shrink that take as long as they are told, on blocks with known content."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.pool import Pool, SessionState
from services.actuator.memory.shrink_terms import Rates
from services.clock import ManualClock

I8 = NDArray[np.int64]
GONE = -1


class Card:
    """``content`` int64 [blocks] stands for the bytes: block i of owner o holds o x 1,000,000 + i."""

    def __init__(self, pool: Pool, rates: Rates, *, link_slower: float = 1.0, copy_slower: float = 1.0) -> None:
        self.pool = pool
        self.clock = ManualClock(1_000)
        self.host: dict[int, I8] = {}
        self.preempted: list[int] = []
        self.forgotten: list[int] = []
        self.tier_works = True
        self.swaps_asked = 0
        self.mover_works = True
        self.at_boundary: list[Callable[[], object]] = []
        """What the engine does at the next boundaries, one each."""
        self._rates = rates
        self._link_slower, self._copy_slower = link_slower, copy_slower
        self._content: I8 = np.full(pool.geometry.blocks, GONE)

    def run(self, owner: int, blocks: int, *, pinned: bool = False) -> int:
        """A running request with full blocks."""
        self.pool.allocate(owner, blocks, pinned=pinned)
        self.pool.fill(owner, len(self.pool.table(owner)))
        table = self.pool.table(owner)
        self._content[table] = _tags(owner, len(table))
        return owner

    def idle(self, owner: int, blocks: int, *, copied: bool = False) -> int:
        """A session between turns."""
        self.run(owner, blocks)
        self.pool.make_idle(owner, float(owner))
        if copied:
            self.host[owner] = _tags(owner, blocks)
        return owner

    def verify(self) -> None:
        """Every session on the card or away has the bytes that it had."""
        self.pool.check()
        for owner, session in self.pool.sessions.items():
            if session.state == SessionState.AWAY:
                found, wanted = self.host[owner], _tags(owner, session.away)
            else:
                table = self.pool.table(owner)
                found, wanted = self._content[table], _tags(owner, len(table))
            assert np.array_equal(found, wanted), f"session {owner} ({session.state.name}) lost its bytes"

    def swap_out(self, owner: int, blocks: I8) -> bool:
        self.swaps_asked += 1
        if not self.tier_works:
            return False
        size = len(blocks) * self.pool.geometry.block_bytes
        self._pass(size / self._rates.link_bytes_per_s * self._link_slower)
        self.host[owner] = self._content[blocks].copy()
        return True

    def dropped(self, owner: int, blocks: I8, has_copy: bool) -> None:
        if has_copy:
            assert owner in self.host, f"session {owner} has no copy anywhere"
        else:
            self.forgotten.append(owner)

    def preempt(self, owner: int, blocks: I8) -> bool:
        self.preempted.append(owner)
        return True

    def move(self, moves: I8) -> bool:
        if not self.mover_works:
            return False
        size = len(moves) * self.pool.geometry.block_bytes
        self._pass(size / self._rates.copy_bytes_per_s * self._copy_slower)
        self._content[moves[:, 1]] = self._content[moves[:, 0]]
        return True

    def unmap(self, groups: I8) -> None:
        self._pass(len(groups) * self._rates.unmap_group_s)
        self._content.reshape(self.pool.geometry.groups, -1)[groups] = GONE

    def boundary(self) -> None:
        self._pass(self._rates.boundary_s)
        self.pool.tick()
        if self.at_boundary:
            self.at_boundary.pop(0)()

    def _pass(self, seconds: float) -> None:
        self.clock.advance_to(self.clock.now_ns() + round(seconds * 1e9))


def _tags(owner: int, blocks: int) -> I8:
    return owner * 1_000_000 + np.arange(blocks, dtype=np.int64)
