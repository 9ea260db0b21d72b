"""Features by hand: every formula of the FEATURES table on round numbers."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.actions import Hold
from schemas.features import FEATURE, FEATURES
from services.featurizer.tracker import States, Tracker, TrackerSettings
from services.featurizer.window import quantile

from .samples import counting, row, sample


def value(states: States | None, name: str, worker: int = 0) -> float:
    assert states is not None, "the sample was taken"
    return float(states.features[worker, FEATURE[name]])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("u_alloc", 0.5), ("f_frag", 0.25), ("l_queue", 6), ("p_prefill", 0.25), ("s_swap", 1),
        ("l_queue_memory", 3), ("card_free", 0.2), ("neighbour_queue", 10), ("neighbour_use", 0.1), ("rho", 1.2),
        ("quota_hard", 0.75), ("u_reserved", 0.625), ("host_use", 0.25), ("host_free", 1.5), ("link", 20),
        ("link_use", 0.25), ("kv_per_token", 128), ("idle_share", 0.2), ("idle_return", 30), ("running", 8),
        ("max_running", 256), ("q0_share", 0.5), ("hbm", 80), ("reference_rate", 5000), ("iteration", 25),
        ("class_chat", 0), ("class_copilot", 1), ("since_hold", 300), ("since_evict", 300),
        ("context_02", 0.75), ("context_05", 0.25), ("context_00", 0),
    ],
)  # fmt: skip
def test_a_feature_of_one_sample_follows_its_formula(name: str, expected: float) -> None:
    first = row(context_02=6, context_05=2)
    second = row(waiting=10, waiting_for_memory=0, kv_bytes=4e9)
    states = Tracker().observe(sample(0, [first, second], classes=[3, 0]))
    assert value(states, name) == pytest.approx(expected), "the formula of the FEATURES table"


def test_every_feature_is_filled_when_windows_are_full_and_all_is_measured() -> None:
    tracker = Tracker()
    states = None
    for step in range(31):
        grown = dict.fromkeys(("finished", "tpot_03", "ttft_04"), 10.0)
        now = counting(step, **grown, finished_context_tokens=5000, finished_context_tokens_sq=3e6, preemptions=2)
        states = tracker.observe(sample(step, [now, now]))
    assert states is not None
    missing = [feature.name for feature in FEATURES if np.isnan(value(states, feature.name))]
    assert not missing, "nothing is absent when the source says everything"


def test_windows_hold_what_happened_in_their_seconds() -> None:
    tracker = Tracker()
    states = None
    for step in range(40):
        now = counting(
            step, finished=4, finished_context_tokens=4 * 1000, finished_context_tokens_sq=4 * 1.04e6,
            preemptions=3, tpot_03=19, tpot_09=1, ttft_11=5,
        )  # fmt: skip
        now[list(now).index(10e9)] = 10e9 + step * 0.4e9
        states = tracker.observe(sample(step, [now]))
    assert value(states, "t_len_mean") == pytest.approx(1000), "4 requests a step of 1000 tokens on average"
    assert value(states, "t_len_std") == pytest.approx(200, rel=1e-3), "sqrt(1.04e6 - 1000^2)"
    assert value(states, "preemption_rate") == pytest.approx(1.5), "3 in each 2 s"
    assert value(states, "tpot_p95") == pytest.approx(0.4), "95 of 100 lie in bin 3, which ends at 0.4"
    assert value(states, "ttft_p95") == pytest.approx(1.25 + 0.95 * 0.25), "linear inside bin 11"
    assert value(states, "du_alloc") == pytest.approx(0.01), "0.4 GB / 20 GB in each 2 s"


def test_the_slope_is_the_least_squares_one() -> None:
    tracker = Tracker(TrackerSettings(window_steps=5))
    levels = [0.1, 0.3, 0.2, 0.5, 0.4, 0.7]
    states = None
    for step, level in enumerate(levels):
        states = tracker.observe(sample(step, [row(kv_bytes=level * 20e9, kv_idle_bytes=0)]))
    expected = np.polyfit(np.arange(6) * 2.0, levels, 1)[0]
    assert value(states, "du_alloc") == pytest.approx(expected, rel=1e-5), "numpy's own fit is the reference"


def test_window_features_are_absent_and_the_worker_held_until_the_window_is_full() -> None:
    tracker = Tracker()
    held = []
    for step in range(31):
        states = tracker.observe(sample(step, [row(preemptions=step)]))
        assert states is not None
        held.append(int(states.holds[0]))
        if step < 5:
            assert np.isnan(value(states, "preemption_rate")), "10 s are not over"
    assert held == [Hold.WINDOW_FILLING] * 30 + [Hold.NONE], "31 samples span 30 steps"


def test_absent_is_not_zero() -> None:
    states = Tracker().observe(sample(0, [row(frag=np.nan, link_bytes_per_s=np.nan, swapped=np.nan)]))
    for name in ("f_frag", "link", "link_use", "s_swap"):
        assert np.isnan(value(states, name)), f"{name} was not measured"
    assert value(states, "u_alloc") == 0.5, "the others are"


def test_nothing_running_is_no_prefill_and_no_kv_is_no_idle_share() -> None:
    empty = row(running=0, prefilling=0, kv_bytes=0, kv_idle_bytes=0)
    states = Tracker().observe(sample(0, [empty]))
    assert value(states, "p_prefill") == 0
    assert value(states, "idle_share") == 0


def test_a_host_tier_that_does_not_exist_is_full() -> None:
    states = Tracker().observe(sample(0, [row(host_capacity_bytes=0, host_used_bytes=0, link_bytes_per_s=0)]))
    assert value(states, "host_use") == 1, "nothing can be moved there"
    assert value(states, "host_free") == 0
    assert value(states, "link_use") == 1


def test_an_absent_neighbour_makes_the_neighbours_absent() -> None:
    states = Tracker().observe(sample(0, [row(), row(waiting=np.nan), row()], cards=[0, 0, 1]))
    assert np.isnan(value(states, "neighbour_queue", 0)), "nobody knows the other's queue"
    assert value(states, "neighbour_queue", 2) == 0, "alone on its card"


def test_steps_since_an_action_count_from_the_step_that_executed_it() -> None:
    tracker = Tracker()
    tracker.observe(sample(0, [row(), row()]))
    tracker.executed("n0", [1, 4], 0)
    states = tracker.observe(sample(3, [row(), row()]))
    assert value(states, "since_widen", 0) == 3
    assert value(states, "since_evict", 1) == 3
    assert value(states, "since_evict", 0) == 300, "never"


def test_a_quantile_lies_inside_its_bin_and_the_open_bin_gives_its_edge() -> None:
    counts = np.zeros((4, 16))
    counts[0, 0] = 100
    counts[1, 15] = 1
    counts[2, :2] = 50
    counts[3, :] = np.nan
    found = quantile(counts, 0.95)
    assert found[0] == pytest.approx(0.095)
    assert found[1] == 5.0, "all that is known of the last bin"
    assert found[2] == pytest.approx(0.19), "45 of 50 into the second bin"
    assert np.isnan(found[3]), "a missing histogram has no quantile"
