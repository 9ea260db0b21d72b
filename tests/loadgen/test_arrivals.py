"""Arrivals have the rate and the burstiness that was asked for."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.arrivals import arrivals, burst_phases, swung


@pytest.mark.parametrize(("cv", "within"), [(0.5, 0.03), (1.0, 0.03), (1.1, 0.03), (3.0, 0.1), (13.0, 0.15)])
def test_rate_and_cv_come_out_as_asked(cv: float, within: float) -> None:
    times_s = arrivals(5.0, cv, 100_000.0, np.random.default_rng(1))
    gaps_s = np.diff(times_s)
    assert (gaps_s >= 0).all()
    assert times_s[0] >= 0
    assert times_s[-1] < 100_000
    assert len(times_s) / 500_000 == pytest.approx(1.0, abs=within)
    assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=within)


def test_burst_phases_meet_mean_and_cv_exactly() -> None:
    a, b, q = burst_phases(0.4, 13.0)
    assert (1 - q) * a + q * b == pytest.approx(0.4)
    second = 2 * ((1 - q) * a**2 + q * b**2)
    assert second / 0.4**2 - 1 == pytest.approx(169.0)


def test_a_seed_gives_one_answer() -> None:
    first, second = (arrivals(2.0, 1.1, 500.0, np.random.default_rng(4)) for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("rate", "cv", "duration"), [(0.0, 1, 1), (1, -1, 1), (1, 1, float("nan")), (float("inf"), 1, 1)]
)
def test_nonsense_is_refused(rate: float, cv: float, duration: float) -> None:
    with pytest.raises(ValueError, match="expected finite and positive"):
        arrivals(rate, cv, duration, np.random.default_rng(0))


def test_a_swing_moves_arrivals_into_the_rising_half_and_keeps_the_days_count() -> None:
    even_s = np.linspace(0, 86_400, 50_000, endpoint=False)
    moved_s = swung(even_s, 0.4)
    assert (np.diff(moved_s) > 0).all()
    assert moved_s[-1] < 86_400
    high = (moved_s < 43_200).sum() / len(moved_s)
    assert high == pytest.approx(0.5 + 0.4 / np.pi, abs=0.003), "the sine's first half holds 0.4 / pi more"
    with pytest.raises(ValueError, match="swing"):
        swung(even_s, 1.0)
