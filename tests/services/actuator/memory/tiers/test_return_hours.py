"""The hour of the day: an effect that repeats is found, noise is not taken for one."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from services.actuator.memory.return_hours import HOUR_S, HOURS, factors
from services.actuator.memory.returns import ReturnEstimator, ReturnSettings

CHAT = 0
DAY_S = HOURS * HOUR_S


@functools.cache
def lived(days: int, slower_at_night: float, settings: ReturnSettings | None = None) -> ReturnEstimator:
    """Twenty sessions around the clock, back after 60 s on average, ``slower_at_night`` times that from 0 to 8."""
    estimator = ReturnEstimator(settings)
    rng = np.random.default_rng(0)
    for session in range(20):
        now_s = float(rng.uniform(0, HOUR_S))
        while now_s < days * DAY_S:
            hour = now_s % DAY_S / HOUR_S
            estimator.finished(session, CHAT, now_s)
            gap_s = rng.exponential(60.0 * (slower_at_night if hour < 8 else 1.0))
            estimator.returned(session, now_s + gap_s)
            now_s += gap_s + 1800.0
    return estimator


def test_an_effect_that_repeats_is_found() -> None:
    by_hour = lived(4, slower_at_night=3.0).hour_factors(CHAT)
    assert by_hour[:8].max() < 0.9 < by_hour[8:].min()


def test_noise_is_no_effect() -> None:
    assert (lived(4, slower_at_night=1.0).hour_factors(CHAT) == 1.0).all()


def test_one_day_says_nothing_of_hours() -> None:
    assert (lived(1, slower_at_night=3.0).hour_factors(CHAT) == 1.0).all()


def test_the_hour_changes_the_chance_of_a_session_without_history() -> None:
    estimator = lived(4, slower_at_night=3.0).with_kinds_only(ReturnSettings())
    estimator.finished(-1, CHAT, 8 * DAY_S + 3 * HOUR_S)
    estimator.finished(-2, CHAT, 8 * DAY_S + 15 * HOUR_S)
    night, noon = (
        float(estimator.within(np.array([session]), 8 * DAY_S + hour * HOUR_S, 60.0)[0])
        for session, hour in ((-1, 3), (-2, 15))
    )
    assert night < 0.8 * noon


def test_hours_can_be_left_out_and_midnight_moved() -> None:
    assert (lived(4, 3.0, ReturnSettings(hours=False)).hour_factors(CHAT) == 1.0).all()
    moved = lived(4, 3.0, ReturnSettings(midnight_s=12 * HOUR_S)).hour_factors(CHAT)
    assert moved[12:20].max() < 0.9, "hour 0 of the clock is hour 12 of that day"


@pytest.mark.parametrize("seed", range(5))
def test_factors_are_shrunk_towards_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    true = 1.0 + 0.3 * np.sin(np.arange(HOURS) * 2 * np.pi / HOURS)
    expected = np.full((2, HOURS), 60.0)
    events = rng.poisson(expected * true)
    found = factors(events.astype(float), expected)
    plain = events.sum(axis=0) / events.mean() / 2
    assert ((found - true) ** 2).mean() < ((plain - true) ** 2).mean()
    assert 0.5 < found.min() < 1.0 < found.max() < 1.6
