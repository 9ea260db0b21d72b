"""Return times: chances that come true, censored waits that count, sessions that have ended."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from schemas.endings import Ending
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


def told_apart() -> ReturnEstimator:
    """Tools answer in about 5 s, readers in about 500 s; nine turns in ten end in a tool call."""
    rng, estimator = np.random.default_rng(3), ReturnEstimator()
    for number in range(2000):
        ending, mean_s = (Ending.DONE, 500.0) if number % 10 == 0 else (Ending.TOOL, 5.0)
        estimator.finished(number, CHAT, 0.0, ending)
        estimator.returned(number, float(rng.gamma(4.0, mean_s / 4.0)))
    return estimator


def test_how_a_turn_ended_tells_who_is_next() -> None:
    estimator = told_apart()
    for session, ending in ((-1, Ending.TOOL), (-2, Ending.DONE), (-3, Ending.UNKNOWN), (-4, Ending.LENGTH)):
        estimator.finished(session, CHAT, 0.0, ending)
    tool, done, unknown, never_seen = estimator.within(np.array([-1, -2, -3, -4]), 0.0, 60.0)
    assert tool > 0.98
    assert done < 0.05
    assert unknown == pytest.approx(0.9, abs=0.02), "any ending: as often as all of them together came back"
    assert never_seen == pytest.approx(unknown, abs=0.02), "an ending nobody saw yet leans on the kind"


def test_a_source_that_never_says_how_turns_ended_is_none_the_worse() -> None:
    """What is learned of turns with endings answers those without as if no ending had ever been told."""
    said, silent = ReturnEstimator(), ReturnEstimator()
    rng = np.random.default_rng(4)
    for number in range(500):
        gap_s, ending = float(rng.exponential(30.0)), Ending(1 + number % 2)
        for estimator, told in ((said, ending), (silent, Ending.UNKNOWN)):
            estimator.finished(number, CHAT, 0.0, told)
            estimator.returned(number, gap_s)
    for estimator in (said, silent):
        estimator.finished(-1, CHAT, 1e6)
    assert said.waiting_rates(-1) == pytest.approx(silent.waiting_rates(-1))


def test_a_session_s_gaps_after_one_ending_say_nothing_of_another() -> None:
    estimator = told_apart()
    now_s = 0.0
    for _ in range(40):
        estimator.finished(-1, CHAT, now_s, Ending.TOOL)
        now_s += 5.0
        estimator.returned(-1, now_s)
    estimator.finished(-1, CHAT, now_s, Ending.DONE)
    assert estimator.within(one(-1), now_s, 60.0)[0] < 0.1, "it was quick after tools; now a reader is next"


def test_who_has_been_quick_is_not_taken_at_its_word() -> None:
    said = {}
    for trust in (1.0, 0.7):
        rng, estimator = np.random.default_rng(6), ReturnEstimator(ReturnSettings(quick_trust=trust))
        for number in range(60):
            for turn in range(10):
                estimator.finished(number, CHAT, turn * 1e4)
                estimator.returned(number, turn * 1e4 + float(rng.exponential(5.0 if number % 2 else 200.0)))
            estimator.finished(number, CHAT, 1e6)
        chances = estimator.within(np.arange(60), 1e6, 10.0)
        said[trust] = chances[1::2].mean(), chances[::2].mean()
    (sure_quick, sure_slow), (quick, slow) = said[1.0], said[0.7]
    assert 0.6 < quick < sure_quick - 0.02, "the surest answers are drawn towards the kind's"
    assert slow == pytest.approx(sure_slow, abs=0.02), "who has been slow is"


@given(st.lists(st.floats(1.0, 4000.0), min_size=1, max_size=40), st.floats(0.1, 8000.0), st.floats(1.0, 3000.0))
def test_asked_again_after_some_idle_time_it_answers_with_the_truncated_distribution(
    gaps: list[float], idle_s: float, window_s: float
) -> None:
    estimator = taught(gaps, ended=len(gaps) // 3)
    estimator.finished(-1, CHAT, 100.0, Ending.UNKNOWN)
    later_s = 100.0 + idle_s
    by_now, by_then = (float(estimator.within(one(-1), 100.0, span)[0]) for span in (idle_s, idle_s + window_s))
    never = float(estimator.ended(one(-1), 100.0)[0])
    away = 1.0 - by_now
    assume(away > 1e-3)  # below, the test's own differences lose their digits
    assert estimator.within(one(-1), later_s, window_s)[0] == pytest.approx((by_then - by_now) / away, abs=1e-9)
    assert estimator.ended(one(-1), later_s)[0] == pytest.approx(never / away, abs=1e-9)
    if (returns := 1.0 - never / away) > 1e-3:
        half_s = float(estimator.quantile(one(-1), later_s, 0.5)[0])
        first = float(estimator.within(one(-1), 100.0, idle_s + half_s)[0])
        assert (first - by_now) / away == pytest.approx(0.5 * returns, abs=1e-6)


def test_the_truncated_answers_come_true() -> None:
    rng = np.random.default_rng(5)
    gaps_s = np.where(rng.random(6000) < 0.7, rng.exponential(8.0, 6000), rng.exponential(400.0, 6000))
    estimator = taught(gaps_s[:3000].tolist())
    estimator.finished(-1, CHAT, 0.0)
    for idle_s in (0.0, 20.0, 100.0):
        left_s = gaps_s[3000:][gaps_s[3000:] > idle_s] - idle_s
        said = float(estimator.within(one(-1), idle_s, 30.0)[0])
        assert said == pytest.approx((left_s <= 30.0).mean(), abs=0.04), idle_s
