from __future__ import annotations

import numpy as np
import pytest

from loadgen.examiner.comparison import compare

RNG = np.random.default_rng(1)


def test_the_interval_is_of_paired_ratios_and_the_worst_of_whole_configurations() -> None:
    champion = np.array([100.0, 300.0, 10.0, 10.0])
    candidate = champion * np.array([1.10, 1.10, 0.9, 1.3])
    found = compare(candidate, champion, ["a", "a", "b", "b"], np.random.default_rng(1))
    assert found.ratio == pytest.approx(1.10)
    assert found.low < found.ratio < found.high
    assert (found.worst, found.worst_name) == (pytest.approx(1.10), "a")


def test_the_same_gain_everywhere_has_no_spread_although_traces_differ_a_hundredfold() -> None:
    champion = np.array([1.0, 10.0, 100.0])
    found = compare(champion * 1.02, champion, ["a", "b", "c"], np.random.default_rng(1))
    assert (found.low, found.high) == (pytest.approx(1.02), pytest.approx(1.02))


def test_a_gain_by_luck_on_one_trace_is_not_above_one() -> None:
    found = compare(np.array([0.99, 0.99, 0.98, 1.2]), np.ones(4), list("abcd"), np.random.default_rng(1))
    assert found.ratio > 1.0 > found.low
    assert found.worst_name == "c"


def test_a_trace_on_which_the_champion_serves_nothing() -> None:
    found = compare(np.array([0.0, 5.0]), np.zeros(2), ["a", "b"], RNG)
    assert found.ratio == 1.5
    with pytest.raises(ValueError, match="expected as many"):
        compare(np.ones(2), np.ones(2), ["a"], RNG)
