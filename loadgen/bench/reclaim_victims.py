"""Which idle sessions to evict so that whole page groups become empty without moving anything."""

from __future__ import annotations

import numpy as np

from loadgen.bench.reclaim_arena import PoolArena
from services.actuator.memory.blocks import FREE


def page_aware_victims(arena: PoolArena, idle: list[int], groups: int) -> list[int]:
    """Sessions of ``idle`` whose going empties up to ``groups`` more groups, greedily the fewest blocks per group.

    Groups that hold a block of anyone else cannot be had. Ties go to the group of lower number.
    """
    pool, per_group = arena.pool, arena.blocks_per_group
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
