"""Who leaves the card: what it frees against what bringing it back costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.endings import Ending
from services.actuator.memory.returns import ReturnEstimator
from services.actuator.memory.victims import (
    Choice,
    Idle,
    Machine,
    Prices,
    Way,
    choose,
    costs,
    idle_sessions,
    prices,
)

GB = 1e9
MACHINE = Machine(out_bytes_per_s=25 * GB, back_bytes_per_s=25 * GB, prefill_tokens_per_s=10_000)
PRICE = Prices()


def idle(
    size_gb: list[float],
    returns: list[float],
    away_s: list[float],
    *,
    tokens: list[float] | None = None,
    missing_gb: list[float] | None = None,
) -> Idle:
    size = np.array(size_gb) * GB
    return Idle(
        size_bytes=size,
        tokens=np.array(tokens) if tokens else size / 131_072,
        missing_bytes=np.array(missing_gb) * GB if missing_gb else size,
        returns=np.array(returns),
        away_s=np.array(away_s),
    )


def rows(choice: Choice) -> list[int]:
    return choice.rows.tolist()


def test_who_returns_late_goes_before_who_returns_soon() -> None:
    sessions = idle([1, 1, 1], [0.9, 0.9, 0.9], [5, 500, 50])
    assert rows(choose(sessions, 2 * GB, MACHINE, PRICE)) == [1, 2]


def test_who_has_ended_goes_first_and_nothing_is_carried_for_it() -> None:
    sessions = idle([1, 1], [0.9, 0.0], [500, 600])
    choice = choose(sessions, 1 * GB, MACHINE, PRICE)
    assert rows(choice) == [1]
    assert choice.ways.tolist() == [Way.DROP]
    assert choice.moved_bytes == 0


def test_the_estimator_tells_who_has_gone_quiet() -> None:
    estimator = ReturnEstimator()
    for number in range(200):
        estimator.finished(number, 0, 0.0)
        if number % 4:
            estimator.returned(number, 20.0)
        else:
            estimator.closed(number, 0.0)
    estimator.finished(1000, 0, 0.0)  # silent for five minutes
    estimator.finished(1001, 0, 295.0)
    size = np.array([1.0, 1.0]) * GB
    sessions = idle_sessions(estimator, np.array([1000, 1001]), size, size / 131_072, size, now_s=300.0)
    assert sessions.returns[0] < 0.1 < 0.6 < sessions.returns[1]
    assert rows(choose(sessions, 1 * GB, MACHINE, PRICE)) == [0]


def test_each_plan_asks_again_what_is_known_by_then() -> None:
    """Turns end in a tool call; most tools answer in seconds, and those that have not after a minute take long."""
    estimator, rng = ReturnEstimator(), np.random.default_rng(0)
    for number in range(1000):
        estimator.finished(number, 0, 0.0, Ending.TOOL)
        estimator.returned(number, float(rng.exponential(5.0 if number % 10 else 2000.0)))
    estimator.finished(-1, 0, 0.0, Ending.TOOL)
    one, size = np.array([-1]), np.array([1 * GB])
    first, later = (idle_sessions(estimator, one, size, size / 131_072, size, now_s=now_s) for now_s in (0.0, 60.0))
    assert first.returns[0] > 0.9
    assert later.returns[0] < 0.4
    assert later.away_s[0] > 5 * first.away_s[0]


def test_who_has_a_copy_goes_before_who_must_be_carried() -> None:
    sessions = idle([1, 1], [0.9, 0.9], [60, 60], missing_gb=[1, 0])
    choice = choose(sessions, 1 * GB, MACHINE, PRICE)
    assert (rows(choice), choice.ways.tolist()) == ([1], [Way.FREE])


def test_a_scarce_link_makes_recomputing_the_cheaper_way_and_a_scarce_gpu_carrying() -> None:
    sessions = idle([1.0], [1.0], [60.0], tokens=[1000.0])
    _, way = costs(sessions, MACHINE, prices(gpu_busy=0.1, link_busy=1.0))
    assert way[0] == Way.DROP
    _, way = costs(sessions, MACHINE, prices(gpu_busy=1.0, link_busy=0.1))
    assert way[0] == Way.SWAP


def test_a_class_that_forbids_swapping_never_swaps() -> None:
    sessions = idle([1, 2, 3], [1, 1, 1], [60, 60, 60])
    choice = choose(sessions, 6 * GB, MACHINE, PRICE, swap_allowed=False)
    assert set(choice.ways.tolist()) == {Way.DROP}
    assert choice.moved_bytes == 0


def test_a_full_tier_passes_over_what_cannot_go_and_takes_what_can() -> None:
    sessions = idle([2, 1, 1], [1, 1, 1], [600, 60, 60], missing_gb=[2, 1, 0])
    choice = choose(sessions, 4 * GB, MACHINE, PRICE, tier_free_bytes=1 * GB)
    assert sorted(rows(choice)) == [1, 2]
    assert choice.freed_bytes < 4 * GB, "it says that it falls short"


def test_prices_need_shares() -> None:
    with pytest.raises(ValueError, match="link_busy"):
        prices(0.5, 1.5)


@given(st.data())
def test_enough_is_freed_where_possible_within_the_budget_and_nobody_goes_for_nothing(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    draw = lambda low, high: data.draw(st.lists(st.floats(low, high), min_size=count, max_size=count))  # noqa: E731
    sessions = idle(draw(0.1, 4), draw(0, 1), draw(0, 600), tokens=draw(10, 1e5), missing_gb=draw(0, 4))
    needed, budget = data.draw(st.floats(0, 20)) * GB, data.draw(st.floats(0, 20)) * GB
    choice = choose(sessions, needed, MACHINE, PRICE, out_budget_bytes=budget)
    sizes = sessions.size_bytes[choice.rows]
    assert len(set(rows(choice))) == len(choice.rows)
    assert choice.freed_bytes == pytest.approx(sizes.sum())
    assert choice.moved_bytes <= budget + 1
    if choice.freed_bytes >= needed and len(sizes):
        assert choice.freed_bytes - sizes.min() < needed + 1, "each of them is needed"
    _, way = costs(sessions, MACHINE, PRICE)
    if choice.freed_bytes < needed:
        left = np.setdiff1d(np.arange(count), choice.rows)
        assert (way[left] == Way.SWAP).all(), "only what must be carried may be left"
