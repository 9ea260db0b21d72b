"""Where a tenant's blocks lie in the reclaim benchmark: a real pool, or a mere count of blocks.

The count serves the two references, in which nothing can be stranded: a fixed share per tenant, and perfect packing,
where all tenants share one count.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import FREE
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.planner import plan_blocks
from services.actuator.memory.pool import Pool

I8 = NDArray[np.int64]


class PoolArena:
    """A :class:`Pool` that maps only what the card grants: its hard quota is what is mapped."""

    def __init__(self, geometry: Geometry, order: str) -> None:
        self.pool = Pool(geometry, order=order, hard_groups=0)
        self.blocks_per_group = geometry.blocks_per_group
        self.block_bytes = geometry.block_bytes

    def room(self) -> int:
        return self.pool.free_blocks

    def take(self, owner: int, blocks: int) -> None:
        self.pool.allocate(owner, blocks)

    def rest(self, owner: int) -> None:
        self.pool.make_idle(owner)

    def wake(self, owner: int) -> None:
        self.pool.resume(owner)

    def drop(self, owner: int) -> None:
        self.pool.free(owner)

    def map(self, groups: int) -> None:
        """``groups`` more are mapped."""
        self.pool.set_quota(self.pool.mapped_groups + groups, None, self.pool.generation)
        self.pool.map_groups(groups)

    def give_back(self, groups: int) -> None:
        """Unmap empty groups."""
        given = len(self.pool.give_back(groups))
        if given != groups:
            raise AssertionError(f"{given} of {groups} groups were empty")
        self.pool.set_quota(self.pool.mapped_groups, None, self.pool.generation)

    def compact(self, groups: int) -> tuple[int, list[int]]:
        """Empty up to ``groups`` groups by moves, within one iteration boundary and its grace period: how many,
        and the blocks moved for each."""
        pool = self.pool
        plan = plan_blocks(pool.blocks, want_groups=len(pool.empty_groups()) + groups)
        if not plan.groups_freed:
            return 0, []
        moved = np.bincount(plan.moves[:, 0] // self.blocks_per_group, minlength=pool.geometry.groups)
        committed = pool.commit(pool.prepare(plan.moves))
        if committed.dropped:
            raise AssertionError(f"{committed.dropped} moves dropped with nobody writing between")
        pool.tick()
        return plan.groups_freed, moved[plan.sources].tolist()

    def victims(self, idle: list[int], groups: int) -> list[int]:
        """Sessions of ``idle`` whose going empties up to ``groups`` more groups, greedily the fewest blocks per group.

        Groups that hold a block of anyone else cannot be had. Ties go to the group of lower number.
        """
        pool, per_group = self.pool, self.blocks_per_group
        count = pool.geometry.groups
        held = np.zeros((len(idle), count), np.int64)
        for row, session in enumerate(idle):
            held[row] = np.bincount(pool.table(session) // per_group, minlength=count)
        used = (pool.state.reshape(count, per_group) != FREE).sum(axis=1)
        open_groups = pool.mapped & (used > 0) & (held.sum(axis=0) == used)
        touches = (held > 0).astype(np.float64)
        sizes = held.sum(axis=1).astype(np.float64)
        chosen: list[int] = []
        emptied = 0
        while emptied < groups and open_groups.any():
            cost = np.where(open_groups, sizes @ touches, np.inf)
            rows = np.flatnonzero(touches[:, int(np.argmin(cost))] > 0)
            chosen.extend(idle[row] for row in rows)
            used = used - held[rows].sum(axis=0)
            touches[rows] = 0.0
            gone = open_groups & (used == 0)
            emptied += int(gone.sum())
            open_groups &= ~gone
        return chosen

    def empty_groups(self) -> int:
        return len(self.pool.empty_groups())

    def mapped_groups(self) -> int:
        return self.pool.mapped_groups

    def used_groups(self) -> int:
        """Mapped groups with a block in them."""
        return self.pool.mapped_groups - len(self.pool.empty_groups())

    def occupied(self) -> int:
        """Blocks that hold KV."""
        return self.pool.used_blocks


@dataclasses.dataclass(slots=True)
class Share:
    """Blocks that one tenant has, or several together."""

    capacity_blocks: int
    used_blocks: int = 0


class CountArena:
    """Blocks without a place."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self._held: dict[int, int] = {}

    def room(self) -> int:
        return self.share.capacity_blocks - self.share.used_blocks

    def take(self, owner: int, blocks: int) -> None:
        self._held[owner] = self._held.get(owner, 0) + blocks
        self.share.used_blocks += blocks

    def rest(self, owner: int) -> None:
        pass

    def wake(self, owner: int) -> None:
        pass

    def drop(self, owner: int) -> None:
        self.share.used_blocks -= self._held.pop(owner)
