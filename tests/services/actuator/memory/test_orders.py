"""Allocation orders, each against a definition that tries block by block on tiny pools."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actuator.memory.errors import OutOfBlocks
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import BlockState, Pool

PER_GROUP = 4
GROUPS = 3


def scattered(order: str, kept: list[bool]) -> Pool:
    """A pool of 12 mapped blocks, each its own session's; those not ``kept`` are free, the lowest freed last."""
    pool = Pool(Geometry(16, PER_GROUP, GROUPS), order=order)
    for owner in range(len(kept)):
        pool.allocate(owner, 1)
    at = {int(pool.table(owner)[0]): owner for owner in range(len(kept))}
    for block in reversed(range(len(kept))):
        if not kept[block]:
            pool.free(at[block])
    return pool


def one_by_one(pool: Pool, count: int) -> list[int]:
    """Fullest group first, said as simply as possible: again and again a block of the group with fewest free."""
    free = set(np.flatnonzero(pool.holes()).tolist())
    taken = []
    for _ in range(count):
        left = {g: [b for b in sorted(free) if b // PER_GROUP == g] for g in range(GROUPS)}
        group = min((g for g in left if left[g]), key=lambda g: (len(left[g]), g))
        taken.append(left[group][0])
        free.remove(left[group][0])
    return taken


KEPT = st.lists(st.booleans(), min_size=12, max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kept=KEPT, share=st.floats(0, 1))
def test_fullest_takes_a_block_of_the_group_with_fewest_free_each_time(kept: list[bool], share: float) -> None:
    pool = scattered("fullest", kept)
    count = int(share * kept.count(False))
    expected = one_by_one(pool, count)
    assert pool.allocate(99, count).tolist() == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kept=KEPT, share=st.floats(0, 1))
def test_lowest_takes_the_lowest_addresses(kept: list[bool], share: float) -> None:
    pool = scattered("lowest", kept)
    free = np.flatnonzero(pool.holes()).tolist()
    count = int(share * len(free))
    assert pool.allocate(99, count).tolist() == free[:count]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(kept=KEPT, share=st.floats(0, 1))
def test_lifo_takes_what_was_freed_last(kept: list[bool], share: float) -> None:
    pool = scattered("lifo", kept)
    free = np.flatnonzero(pool.holes()).tolist()
    count = int(share * len(free))
    assert pool.allocate(99, count).tolist() == free[:count], "the lowest block was freed last"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(kept=KEPT, share=st.floats(0, 1))
def test_no_choice_of_blocks_leaves_more_empty_groups_than_fullest(kept: list[bool], share: float) -> None:
    pool = scattered("fullest", kept)
    free = np.flatnonzero(pool.holes()).tolist()
    count = int(share * len(free))
    used = {block // PER_GROUP for block in range(12) if kept[block]}
    fewest = min(len(used | {block // PER_GROUP for block in choice}) for choice in combinations(free, count))
    pool.allocate(99, count)
    assert GROUPS - len(pool.empty_groups()) == fewest


def test_lifo_is_a_stack_of_frees_across_groups() -> None:
    pool = Pool(Geometry(16, 4, 3), order="lifo")
    first, second = pool.allocate(1, 3), pool.allocate(2, 3)
    pool.free(2)
    pool.free(1)
    assert pool.allocate(3, 4).tolist() == [*first[::-1], second[-1]], "the newest freed block comes first"


@pytest.mark.parametrize("order", ["fullest", "lowest"])
def test_pinned_blocks_keep_to_groups_of_their_own(order: str) -> None:
    pool = Pool(Geometry(16, 8, 6), order=order)
    for owner in range(10):
        pool.allocate(owner, 3, pinned=owner % 5 == 0)
    pinned = {int(block) // 8 for owner in (0, 5) for block in pool.table(owner)}
    ordinary = {int(block) // 8 for owner in range(10) if owner % 5 for block in pool.table(owner)}
    assert not pinned & ordinary, "a pin in an ordinary group keeps it from ever being emptied"
    assert len(pinned) == 1, "pins share a group"


def test_pins_mix_with_others_only_when_nothing_else_is_left() -> None:
    pool = Pool(Geometry(16, 4, 2))
    pool.allocate(1, 2)
    pool.allocate(2, 2, pinned=True)
    assert set(pool.allocate(3, 3).tolist()) == {2, 3, 6}, "the ordinary group's holes first, then the pinned one's"


@pytest.mark.parametrize("order", ["fullest", "lowest", "lifo"])
def test_what_a_waiter_has_gathered_goes_to_nobody_else(order: str) -> None:
    pool = Pool(Geometry(16, 4, 3), order=order)
    pool.map_groups(3)
    pool.protect(5, np.array([0, 1]))
    others = pool.allocate(1, 4)
    assert set(others // 4) == {2}
    with pytest.raises(OutOfBlocks) as caught:
        pool.allocate(2, 1)
    assert (caught.value.wanted, caught.value.available) == (1, 0)
    assert len(pool.allocate(3, 8, waiter=5)) == 8
    pool.check()


def test_allocation_maps_no_more_groups_than_it_needs() -> None:
    pool = Pool(Geometry(16, 4, 5), hard_groups=4)
    pool.allocate(1, 9)
    assert pool.mapped_groups == 3
    pool.allocate(2, 3)
    assert (pool.mapped_groups, pool.counters.mapped_on_demand) == (3, 3)
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 available under hard quota"):
        pool.allocate(3, 5)
    assert pool.counts()[BlockState.LIVE] == 12
    pool.check()


def test_the_reserve_is_mapped_ahead_and_serves_without_mapping() -> None:
    pool = Pool(Geometry(16, 4, 8), reserve_groups=2)
    assert len(pool.refill_reserve()) == 2
    pool.allocate(1, 8)
    assert (pool.counters.mapped_on_demand, pool.counters.mapped_ahead) == (0, 2)
    assert len(pool.refill_reserve()) == 2, "what was used is mapped again, off the path"
    assert len(pool.give_back(8)) == 0, "the reserve is not given back"
    assert len(pool.give_back(8, keep_reserve=False)) == 2
