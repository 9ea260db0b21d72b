"""What can be read off a pool: states, tables, idle sessions, counts, and its own consistency."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory import invariants
from services.actuator.memory import occupancy as views
from services.actuator.memory.blocks import Blocks
from services.actuator.memory.errors import IllegalTransition
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.groups import Groups, MapCounters
from services.actuator.memory.occupancy import Occupancy
from services.actuator.memory.quota import Quota
from services.actuator.memory.relocations import Relocations
from services.actuator.memory.states import BlockState, SessionState
from services.actuator.memory.tables import Session, Tables

I8 = NDArray[np.int64]
F8 = NDArray[np.float64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]


class PoolView:
    """The reading half of :class:`~services.actuator.memory.pool.Pool`; nothing here changes anything."""

    geometry: Geometry
    blocks: Blocks
    tables: Tables
    quota: Quota
    groups: Groups
    relocations: Relocations
    sessions: dict[int, Session]
    _idle: dict[int, None]
    """Idle owners, longest idle first."""

    @property
    def state(self) -> U1:
        """BlockState of every block, uint8 [blocks]; read only by convention, as are the next four."""
        return self.blocks.state

    @property
    def owner(self) -> I8:
        """Owner of every block, int64 [blocks]; ``blocks.NO_OWNER`` where it is nobody's."""
        return self.blocks.owner

    @property
    def epoch(self) -> NDArray[np.uint32]:
        """One more each time a block's content or owner changed, uint32 [blocks]."""
        return self.blocks.epoch

    @property
    def pinned(self) -> Bool:
        """Blocks that relocation leaves alone, bool [blocks]."""
        return self.blocks.pinned

    @property
    def mapped(self) -> Bool:
        """Mapped groups, bool [groups]."""
        return self.blocks.mapped

    @property
    def mapped_groups(self) -> int:
        return self.blocks.mapped_groups

    @property
    def used_blocks(self) -> int:
        """Blocks in any state but FREE."""
        return self.blocks.used

    @property
    def free_blocks(self) -> int:
        """Free blocks in mapped groups, protected ones included."""
        return self.blocks.free_blocks()

    @property
    def generation(self) -> int:
        """Of the quota in force."""
        return self.quota.generation

    @property
    def counters(self) -> MapCounters:
        return self.groups.counters

    def counts(self) -> I8:
        """Blocks by state, int64 [8]; index with BlockState. FREE counts unmapped blocks too."""
        return np.bincount(self.blocks.state, minlength=len(BlockState))

    def table(self, owner: int) -> I8:
        """The owner's blocks in order, int64 [n], a copy. A shared prefix's blocks are in the prefix's table."""
        return self.tables.table(self._session(owner)).copy()

    def session_state(self, owner: int) -> SessionState:
        return self._session(owner).state

    def idle_owners(self) -> tuple[I8, I8, F8]:
        """Idle sessions that nobody reads, longest idle first: owners int64 [n], their blocks int64 [n], and since
        when float64 [n]."""
        sessions = self.sessions
        owners = [owner for owner in self._idle if not sessions[owner].readers]
        blocks = np.array([sessions[owner].size for owner in owners], np.int64)
        return np.array(owners, np.int64), blocks, np.array([sessions[owner].since for owner in owners], np.float64)

    def movable(self) -> Bool:
        """Blocks that a plan may take as sources, bool [blocks]."""
        return self.blocks.movable_mask()

    def holes(self) -> Bool:
        """Blocks that a plan may take as destinations, bool [blocks]: free, mapped, not protected."""
        free = self.blocks.free_mask().reshape(self.geometry.groups, -1)
        open_groups = self.blocks.protected < 0
        holes: Bool = (free & open_groups[:, None]).reshape(-1)
        return holes

    def occupancy(self) -> Occupancy:
        return views.occupancy(self.blocks)

    def fragmentation(self) -> float:
        """f_frag: entropy of the free runs in mapped groups, 0 to 1."""
        return views.fragmentation(self.blocks.free_mask())

    def check(self) -> None:
        """Raise InvariantBroken if the pool contradicts itself. For tests and restarts: it takes tens of milliseconds
        for 100,000 blocks."""
        invariants.check(self.blocks, self.tables, self.sessions, self._idle, self.relocations, self.quota)

    def _session(self, owner: int) -> Session:
        session = self.sessions.get(owner)
        if session is None:
            raise IllegalTransition("session", owner, "unknown", "do anything")
        return session
