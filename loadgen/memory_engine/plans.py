"""Which blocks the engine moves when the caller leaves it to it: compaction, or a shuffle that is only a test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory import planner
from services.actuator.memory.pool import Pool

I8 = NDArray[np.int64]
Planner = Callable[[Pool, int], I8]


def compact(pool: Pool, budget_bytes: int) -> I8:
    """What empties most page groups within the budget: int64 [n, 2]."""
    return planner.plan(
        pool.occupancy(), pool.geometry, movable=pool.movable(), holes=pool.holes(), budget_bytes=budget_bytes
    ).moves


def shuffled(rng: np.random.Generator) -> Planner:
    """Any movable blocks into any holes, as many as the budget allows: nothing is gained, everything may break."""

    def plan(pool: Pool, budget_bytes: int) -> I8:
        sources, destinations = np.flatnonzero(pool.movable()), np.flatnonzero(pool.holes())
        count = min(budget_bytes // pool.geometry.block_bytes, len(sources), len(destinations))
        return np.stack(
            (rng.choice(sources, count, replace=False), rng.choice(destinations, count, replace=False)), axis=1
        )

    return plan


def mixed(rng: np.random.Generator) -> Planner:
    """Compaction, and a shuffle when there is nothing to gain."""
    shuffle = shuffled(rng)

    def plan(pool: Pool, budget_bytes: int) -> I8:
        moves = compact(pool, budget_bytes)
        return moves if len(moves) else shuffle(pool, budget_bytes)

    return plan
