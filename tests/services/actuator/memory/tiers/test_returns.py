"""Return times: chances that come true, censored waits that count, sessions that have ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import BINS, EDGES_S, HORIZON_S
from services.actuator.memory.returns import ReturnEstimator, ReturnSettings, UnknownSession

CHAT, AGENT = 0, 1
IDLE = st.floats(0, HORIZON_S * 1.2)


def one(session: int) -> np.ndarray:
    return np.array([session], dtype=np.int64)


def taught(gaps: list[float], kind: int = CHAT, *, ended: int = 0) -> ReturnEstimator:
    """An estimator that saw each gap from a session of its own, and ``ended`` sessions that never came back."""
    estimator = ReturnEstimator()
    for number, gap_s in enumerate(gaps):
        estimator.finished(number, kind, 0.0)
        estimator.returned(number, gap_s)
    for number in range(ended):
        estimator.finished(10**6 + number, kind, 0.0)
        estimator.closed(10**6 + number, 0.0)
    return estimator


@given(st.lists(st.floats(1e-7, 10.0), min_size=BINS, max_size=BINS), IDLE, st.floats(0, 1e4), st.floats(0.01, 0.99))
def test_the_rates_arithmetic_is_consistent(rates: list[float], idle_s: float, window_s: float, share: float) -> None:
    table, idle = np.array([rates]), np.array([idle_s])
    chance = return_rates.within(table, idle, np.array([window_s]))[0]
    gone = return_rates.ended(table, idle)[0]
    assert 0 <= chance <= 1
    assert chance <= 1 - gone + 1e-9, "who has ended is not back within any window"
    mean_s = return_rates.mean_away(table, idle, window_s)[0]
    assert (1 - chance) * window_s - 1e-6 <= mean_s <= window_s + 1e-6
    if idle_s < HORIZON_S and 1 - gone > 1e-6:
        at_s = return_rates.quantile(table, idle, share)[0]
        reached = return_rates.within(table, idle, np.array([at_s]))[0]
        assert reached == pytest.approx(share * (1 - gone), abs=1e-6)


def test_the_integral_of_being_away_is_what_a_sum_says() -> None:
    table = np.geomspace(1.0, 1e-5, BINS)[None, :]
    steps = np.arange(0, 100, 0.01) + 0.005
    away = 1 - return_rates.within(np.repeat(table, len(steps), 0), np.full(len(steps), 7.5), steps)
    assert return_rates.mean_away(table, np.array([7.5]), 100.0)[0] == pytest.approx(away.sum() * 0.01, rel=1e-4)


@given(st.floats(0, HORIZON_S), st.floats(0, HORIZON_S))
def test_exposure_adds_up(first_s: float, second_s: float) -> None:
    low_s, high_s = sorted((first_s, second_s))
    seconds, parts = np.zeros(BINS), np.zeros(BINS)
    return_rates.add_exposure(seconds, low_s, high_s)
    return_rates.add_exposure(parts, 0.0, low_s)
    return_rates.add_exposure(parts, low_s, high_s)
    assert seconds.sum() == pytest.approx(high_s - low_s, abs=1e-6)
    assert parts.sum() == pytest.approx(high_s, abs=1e-6)
    assert (parts <= np.diff(EDGES_S) + 1e-6).all()


def test_a_session_s_own_history_counts_before_its_kind() -> None:
    estimator = taught(np.random.default_rng(0).exponential(10.0, 500).tolist())
    now_s = 0.0
    for _ in range(20):
        estimator.finished(7, CHAT, now_s)
        now_s += 200.0
        estimator.returned(7, now_s)
    estimator.finished(7, CHAT, now_s)
    estimator.finished(8, CHAT, now_s)
    known, new = (float(estimator.quantile(one(session), now_s, 0.5)[0]) for session in (7, 8))
    assert 150 < known < 250, "it always came back after 200 s"
    assert 5 < new < 20, "nothing is known of it: as its kind does"


def test_kinds_are_told_apart() -> None:
    estimator = taught([5.0] * 200)
    for number in range(200):
        estimator.finished(number, AGENT, 0.0)
        estimator.returned(number, 500.0)
    estimator.finished(-1, CHAT, 0.0)
    estimator.finished(-2, AGENT, 0.0)
    assert estimator.quantile(one(-1), 0.0, 0.5)[0] < 10
    assert estimator.quantile(one(-2), 0.0, 0.5)[0] > 100


def test_sessions_that_still_wait_teach_too() -> None:
    rng = np.random.default_rng(1)
    gaps_s = rng.exponential(300.0, 4000)
    watched_s = rng.uniform(0, 200.0, 4000)  # most are still away when we look
    honest, naive = ReturnEstimator(), ReturnEstimator()
    for number, (gap_s, until_s) in enumerate(zip(gaps_s.tolist(), watched_s.tolist(), strict=True)):
        honest.finished(number, CHAT, 0.0)
        if gap_s <= until_s:
            honest.returned(number, gap_s)
            naive.finished(number, CHAT, 0.0)
            naive.returned(number, gap_s)
        else:
            honest._credit(honest._waits[number], until_s, event=False)
    truth = 1 - np.exp(-100.0 / 300.0)
    for estimator, near in ((honest, True), (naive, False)):
        estimator.finished(-1, CHAT, 0.0)
        said = float(estimator.within(one(-1), 0.0, 100.0)[0])
        assert (abs(said - truth) < 0.03) == near, (said, truth)


def test_waiting_is_counted_once_however_often_it_is_looked_at() -> None:
    often, once = ReturnEstimator(), ReturnEstimator()
    for estimator in (often, once):
        estimator.finished(1, CHAT, 10.0)
    for second in range(50):
        often.advance(10.0 + second)
    for estimator in (often, once):
        estimator.returned(1, 60.0)
    assert often.kind_rates(CHAT) == pytest.approx(once.kind_rates(CHAT))


def test_the_longer_it_is_away_the_likelier_it_has_ended() -> None:
    estimator = taught(np.random.default_rng(2).exponential(20.0, 800).tolist(), ended=200)
    estimator.finished(-1, CHAT, 0.0)
    chances = [float(estimator.ended(one(-1), at_s)[0]) for at_s in (0.0, 30.0, 120.0, 1000.0, HORIZON_S)]
    assert chances == sorted(chances)
    assert chances[0] == pytest.approx(0.2, abs=0.03)
    assert chances[2] > 0.9
    assert chances[-1] == 1.0
    assert estimator.within(one(-1), 120.0, 60.0)[0] < 0.1, "an overdue session is not 'due any moment'"


def test_a_return_after_the_horizon_was_counted_as_an_end() -> None:
    estimator = ReturnEstimator()
    estimator.finished(1, CHAT, 0.0)
    estimator.advance(2 * HORIZON_S)
    before = estimator.kind_rates(CHAT)
    assert estimator.returned(1, 3 * HORIZON_S) == 3 * HORIZON_S
    assert estimator.kind_rates(CHAT) == pytest.approx(before)


def test_a_validation_learns_of_sessions_and_not_of_kinds() -> None:
    estimator = taught([5.0] * 50).with_kinds_only(ReturnSettings(learn_kinds=False))
    before = estimator.kind_rates(CHAT)
    estimator.finished(1, CHAT, 0.0)
    estimator.returned(1, 900.0)
    assert np.array_equal(estimator.kind_rates(CHAT), before)
    estimator.finished(1, CHAT, 0.0)
    estimator.finished(2, CHAT, 0.0)
    assert not np.array_equal(estimator.waiting_rates(1), estimator.waiting_rates(2))


def test_who_does_not_wait_is_an_error_with_numbers() -> None:
    estimator = ReturnEstimator()
    estimator.finished(1, CHAT, 0.0)
    for call in (
        lambda: estimator.returned(2, 1.0),
        lambda: estimator.ended(one(2), 1.0),
        lambda: estimator.closed(2, 1.0),
    ):
        with pytest.raises(UnknownSession) as unknown:
            call()
        assert (unknown.value.session, unknown.value.waiting) == (2, 1)


def test_memory_is_bounded() -> None:
    estimator = ReturnEstimator(ReturnSettings(sessions_most=10))
    for session in range(100):
        estimator.finished(session, CHAT, 0.0)
        estimator.returned(session, 1.0)
    assert len(estimator._histories) == 10
