from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from schemas.features import FEATURE, FEATURE_COUNT
from schemas.transitions import REWARD_PARTS
from services.bus import Delivery
from services.learner.intake import Intake
from services.learner.replay_buffer import NO_ROW
from services.learner.settings import Settings
from tests.services.learner.batches import BOOT, batch, deliver, state

SETTINGS = Settings(capacity_rows=64, warmup_rows=1)


def with_state(column: str, value: float) -> np.ndarray:
    row = state(0.5)
    row[FEATURE[column]] = value
    return row.reshape(1, -1)


def rewards(goodput: float) -> np.ndarray:
    row = np.zeros((1, len(REWARD_PARTS)), np.float32)
    row[0, REWARD_PARTS.index("goodput")] = goodput
    return row


POISON: list[tuple[str, dict[str, Any]]] = [
    ("action_unknown", {"actions": [7]}),
    ("action_masked", {"actions": [4], "masks": [0b01111]}),
    ("mask_invalid", {"masks": [0b00010], "actions": [1]}),
    ("mask_invalid", {"next_masks": [0xFF]}),
    ("state_not_finite", {"states": with_state("l_queue", np.inf)}),
    ("state_not_finite", {"next_states": with_state("u_alloc", np.nan)}),
    ("state_range", {"states": with_state("u_alloc", 1e12)}),
    ("reward_absent", {"rewards": rewards(np.nan)}),
    ("reward_range", {"rewards": rewards(1e9)}),
    ("reward_range", {"rewards": rewards(-np.inf)}),
    ("probability_range", {"probabilities": [1.5]}),
    ("probability_range", {"probabilities": [np.nan]}),
    ("discount_range", {"discounts": [2.0]}),
    ("discount_range", {"dones": [1]}),
]


@pytest.mark.parametrize(("reason", "spoilt"), POISON, ids=[f"{r}-{'-'.join(s)}" for r, s in POISON])
def test_a_poisoned_row_is_dropped_and_counted(reason: str, spoilt: dict[str, Any]) -> None:
    intake = Intake(SETTINGS)
    taken = intake.ingest(deliver(batch(1), batch(2, **spoilt), batch(3)))
    assert taken.rows == {"accepted": 2, reason: 1}
    assert intake.replay.size == 2
    assert intake.replay.followers[0] == NO_ROW, "the good rows around a bad one are no neighbours"


MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("feature_table", {"feature_hash": "0123"}),
    ("bad_shape", {"states": np.zeros((1, FEATURE_COUNT - 1))}),
    ("bad_shape", {"policies": ()}),
    ("identity", {"boot_id": 0}),
    ("identity", {"step": -1}),
    ("identity", {"workers": ("elsewhere/0/w0",)}),
    ("unknown_version", {"schema_version": 99}),
]


@pytest.mark.parametrize(("reason", "spoilt"), MESSAGES, ids=[f"{r}-{'-'.join(s)}" for r, s in MESSAGES])
def test_a_bad_message_is_dropped_whole(reason: str, spoilt: dict[str, Any]) -> None:
    intake = Intake(SETTINGS)
    taken = intake.ingest(deliver(batch(1, **spoilt)))
    assert taken.messages == {reason: 1}
    assert intake.replay.size == 0
    assert intake.sequence == 1, "it was taken in all the same: reading it again would not help"


def test_bytes_that_are_no_message_are_counted() -> None:
    good = deliver(batch(1))[0]
    taken = Intake(SETTINGS).ingest([Delivery(good.subject, b"\xc1junk", None, 1, 1), good._replace(stream_sequence=2)])
    assert taken.messages == {"malformed": 1, "ok": 1}


def test_a_message_on_another_nodes_subject_is_dropped() -> None:
    delivery = deliver(batch(1))[0]._replace(subject="tg.v1.transition.n1")
    assert Intake(SETTINGS).ingest([delivery]).messages == {"identity": 1}


def test_a_worker_named_twice_or_beyond_the_limit_is_refused() -> None:
    twice = batch(1, rows=2)
    intake = Intake(Settings(capacity_rows=64, warmup_rows=1, max_workers=1))
    assert intake.ingest(deliver(twice)).messages == {"identity": 1}, "one worker more than max_workers"
    same = batch(1, rows=2, workers=("n0/0/w0", "n0/0/w0"))
    assert Intake(SETTINGS).ingest(deliver(same)).messages == {"identity": 1}


def test_a_repeat_is_a_duplicate_and_an_older_step_or_boot_is_stale() -> None:
    intake = Intake(SETTINGS)
    intake.ingest(deliver(batch(5)))
    taken = intake.ingest(deliver(batch(5), batch(4), batch(9, boot=BOOT - 1), batch(0, boot=BOOT + 1), first=2))
    assert taken.rows == {"duplicate": 1, "stale": 2, "accepted": 1}, "a newer boot begins at step 0 again"


def test_the_columns_reach_the_replay_as_sent() -> None:
    intake = Intake(SETTINGS)
    intake.ingest(deliver(batch(7, rows=2, actions=[3, 1], next_masks=[1, 9], probabilities=[0.25, 1.0])))
    replay = intake.replay
    assert replay.actions[:2].tolist() == [3, 1]
    assert replay.next_masks[:2].tolist() == [1, 9]
    assert replay.rewards[:2].tolist() == [0.5, 0.5]
    assert replay.probabilities[:2].tolist() == [0.25, 1.0]
    assert replay.discounts[:2].tolist() == pytest.approx([SETTINGS.gamma] * 2)
    assert np.array_equal(replay.states[0], state(0.07), equal_nan=True), "absent stays absent"
    assert np.array_equal(replay.next_states[1], state(0.08), equal_nan=True)


def test_the_objective_chooses_the_reward() -> None:
    both = np.zeros((1, len(REWARD_PARTS)), np.float32)
    both[0, REWARD_PARTS.index("article")], both[0, REWARD_PARTS.index("goodput")] = -1000, 0.25
    for objective, expected in (("article", -1000), ("goodput", 0.25)):
        intake = Intake(Settings(capacity_rows=64, warmup_rows=1, objective=objective))  # type: ignore[arg-type]
        intake.ingest(deliver(batch(1, rewards=both)))
        assert intake.replay.rewards[0] == expected


def test_consecutive_steps_are_linked_within_and_across_fetches() -> None:
    intake = Intake(SETTINGS)
    intake.ingest(deliver(batch(1), batch(1, node="n1"), batch(2)))
    intake.ingest(deliver(batch(3), first=4))
    # Rows lie by turn: n0's and n1's step 1, then n0's step 2, then the next fetch.
    assert intake.replay.chain(np.array([0]), 4)[:, 0].tolist() == [0, 2, 3, NO_ROW]
    assert intake.replay.chain(np.array([1]), 2)[1, 0] == NO_ROW, "another node's row is no follower"


@pytest.mark.parametrize(
    ("what", "second"),
    [("a gap", batch(3)), ("another boot", batch(2, boot=BOOT + 1))],
    ids=["gap", "boot"],
)
def test_a_broken_trajectory_is_not_joined(what: str, second: Any) -> None:
    intake = Intake(SETTINGS)
    intake.ingest(deliver(batch(1), second))
    assert intake.replay.size == 2
    assert intake.replay.chain(np.array([0]), 2)[1, 0] == NO_ROW, f"{what} ends the trajectory"


def test_nothing_follows_a_terminal_row_whose_next_state_may_be_anything() -> None:
    crash = batch(1, dones=[1], discounts=[0.0], next_states=np.full((1, FEATURE_COUNT), np.nan), next_masks=[0])
    intake = Intake(SETTINGS)
    assert intake.ingest(deliver(crash, batch(2))).rows == {"accepted": 2}
    assert intake.replay.discounts[0] == 0
    assert intake.replay.chain(np.array([0]), 2)[1, 0] == NO_ROW


def test_a_fetch_larger_than_the_ring_is_taken_in_parts() -> None:
    intake = Intake(SETTINGS)
    taken = intake.ingest(deliver(*(batch(1, node=f"n{i}", rows=8) for i in range(20))))
    assert taken.rows == {"accepted": 160}
    assert intake.replay.size == 64
