"""What the estimator is taught and asked: nothing of the future."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from loadgen.requests import NO_TURN
from loadgen.returns_training import Waits, client_waits, cut_of, told, waits_of, walk, with_gaps_of
from loadgen.workload import Workload, builtin
from schemas.endings import Ending
from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import HORIZON_S
from services.actuator.memory.returns import ReturnEstimator


@pytest.fixture(scope="module")
def agents() -> Workload:
    return builtin("agent", 600.0, seed=3)


def waits(gaps_s: list[float], end_s: float) -> Waits:
    """A session each, which all finish their turn at 0."""
    count = len(gaps_s)
    return Waits(np.arange(count), np.zeros(count, dtype=np.int64), np.zeros(count), np.array(gaps_s), end_s)


def test_what_happens_after_the_stretch_teaches_nothing() -> None:
    early, late = ([10.0, 20.0, later, np.inf] for later in (500.0, 900.0))
    known = []
    for gaps_s in (early, late):
        estimator = ReturnEstimator()
        walk(estimator, waits(gaps_s, 1000.0), until_s=100.0)
        assert estimator.waiting == 2
        known.append(estimator.kind_rates(0))
    assert np.array_equal(known[0], known[1])


def test_a_trace_that_ends_does_not_end_its_sessions() -> None:
    cut, whole = ReturnEstimator(), ReturnEstimator()
    gaps_s = [*np.linspace(5.0, 15.0, 50).tolist(), *[np.inf] * 50]
    walk(cut, waits(gaps_s, 60.0))
    walk(whole, waits(gaps_s, 2 * HORIZON_S))
    for estimator in (cut, whole):
        estimator.finished(1000, 0, 1e6)
    ended = [float(one.ended(np.array([1000]), 1e6)[0]) for one in (cut, whole)]
    assert ended[0] < 0.1, "nobody saw an end"
    assert ended[1] == pytest.approx(0.5, abs=0.05)


def test_what_is_told_of_a_turn_depends_on_earlier_gaps_only(agents: Workload) -> None:
    table = agents.requests
    at_s = waits_of(agents).at_s
    row = int(np.flatnonzero(table.next_turn != NO_TURN)[len(table) // 2])
    think_s = table.think_s.copy()
    think_s[row] = 7777.0
    changed = type(table)(**{**vars(table), "think_s": think_s})
    first, second = (told(ReturnEstimator(), one).expected_think_s for one in (table, changed))
    assert first is not None
    assert second is not None
    before = at_s <= at_s[row]
    assert np.array_equal(first[before], second[before])
    assert not np.array_equal(first, second)


def test_a_single_call_is_told_as_ended_once_that_is_known() -> None:
    chats = builtin("chat", 1200.0, seed=1)
    estimator = ReturnEstimator()
    walk(estimator, Waits(*_fields(waits_of(chats)), 2 * HORIZON_S))
    asked = told(estimator.with_kinds_only(estimator.settings), builtin("chat", 60.0, seed=2).requests)
    assert asked.expected_think_s is not None
    assert np.isinf(asked.expected_think_s).all()


def test_sessions_take_the_gaps_of_a_trace(agents: Workload) -> None:
    source = Waits(np.repeat([1, 2], 3), np.zeros(6, dtype=np.int64), np.arange(6.0), np.array(
        [1.0, 2.0, np.inf, 100.0, 200.0, np.inf]), 1e6)  # fmt: skip
    table = with_gaps_of(agents.requests, source, np.random.default_rng(0)).check()
    for first in np.flatnonzero(table.is_first).tolist():
        row, seen = first, []
        while table.next_turn[row] != NO_TURN:
            seen.append(float(table.think_s[row]))
            row = int(table.next_turn[row])
        assert set(seen) <= {1.0, 2.0} or set(seen) <= {100.0, 200.0}, "one session's gaps, in turn"
        assert all(here != after for here, after in itertools.pairwise(seen))


def test_how_turns_ended_reaches_the_estimator_and_goes_with_the_gaps(agents: Workload) -> None:
    count = 400
    ended = np.tile([Ending.TOOL, Ending.DONE], count // 2).astype(np.uint8)
    gaps_s = np.where(ended == Ending.TOOL, 5.0, 500.0)
    source = dataclasses.replace(waits(gaps_s.tolist(), 1e6), ending=ended)
    for learned, told_apart in ((source, True), (source.without_endings(), False)):
        estimator = ReturnEstimator()
        walk(estimator, learned)
        tool, done = (return_rates.within(estimator.kind_rates(0, one)[None], np.zeros(1), np.full(1, 30.0))[0]
                      for one in (Ending.TOOL, Ending.DONE))  # fmt: skip
        assert (tool - done > 0.8) == told_apart
    assert source.take(np.array([1, 3])).ending.tolist() == [Ending.DONE] * 2
    pairs = dataclasses.replace(source, session=np.repeat(np.arange(count // 2), 2), gap_s=gaps_s)
    table = with_gaps_of(agents.requests, pairs, np.random.default_rng(0)).check()
    follows = table.next_turn != NO_TURN
    assert (table.think_s[follows] == np.where(table.ending == Ending.TOOL, 5.0, 500.0)[follows]).all()
    assert (table.ending[~follows] == Ending.DONE).all(), "as the drawn session's last turn"
    silent = with_gaps_of(agents.requests, pairs.without_endings(), np.random.default_rng(0))
    assert silent.ending is None
    assert np.array_equal(silent.think_s, table.think_s), "the same draws"


def test_clients_calls_follow_their_rates(tmp_path: Path) -> None:
    file = tmp_path / "rates.csv"
    lines = [f"{client},{second},{1 + client},1,Gamma,1,1" for client in range(2) for second in range(0, 86_400, 600)]
    file.write_text("\n".join(["client,t_s,rate_rps,cv,dist,shape,scale", *lines]))
    drawn = client_waits(file, 1.0, 0.1, seed=1)
    assert len(drawn) == pytest.approx(8640, rel=0.05)
    assert np.bincount(drawn.session)[1] == pytest.approx(2 * np.bincount(drawn.session)[0], rel=0.1)
    estimator = ReturnEstimator()
    walk(estimator, drawn, until_s=cut_of(drawn))
    assert estimator.waiting == 2


def _fields(one: Waits) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    return one.session, one.kind, one.at_s, one.gap_s
