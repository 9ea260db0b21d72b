"""How long planning takes: 100,000 blocks of a pool that a few hours of serving have scattered."""

from __future__ import annotations

import statistics
import time
from typing import Final

import numpy as np

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.planner import Plan, plan_blocks
from services.actuator.memory.pool import Pool

PER_GROUP: Final = 64
GROUPS: Final = 1563
"""100,032 blocks: with 2 MiB a block about what an H200 holds for a model of 32 layers."""
MEAN_BLOCKS: Final = 40
FREED_SHARE: Final = 0.5
RUNNING_EVERY: Final = 20
"""One session in so many is running, and its last block is being written: its group cannot be emptied."""


def scattered_pool(groups: int = GROUPS, seed: int = 3) -> Pool:
    """A pool full of sessions of all lengths, half of which have ended and most others are idle."""
    rng = np.random.default_rng(seed)
    pool = Pool(Geometry(2 << 20, PER_GROUP, groups), order="lowest")
    owner = 0
    while pool.used_blocks < pool.geometry.blocks:
        size = 1 + int(rng.exponential(MEAN_BLOCKS))
        pool.allocate(owner, min(size, pool.geometry.blocks - pool.used_blocks))
        owner += 1
    for one in np.flatnonzero(rng.random(owner) < FREED_SHARE).tolist():
        pool.free(one)
    for at, one in enumerate(pool.sessions):
        if at % RUNNING_EVERY:
            pool.make_idle(one)
    return pool


def plan_ms_100k_blocks(repeats: int = 30) -> float:
    """Median milliseconds to plan the most groups that can be emptied, masks and counts of the pool included."""
    pool = scattered_pool()
    times_ms = []
    for _ in range(repeats + 3):
        started = time.perf_counter()
        plan = plan_blocks(pool.blocks)
        times_ms.append((time.perf_counter() - started) * 1e3)
        _expect_work(plan)
    return statistics.median(times_ms[3:])


def _expect_work(plan: Plan) -> None:
    """A benchmark that plans nothing measures nothing."""
    if plan.groups_freed < GROUPS // 4:
        raise RuntimeError(f"only {plan.groups_freed} of {GROUPS} groups to empty: the benchmark's pool is wrong")
