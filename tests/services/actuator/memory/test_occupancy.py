"""Fragmentation entropy and the counts that the planner reads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.occupancy import fragmentation
from services.actuator.memory.pool import Pool


def by_definition(free: list[bool]) -> float:
    runs = [len(run) for run in "".join(".#"[one] for one in free).split(".") if run]
    total = sum(runs)
    if total <= 1:
        return 0.0
    return -sum(run / total * math.log(run / total) for run in runs) / math.log(total)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=40))
def test_entropy_is_that_of_the_design(free: list[bool]) -> None:
    assert fragmentation(np.array(free, np.bool_)) == pytest.approx(by_definition(free), abs=1e-12)


@pytest.mark.parametrize(
    ("free", "expected"),
    [([], 0.0), ([0, 1, 0], 0.0), ([1, 1, 1, 1], 0.0), ([1, 0, 1, 0, 1], 1.0), ([1, 1, 0, 1, 1], 0.5)],
)
def test_entropy_of_plain_cases(free: list[int], expected: float) -> None:
    assert fragmentation(np.array(free, np.bool_)) == pytest.approx(expected)


def test_a_run_goes_on_into_the_next_mapped_group_and_ends_at_an_unmapped_one() -> None:
    pool = Pool(Geometry(16, 4, 4))
    pool.map_groups(3)
    assert pool.fragmentation() == 0.0, "twelve free blocks in one run"
    pool.give_back(np.array([1]))
    assert pool.fragmentation() == pytest.approx(math.log(2) / math.log(8)), "two runs of four"


def test_counts_tell_movable_from_stuck_blocks() -> None:
    pool = Pool(Geometry(16, 8, 3))
    pool.allocate(1, 5)
    pool.allocate(2, 2, pinned=True)
    seen = pool.occupancy()
    assert seen.live.tolist() == [4, 0, 0], "the last block of a running session is being written"
    assert seen.stuck.tolist() == [1, 2, 0]
    assert seen.free.tolist() == [3, 6, 0]
    pool.make_idle(1)
    assert pool.occupancy().live.tolist() == [5, 0, 0], "nobody writes between turns"
    pool.protect(1, np.array([1]))
    assert pool.occupancy().protected.tolist() == [False, True, False]
    assert not pool.holes()[8:16].any(), "a plan must not fill what a waiter gathered"
