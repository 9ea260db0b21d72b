"""Order, gaps, boots, resets and garbage: what the tracker takes, and what it does about the rest."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.actions import Hold
from schemas.features import FEATURE, FEATURES
from schemas.identity import STEP_NS
from schemas.metrics import COLUMN, METRICS
from schemas.telemetry import NodeSample
from services.featurizer.tracker import States, Tracker, TrackerSettings

from .samples import counting, row, sample

SHORT = TrackerSettings(window_steps=5, forget_steps=4)


def filled(tracker: Tracker, steps: int = 6, **per_step: float) -> States:
    """Take steps 0 to ``steps - 1`` of one worker."""
    states = None
    for step in range(steps):
        states = tracker.observe(sample(step, [counting(step, **per_step)]))
    assert states is not None
    return states


def test_duplicates_and_older_steps_are_ignored_and_counted() -> None:
    tracker = Tracker()
    tracker.observe(sample(5, [row()]))
    assert tracker.observe(sample(5, [row()])) is None
    assert tracker.observe(sample(4, [row()])) is None
    assert tracker.observe(sample(9, [row()], boot_id=0)) is None, "an older boot is older whatever its step"
    assert tracker.counts == {("duplicate", ""): 1, ("older", ""): 2}


def test_several_samples_of_a_node_in_one_batch_are_taken_in_order() -> None:
    tracker = Tracker(SHORT)
    samples = [sample(step, [counting(step, preemptions=4)], node=node) for step in range(6) for node in ("a", "b")]
    rounds = tracker.observe_many(samples)
    assert [len(states.spans) for states in rounds] == [2] * 6
    assert rounds[-1].holds.tolist() == [0, 0], "the last round has full windows"
    assert rounds[-1].features[:, FEATURE["preemption_rate"]].tolist() == [2.0, 2.0]


def test_a_lost_step_loses_no_events() -> None:
    tracker = Tracker(SHORT)
    states = None
    for step in (0, 1, 2, 3, 5, 6, 7, 8, 9):
        states = tracker.observe(sample(step, [counting(step, preemptions=6)]))
    assert states is not None
    assert states.features[0, FEATURE["preemption_rate"]] == pytest.approx(3.0), (
        "the window begins at the lost step: it reaches back to the sample before it, and so does its time"
    )
    assert states.holds[0] == Hold.NONE, "a gap does not empty the window"
    assert tracker.counts["lost_steps", ""] == 1


def test_a_long_gap_begins_the_windows_anew() -> None:
    tracker = Tracker(SHORT)
    filled(tracker)
    states = tracker.observe(sample(17, [counting(17)]))
    assert states is not None
    assert states.holds[0] == Hold.WINDOW_FILLING


def test_a_new_boot_marks_windows_absent_and_holds_until_they_are_full() -> None:
    tracker = Tracker(SHORT)
    assert filled(tracker, preemptions=1).holds[0] == Hold.NONE
    held = []
    for step in range(6, 13):
        states = tracker.observe(sample(step, [counting(step, preemptions=1)], boot_id=2))
        assert states is not None
        held.append(int(states.holds[0]))
        if step == 6:
            assert np.isnan(states.features[0, FEATURE["preemption_rate"]])
    assert held == [1, 1, 1, 1, 1, 0, 0]


def test_steps_since_an_action_survive_a_boot_whose_steps_begin_at_zero() -> None:
    tracker = Tracker()
    filled(tracker)
    tracker.executed("n0", [2], 3)
    states = tracker.observe(sample(0, [row()], boot_id=2))
    assert states is not None
    assert states.features[0, FEATURE["since_tighten"]] == 3, "step 6 of the old boot, counted on"


def test_a_counter_that_went_back_begins_its_workers_windows_anew() -> None:
    tracker = Tracker(SHORT)
    for step in range(6):
        tracker.observe(sample(step, [counting(step, finished=5), counting(step, finished=5)]))
    states = tracker.observe(sample(6, [row(finished=2), counting(6, finished=5)]))
    assert states is not None
    assert states.holds.tolist() == [Hold.WINDOW_FILLING, Hold.NONE], "the engine of the first restarted"
    assert tracker.counts["counter_reset", ""] == 1


@pytest.mark.parametrize("t_ns", [5 * STEP_NS, 4 * STEP_NS, 30 * STEP_NS])
def test_a_clock_that_stands_goes_back_or_leaps_begins_the_windows_anew(t_ns: int) -> None:
    tracker = Tracker(SHORT)
    filled(tracker)
    states = tracker.observe(sample(6, [counting(6)], t_ns=t_ns))
    assert states is not None
    assert states.holds[0] == Hold.WINDOW_FILLING
    assert np.isnan(states.rewards[:, :2]).all(), "no time, no rate"
    assert tracker.counts["clock_jump", ""] == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_bytes": 81e9}, ("beyond_hbm_bytes", "kv_bytes")),
        ({"kv_idle_bytes": 11e9}, ("beyond_kv_bytes", "kv_idle_bytes")),
        ({"q0_bytes": 41e9}, ("beyond_card_kv_capacity_bytes", "q0_bytes")),
        ({"kv_bytes": np.nan}, ("missing", "kv_bytes")),
        ({"waiting": -1.0}, ("out_of_range", "waiting")),
        ({"running": float(2**32 - 1)}, ("out_of_range", "running")),
        ({"kv_bytes": float(2**64 - 4096)}, ("out_of_range", "kv_bytes")),
        ({"rho": np.inf}, ("out_of_range", "rho")),
    ],
)
def test_a_row_that_cannot_be_is_rejected_with_a_reason(changes: dict[str, float], reason: tuple[str, str]) -> None:
    tracker = Tracker()
    states = tracker.observe(sample(0, [row(**changes), row()], cards=[0, 1]))
    assert states is not None
    assert states.holds.tolist() == [Hold.SAMPLE_REJECTED, Hold.WINDOW_FILLING], "the other worker is not touched"
    assert tracker.counts[reason] == 1
    assert np.isnan(states.features[0, FEATURE["l_queue"]]), "nothing of a rejected row is handed on"


def test_workers_whose_sum_does_not_fit_the_card_are_all_rejected() -> None:
    tracker = Tracker()
    states = tracker.observe(sample(0, [row(kv_bytes=45e9), row(kv_bytes=45e9), row()], cards=[0, 0, 1]))
    assert states is not None
    assert states.holds.tolist() == [Hold.SAMPLE_REJECTED, Hold.SAMPLE_REJECTED, Hold.WINDOW_FILLING]


def test_a_value_that_may_be_missing_is_absent_when_it_is_out_of_range() -> None:
    tracker = Tracker()
    states = tracker.observe(sample(0, [row(swapped=-5, prefilling=9, frag=3)]))
    assert states is not None
    assert states.holds[0] == Hold.WINDOW_FILLING, "not rejected"
    for name in ("s_swap", "p_prefill", "f_frag"):
        assert np.isnan(states.features[0, FEATURE[name]])
    assert tracker.counts["beyond_running", "prefilling"] == 1


def test_a_rejected_sample_is_a_lost_step_of_that_worker() -> None:
    tracker = Tracker(SHORT)
    filled(tracker, preemptions=2)
    tracker.observe(sample(6, [row(kv_bytes=99e9)]))
    states = tracker.observe(sample(7, [counting(7, preemptions=2)]))
    assert states is not None
    assert states.holds[0] == Hold.NONE
    assert states.features[0, FEATURE["preemption_rate"]] == pytest.approx(1.0)
    assert np.isnan(states.rewards[:, :2]).all(), "two steps are no step"


def test_a_starting_engine_is_held_and_begins_anew() -> None:
    tracker = Tracker(SHORT)
    filled(tracker)
    silent = row(starting=1, kv_bytes=np.nan, waiting=np.nan)
    states = tracker.observe(sample(6, [silent]))
    assert states is not None
    assert states.holds[0] == Hold.ENGINE_STARTING, "a starting engine may be silent"
    states = tracker.observe(sample(7, [counting(7)]))
    assert states is not None
    assert states.holds[0] == Hold.WINDOW_FILLING


def test_a_worker_that_vanished_is_forgotten_and_its_row_used_again() -> None:
    tracker = Tracker(SHORT)
    tracker.observe(sample(0, [row(), row()]))
    for step in range(1, 6):
        tracker.observe(sample(step, [row()]))
    assert tracker.workers == 1
    states = tracker.observe(sample(6, [row(), row()], workers=["n0/0/w0", "n0/0/new"]))
    assert states is not None
    assert sorted(states.rows.tolist()) == [0, 1], "memory follows the fleet's size"
    assert tracker.counts["forgotten", ""] == 1


def test_a_worker_that_comes_back_in_a_later_boot_begins_anew() -> None:
    tracker = Tracker(SHORT)
    for step in range(100, 107):
        tracker.observe(sample(step, [counting(step), counting(step)]))
    tracker.observe(sample(107, [counting(107)]))
    tracker.observe(sample(0, [counting(108)], boot_id=2))
    held = []
    for step in range(1, 8):
        states = tracker.observe(sample(step, [counting(108 + step), counting(108 + step)], boot_id=2))
        assert states is not None
        held.append(int(states.holds[1]))
    assert held == [Hold.WINDOW_FILLING] * 5 + [Hold.NONE] * 2, "steps of another boot are not its past"


def test_silent_nodes_are_forgotten() -> None:
    tracker = Tracker()
    tracker.observe(sample(0, [row()], node="a"), now_ns=100)
    tracker.observe(sample(0, [row()], node="b"), now_ns=300)
    assert tracker.forget_silent(200) == ["a"]
    assert tracker.workers == 1


def test_more_workers_than_the_limit_are_refused() -> None:
    tracker = Tracker(TrackerSettings(max_workers=3))
    assert tracker.observe(sample(0, [row(), row()], node="a")) is not None
    assert tracker.observe(sample(0, [row(), row()], node="b")) is None
    assert tracker.counts["too_many_workers", ""] == 1


def test_a_node_that_names_anothers_workers_disturbs_nobody() -> None:
    tracker = Tracker(SHORT)
    filled(tracker)
    tracker.observe(sample(0, [row(kv_bytes=0, kv_idle_bytes=0)], node="evil", workers=["n0/0/w0"]))
    states = tracker.observe(sample(6, [counting(6)]))
    assert states is not None
    assert states.holds[0] == Hold.NONE
    assert states.features[0, FEATURE["u_alloc"]] == 0.5


@pytest.mark.parametrize(
    "change",
    [
        {"cards": (0,)}, {"classes": ()}, {"metrics": b"abc"}, {"workers": ("w", "w")}, {"workers": ("", "w")},
        {"step": -1}, {"boot_id": 2**64 - 1}, {"t_ns": -(2**63)}, {"workers": (), "cards": (), "classes": ()},
    ],
)  # fmt: skip
def test_a_sample_that_does_not_hold_together_is_counted_and_ignored(change: dict[str, object]) -> None:
    tracker = Tracker()
    assert tracker.observe(msgspec.structs.replace(sample(1, [row(), row()]), **change)) is None
    assert sum(tracker.counts.values()) == 1
    assert tracker.observe(sample(2, [row(), row()])) is not None, "the next good one is taken"


def test_an_unknown_class_is_rejected() -> None:
    states = Tracker().observe(sample(0, [row()], classes=[9]))
    assert states is not None
    assert states.holds[0] == Hold.SAMPLE_REJECTED


def test_a_table_with_fewer_columns_is_read_with_the_rest_missing() -> None:
    whole = sample(0, [row()])
    narrow = row()[: COLUMN["max_running"] + 1]
    states = Tracker().observe(msgspec.structs.replace(whole, metrics=narrow.astype("<f8").tobytes()))
    assert states is not None
    assert states.features[0, FEATURE["u_alloc"]] == 0.5


_ODD = st.sampled_from([np.nan, np.inf, -np.inf, -1.0, 0.0, 1.0, 2.0**32, 2.0**64, 1e300, -1e300, 5e-324, 20e9])
_GARBAGE = hnp.arrays(np.float64, (2, len(METRICS)), elements=_ODD | st.floats())
_REQUIRED = [feature.name for feature in FEATURES if not feature.may_be_absent]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 40),
            st.integers(0, 2),
            st.integers(-(2**63), 2**64 - 1) | st.just(-1),
            _GARBAGE,
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_garbage_never_raises_and_is_never_acted_on(
    garbage: list[tuple[int, int, int, np.ndarray, bool]],
) -> None:
    tracker = Tracker(TrackerSettings(window_steps=2))
    for step, boot_id, t_ns, matrix, plain in garbage:
        rows = [row(), matrix[1]] if plain else list(matrix)
        made: NodeSample = sample(step, rows, boot_id=boot_id, t_ns=None if t_ns == -1 else t_ns)
        states = tracker.observe(made)
        if states is None:
            continue
        free = states.features[states.holds == Hold.NONE]
        for name in _REQUIRED:
            assert np.isfinite(free[:, FEATURE[name]]).all(), f"a worker that is not held has {name}"
        assert not np.isinf(states.features[:, FEATURE["u_alloc"]]).any()
