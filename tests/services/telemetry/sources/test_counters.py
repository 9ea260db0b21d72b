"""Counters that reset keep one series."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from services.telemetry.sources.counters import Counters, Joined


def test_a_restart_seen_by_a_fall_goes_on_from_the_sum() -> None:
    counters = Counters()
    assert counters.take({"a": 10, "b": 5}) == {"a": 10, "b": 5}
    assert counters.take({"a": 3, "b": 6}) == {"a": 13, "b": 11}, "b's new life has passed its old value already"
    assert counters.take({"a": 4, "b": 6}) == {"a": 14, "b": 11}
    assert counters.restarts == 1


def test_a_restart_that_no_value_shows_is_told_by_the_marker() -> None:
    counters = Counters()
    counters.take({"a": 10}, marker=1.0)
    assert counters.take({"a": 12}, marker=2.0) == {"a": 22}
    assert counters.restarts == 1


def test_with_the_same_marker_one_fallen_counter_is_no_restart_of_the_others() -> None:
    counters = Counters()
    counters.take({"a": 10, "b": 5}, marker=1.0)
    assert counters.take({"a": 2, "b": 6}, marker=1.0) == {"a": 12, "b": 6}
    assert counters.restarts == 0


def test_a_counter_that_is_missing_for_a_while_forgets_nothing() -> None:
    counters = Counters()
    counters.take({"a": 10})
    assert counters.take({"a": math.nan}) == {}
    assert counters.take({}) == {}
    assert counters.take({"a": 11}) == {"a": 11}


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=5))
def test_the_series_never_falls_and_ends_at_the_sum_of_all_lives(lives: list[list[int]]) -> None:
    counters, last, total = Counters(), 0.0, 0.0
    for number, life in enumerate(lives):
        value = 0.0
        for more in life:
            value += more
            seen = counters.take({"a": value}, marker=float(number))["a"]
            assert seen >= last
            last = seen
        total += value
    assert last == total


def test_two_witnesses_make_one_series_whichever_of_them_is_away() -> None:
    joined = Joined()
    assert joined.take({"a": 5}, {"a": 100, "b": 1}) == {"a": 5, "b": 1}
    assert joined.take({"a": 8}, {"a": 104, "b": 1}) == {"a": 8, "b": 1}, "the preferred one's three"
    assert joined.take({}, {"a": 106, "b": 2}) == {"a": 10, "b": 2}, "while it is away, the other's"
    assert joined.take({"a": 11}, {"a": 107, "b": 2}) == {"a": 11, "b": 2}
    assert joined.take({"a": 12}, {}) == {"a": 12}


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 9)), min_size=1, max_size=30))
def test_a_joined_series_never_falls_and_never_leaps(steps: list[tuple[bool, bool, int]]) -> None:
    joined, last, total = Joined(), None, 0.0
    for one, other, more in steps:
        total += more
        seen = joined.take({"a": total} if one else {}, {"a": 1e6 + total} if other else {}).get("a")
        if seen is not None and last is not None:
            assert last <= seen <= last + total
        last = seen if seen is not None else last
