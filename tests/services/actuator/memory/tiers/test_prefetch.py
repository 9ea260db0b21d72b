"""Prefetch: done before the return, in memory nobody needs, over an idle link; loads priced by resources."""

from __future__ import annotations

import numpy as np
import pytest

from services.actuator.memory.prefetch import (
    Away,
    Headroom,
    PrefetchSettings,
    Source,
    away_sessions,
    due,
    load_or_recompute,
    starts,
)
from services.actuator.memory.returns import ReturnEstimator
from services.actuator.memory.victims import Machine, Prices

GB = 1e9
MACHINE = Machine(out_bytes_per_s=20 * GB, back_bytes_per_s=20 * GB, prefill_tokens_per_s=10_000)
PRICE = Prices()
SETTINGS = PrefetchSettings()
ROOMY = Headroom(free_bytes=100 * GB, forecast_free_bytes=100 * GB, link_backlog_s=0.0)


def away(size_gb: list[float], early_s: list[float], chance: list[float]) -> Away:
    size = np.array(size_gb) * GB
    return Away(size, size / 131_072, np.array(early_s), np.array(chance))


def rows(sessions: Away, headroom: Headroom = ROOMY, **more: float) -> list[int]:
    return due(sessions, headroom, MACHINE, PRICE, SETTINGS, **more).tolist()


def test_a_prefetch_begins_as_late_as_lets_it_finish_before_the_return() -> None:
    sessions = away([20, 20], [10, 1.4], [0.9, 0.9])
    assert starts(sessions, MACHINE, SETTINGS).tolist() == pytest.approx([8.5, -0.1])
    assert rows(sessions) == [1]


def test_the_memory_must_be_free_now_and_until_the_return() -> None:
    sessions = away([4, 3], [0, 0], [0.9, 0.9])
    assert rows(sessions, Headroom(100 * GB, 3.5 * GB, 0.0)) == [1], "running requests will need the rest"
    assert rows(sessions, Headroom(3.5 * GB, 100 * GB, 0.0)) == [1]
    assert rows(sessions, Headroom(0.0, 100 * GB, 0.0)) == []


def test_nothing_is_fetched_over_a_link_that_somebody_waits_for() -> None:
    assert rows(away([1], [0], [0.9]), Headroom(100 * GB, 100 * GB, 0.2)) == []


def test_an_unlikely_return_is_not_worth_a_place() -> None:
    assert rows(away([1, 1], [0, 0], [0.3, 0.8])) == [1]


def test_the_movement_budget_bounds_it() -> None:
    assert len(rows(away([1, 1, 1], [0, 0, 0], [0.9] * 3), budget_bytes=2 * GB)) == 2


def test_a_regular_session_is_back_on_the_card_just_before_its_client() -> None:
    estimator = ReturnEstimator()
    now_s = 0.0
    for _ in range(30):
        estimator.finished(1, 0, now_s)
        now_s += 61.0
        estimator.returned(1, now_s)
    estimator.finished(1, 0, now_s)
    one, size = np.array([1], dtype=np.int64), np.array([40 * GB])
    began = None
    for second in range(60):
        at_s = now_s + second
        sessions = away_sessions(estimator, one, size, np.array([300_000.0]), at_s, MACHINE, SETTINGS)
        if rows(sessions):
            began = second
            break
    assert began is not None, "it was never fetched"
    assert 40 <= began <= 59, f"begun {began} s after the last turn, back at 61 s, 2 s to load"


@pytest.mark.parametrize(
    ("deadline_s", "backlog_s", "prefill_backlog_s", "expected"),
    [
        (5.0, 0.0, 0.0, Source.LOAD),
        (5.0, 9.0, 0.0, Source.RECOMPUTE),  # the link would miss the deadline
        (5.0, 9.0, 9.0, Source.LOAD),  # both miss it: the scarcer resource is spared
        (float("inf"), 9.0, 0.0, Source.LOAD),  # no deadline: patience is free
    ],
)
def test_a_load_that_would_miss_its_deadline_is_recomputed(
    deadline_s: float, backlog_s: float, prefill_backlog_s: float, expected: Source
) -> None:
    chosen = load_or_recompute(
        4 * GB, 30_000, deadline_s, MACHINE, PRICE, link_backlog_s=backlog_s, prefill_backlog_s=prefill_backlog_s
    )
    assert chosen == expected


def test_the_slower_way_is_taken_while_its_resource_idles() -> None:
    slow_link = Machine(out_bytes_per_s=GB, back_bytes_per_s=GB, prefill_tokens_per_s=10_000)
    assert load_or_recompute(4 * GB, 30_000, 10.0, slow_link, Prices(gpu_s=1.0, link_s=0.1)) == Source.LOAD, (
        "4 s of an idle link are cheaper than 3 s of a busy GPU"
    )
    assert load_or_recompute(4 * GB, 30_000, 10.0, slow_link, Prices(gpu_s=0.1, link_s=1.0)) == Source.RECOMPUTE
