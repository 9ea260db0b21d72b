from __future__ import annotations

import numpy as np

from services.learner.intake import Intake
from services.learner.settings import Settings
from services.learner.shares import ACTIVE_NS, Shares
from tests.services.learner.batches import BOOT, batch, deliver

SETTINGS = Settings(capacity_rows=256, warmup_rows=1, worker_share=2.0)


def one(slot: int) -> np.ndarray:
    return np.array([slot], np.int64)


def test_a_flood_of_one_worker_leaves_the_others_their_place() -> None:
    intake = Intake(SETTINGS)
    intake.now_ns = BOOT
    taken = intake.ingest(deliver(*(batch(1, node=f"n{i}") for i in range(16))))
    assert taken.rows == {"accepted": 16}
    taken = intake.ingest(deliver(*(batch(step) for step in range(2, 500)), first=17))
    assert taken.rows["accepted"] == 2 * 256 // 16 - 1, "twice its fair share of 256 rows among 16"
    assert taken.rows["flood"] == 498 - taken.rows["accepted"]
    taken = intake.ingest(deliver(*(batch(2, node=f"n{i}") for i in range(1, 16)), first=600))
    assert taken.rows == {"accepted": 15}
    assert set(intake.replay.sequences[:16].tolist()) == set(range(1, 17)), "their rows are still there"


def test_a_small_fleet_fills_the_replay_alone() -> None:
    intake = Intake(Settings(capacity_rows=64, warmup_rows=1))
    intake.now_ns = BOOT
    taken = intake.ingest(deliver(*(batch(step) for step in range(1, 200))))
    assert taken.rows == {"accepted": 199}


def test_who_has_gone_is_not_counted_and_what_is_overwritten_is_given_back() -> None:
    shares = Shares(8, 1.0)
    for slot in range(8):
        assert not shares.excess(one(slot), 0).any()
        shares.take(one(slot), one(slot))
    assert shares.excess(one(0), 1).all(), "one of eight rows is a fair share of eight workers"
    later = ACTIVE_NS + 10
    assert not shares.excess(one(0), later).any(), "the others have not been heard of for long"
    shares.take(one(0), one(5))
    assert (shares.held(0), shares.held(5)) == (2, 0)


def test_rows_of_another_time_are_dropped() -> None:
    intake = Intake(SETTINGS)
    intake.now_ns = BOOT
    day = 43_200
    old, far = 86_400 * 10**9 * 20, 1 << 31
    found = intake.ingest(
        deliver(
            batch(1, boot=BOOT - old), batch(far), batch(5, boot=(1 << 62) + 1), batch(10 * day), batch(1, node="n1")
        )
    )
    assert found.rows == {"too_old": 1, "ahead": 2, "accepted": 2}, "an emulated node may run days ahead"
    assert intake.ingest(deliver(batch(10 * day + 1), first=6)).rows == {"accepted": 1}, "a false future blocks nobody"


def test_without_a_clock_nothing_is_too_old() -> None:
    assert Intake(SETTINGS).ingest(deliver(batch(1, boot=1))).rows == {"accepted": 1}
