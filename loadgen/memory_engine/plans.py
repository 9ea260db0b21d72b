"""Which blocks the engine moves when the caller leaves it to it: compaction, or a shuffle that is only a test."""

from __future__ import annotations

import numpy as np

from services.actuator.memory import planner
from services.actuator.memory.pool import Pool
from services.actuator.memory.tickets import Planned, Planner


def compact(pool: Pool, budget_bytes: int) -> Planned:
    """What empties most page groups within the budget."""
    plan = planner.plan(
        pool.occupancy(), pool.geometry, movable=pool.movable(), holes=pool.holes(), budget_bytes=budget_bytes
    )
    return Planned(plan.moves, plan.lower_bound_bytes // pool.geometry.block_bytes)


def shuffled(rng: np.random.Generator) -> Planner[Pool]:
    """Any movable blocks into any holes, as many as the budget allows: nothing is gained, everything may break."""

    def plan(pool: Pool, budget_bytes: int) -> Planned:
        sources, destinations = np.flatnonzero(pool.movable()), np.flatnonzero(pool.holes())
        count = min(budget_bytes // pool.geometry.block_bytes, len(sources), len(destinations))
        pairs = (rng.choice(sources, count, replace=False), rng.choice(destinations, count, replace=False))
        return Planned(np.stack(pairs, axis=1))

    return plan


def mixed(rng: np.random.Generator) -> Planner[Pool]:
    """Compaction, and a shuffle when there is nothing to gain."""
    shuffle = shuffled(rng)

    def plan(pool: Pool, budget_bytes: int) -> Planned:
        chosen = compact(pool, budget_bytes)
        return chosen if len(chosen.moves) else shuffle(pool, budget_bytes)

    return plan
