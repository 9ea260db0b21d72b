"""Intervals over traces: right about known distributions, paired, repeatable; bounds on what never happened."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.evaluate.bootstrap import mean, ratio, upper_rate


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(100.0, 10.0, (1, 400))
    found = mean(values)
    half = 1.96 * values.std() / math.sqrt(400)
    assert found.ratio == pytest.approx(values.mean())
    assert found.ci95 == pytest.approx((values.mean() - half, values.mean() + half), abs=0.08)


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(2)
    held = 0
    for k in range(200):
        ours, theirs = (rng.normal(level, 10.0, (4, 30)) for level in (110.0, 100.0))
        low, high = ratio(ours, theirs, seed=k, draws=400).ci95
        held += low <= 1.1 <= high
    assert 0.88 * 200 <= held <= 0.99 * 200


def test_traces_are_drawn_together() -> None:
    load = np.random.default_rng(3).uniform(10.0, 1000.0, (5, 8))
    found = ratio(1.05 * load, load)
    assert found.ratio == pytest.approx(1.05)
    assert found.ci95 == pytest.approx((1.05, 1.05)), "however unlike the traces are, each brings 5 % more"


def test_all_configurations_weigh_alike() -> None:
    ours, theirs = np.array([[1000.0, 1000.0], [1.0, 1.0]]), np.array([[500.0, 500.0], [2.0, 2.0]])
    assert ratio(ours, theirs).ratio == pytest.approx(1.0), "twice as good and half as good"


def test_a_policy_that_serves_nothing_has_a_ratio_all_the_same() -> None:
    ours, theirs = np.zeros((1, 3)), np.ones((1, 3))
    assert ratio(ours, theirs).ratio == pytest.approx(0.01)
    assert ratio(theirs, ours).ratio == pytest.approx(100.0)
    assert ratio(ours, ours).ratio == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(4).normal(1.0, 0.1, (3, 10))
    assert mean(values, seed=5) == mean(values, seed=5)
    assert mean(values, seed=5) != mean(values, seed=6)


def test_unlike_or_missing_traces_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="same ones"):
        ratio(np.ones((2, 3)), np.ones((2, 4)))
    with pytest.raises(ValueError, match="finite"):
        mean(np.array([[1.0, np.nan]]))


def test_the_rule_of_three_and_what_follows_it() -> None:
    assert upper_rate(0, 10.0) == pytest.approx(0.3)
    assert upper_rate(1, 1.0) == pytest.approx(4.744, abs=1e-3), "Poisson: P(X <= 1) = 5 % at 4.744"
    assert upper_rate(10, 1.0) == pytest.approx(16.96, abs=1e-2)
    assert upper_rate(0, 0.0) == math.inf
