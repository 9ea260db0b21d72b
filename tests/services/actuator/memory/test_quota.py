"""Hard and soft quota with their generation; floors."""

from __future__ import annotations

import numpy as np
import pytest

from services.actuator.memory.errors import BadGeometry, IllegalTransition, OutOfBlocks, StaleGeneration
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import Pool


def pool_of(**settings: int) -> Pool:
    return Pool(Geometry(16, 4, 8), **settings)  # type: ignore[arg-type]


def test_a_change_gets_a_new_generation_and_a_repeat_does_not() -> None:
    pool = pool_of()
    assert pool.set_quota(6, 20, 0) == 1
    assert pool.set_quota(6, 20, 1) == 1, "absolute commands may be repeated"
    assert pool.set_quota(5, 20, 1) == 2


def test_a_command_on_an_older_generation_changes_nothing() -> None:
    pool = pool_of()
    pool.set_quota(6, None, 0)
    with pytest.raises(StaleGeneration) as caught:
        pool.set_quota(2, None, 0)
    assert (caught.value.found, caught.value.current, pool.quota.hard_groups) == (0, 1, 6)


def test_a_quota_below_what_is_mapped_only_stops_growth() -> None:
    pool = pool_of()
    pool.allocate(1, 16)
    pool.set_quota(2, None, 0)
    assert pool.mapped_groups == 4, "giving back is the shrink's work"
    with pytest.raises(OutOfBlocks, match="hard quota"):
        pool.allocate(1, 1)
    pool.free(1)
    assert len(pool.allocate(2, 8)) == 8
    pool.set_quota(8, None, 1)
    assert len(pool.allocate(3, 24)) == 24, "raising takes effect"


def test_no_quota_and_no_give_back_goes_below_the_floor() -> None:
    pool = pool_of(floor_groups=3)
    pool.map_groups(5)
    with pytest.raises(BadGeometry, match=r"hard_groups: found 2, expected 3 \(the floor\) to 8"):
        pool.set_quota(2, None, 0)
    with pytest.raises(OutOfBlocks, match="3 groups wanted, 2 available under floor"):
        pool.give_back(np.array([0, 1, 2]))
    assert pool.give_back(8).tolist() == [4, 3], "highest addresses first"
    assert pool.mapped_groups == 3


def test_a_group_in_use_is_not_given_back() -> None:
    pool = pool_of()
    pool.allocate(1, 5)
    with pytest.raises(IllegalTransition, match="group 1 is in use by 1 blocks: cannot be given back"):
        pool.give_back(np.array([1]))
    with pytest.raises(IllegalTransition, match="group 7 is not mapped"):
        pool.give_back(np.array([7]))
    assert pool.mapped_groups == 2


def test_promises_are_held_within_the_soft_quota() -> None:
    pool = pool_of(soft_blocks=10)
    pool.promise(1, 6)
    with pytest.raises(OutOfBlocks, match="5 blocks wanted, 4 available under soft quota"):
        pool.promise(2, 5)
    pool.promise(1, 2)
    pool.promise(2, 8)
    pool.allocate(2, 1)
    pool.free(2)
    assert pool.quota.promised_blocks == 2, "a promise ends with its session"


@pytest.mark.parametrize("bad", [{"floor_groups": 9}, {"hard_groups": 9}, {"reserve_groups": -1}, {"soft_blocks": -1}])
def test_figures_that_do_not_fit_are_told_with_their_numbers(bad: dict[str, int]) -> None:
    with pytest.raises(BadGeometry, match=str(next(iter(bad.values())))):
        pool_of(**bad)
