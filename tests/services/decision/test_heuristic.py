"""The heuristic's rules one by one, and the baselines."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from schemas.actions import ALL_ACTIONS, Action
from schemas.features import FEATURE_COUNT
from services.decision import heuristic
from services.decision.heuristic import HeuristicSettings
from services.decision.shield import ALLOWED, ShieldSettings, masks
from tests.services.decision.rows import state

NAN = float("nan")
SETTINGS = HeuristicSettings()
ANYTHING = np.array([ALL_ACTIONS], np.uint8)


def without(*actions: Action) -> np.ndarray:
    return np.array([ALL_ACTIONS & ~sum(1 << action for action in actions)], np.uint8)


def choice(changes: Mapping[str, float], mask: np.ndarray = ANYTHING) -> Action:
    return Action(heuristic.choose(state(**{"f_frag": 0.05, **changes}), mask, SETTINGS)[0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Action.HOLD),
        ({"tpot_p95": 1.2}, Action.TIGHTEN),
        ({"tpot_p95": 1.2, "ttft_p95": 1.0}, Action.HOLD),  # the queue is late too: a smaller batch would not help
        ({"tpot_p95": 1.2, "since_tighten": 1}, Action.HOLD),  # the last one has not shown its effect yet
        ({"preemption_rate": 2.0}, Action.TIGHTEN),
        ({"u_alloc": 0.9}, Action.EVICT),
        ({"u_alloc": 0.9, "since_evict": 1}, Action.HOLD),  # every other step is somebody else's
        ({"u_alloc": 0.7, "du_alloc": 0.05}, Action.EVICT),  # growing towards it
        ({"u_alloc": 0.9, "q0_share": 0.5}, Action.HOLD),  # half the card: its hard quota is far
        ({"u_alloc": 0.6, "l_queue_memory": 3}, Action.EVICT),
        ({"u_alloc": 0.3, "l_queue_memory": 3, "u_reserved": 0.95}, Action.WIDEN),
        ({"u_alloc": 0.3, "l_queue_memory": 3, "u_reserved": 0.95, "tpot_p95": NAN}, Action.WIDEN),
        ({"u_alloc": 0.3, "l_queue_memory": 3, "u_reserved": 0.95, "tpot_p95": 0.95}, Action.HOLD),
        ({"l_queue": 30, "running": 256, "tpot_p95": 0.85, "ttft_p95": 2.0}, Action.HOLD),  # tokens would come late
        ({"l_queue": 30, "running": 256}, Action.WIDEN),  # the ceiling is what they wait for
        ({"u_alloc": 0.3, "l_queue_memory": 3, "u_reserved": 0.95, "neighbour_queue": 2}, Action.HOLD),  # so do they
        ({"u_alloc": 0.3, "l_queue_memory": 3, "u_reserved": 0.95, "preemption_rate": 0.1}, Action.TIGHTEN),
        ({"u_alloc": 0.3, "l_queue_memory": 3, "f_frag": 0.8}, Action.HOLD),  # own holes are as good as a long run
        ({"u_alloc": 0.9, "host_use": 0.8}, Action.HOLD),  # copies would push out others'
        ({"neighbour_queue": 3, "f_frag": 0.8}, Action.COMPACT),
        ({"f_frag": 0.9}, Action.HOLD),  # nobody waits for the pages
        ({"u_alloc": 0.9, "quota_hard": NAN, "preemption_rate": NAN, "du_alloc": NAN}, Action.HOLD),
    ],
)
def test_rules(changes: dict[str, float], expected: Action) -> None:
    assert choice(changes) == expected


def test_a_masked_rule_gives_way_to_the_next() -> None:
    waiting = {"u_alloc": 0.6, "l_queue_memory": 3.0, "u_reserved": 0.95}
    assert choice(waiting, without(Action.EVICT)) == Action.WIDEN
    scattered = {"neighbour_queue": 3, "f_frag": 0.8}
    assert choice(scattered) == Action.COMPACT
    assert choice(scattered, without(Action.COMPACT)) == Action.HOLD
    assert choice(waiting, np.array([1], np.uint8)) == Action.HOLD


def test_static_holds_whatever_happens() -> None:
    assert heuristic.static(state(tpot_p95=9.0, u_alloc=2.0), ANYTHING).tolist() == [Action.HOLD]


@pytest.mark.parametrize(("rho", "expected"), [(1.2, Action.WIDEN), (1.4, Action.HOLD), (1.6, Action.TIGHTEN)])
def test_fixed_moves_towards_its_rho(rho: float, expected: Action) -> None:
    assert heuristic.fixed(state(rho=rho), ANYTHING, 1.4).tolist() == [expected]
    assert heuristic.fixed(state(rho=rho), np.array([1], np.uint8), 1.4).tolist() == [Action.HOLD]


def test_the_one_line_rule_widens_first_and_then_evicts_above_half() -> None:
    assert heuristic.one_line(state(rho=1.2, u_alloc=0.9), ANYTHING).tolist() == [Action.WIDEN]
    assert heuristic.one_line(state(rho=1.6, u_alloc=0.51), ANYTHING).tolist() == [Action.EVICT]
    assert heuristic.one_line(state(rho=1.6, u_alloc=0.5), ANYTHING).tolist() == [Action.HOLD]
    assert heuristic.one_line(state(rho=1.2, u_alloc=0.9), without(Action.WIDEN)).tolist() == [Action.EVICT]


def test_random_takes_every_allowed_action_and_no_other() -> None:
    mask = np.full(500, 0b10101, np.uint8)
    drawn = heuristic.random_masked(mask, np.random.default_rng(1))
    assert set(drawn.tolist()) == {0, 2, 4}
    again = heuristic.random_masked(mask, np.random.default_rng(1))
    assert (drawn == again).all(), "a seed gives one answer"


@given(
    arrays(np.float32, (4, FEATURE_COUNT), elements=st.floats(width=32)),
    st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_every_choice_is_allowed(features: np.ndarray, classes: list[int]) -> None:
    mask, _ = masks(features, np.array(classes), np.zeros(4, int), ShieldSettings())
    rng = np.random.default_rng(0)
    for actions in (
        heuristic.choose(features, mask, SETTINGS),
        heuristic.fixed(features, mask, 1.4),
        heuristic.one_line(features, mask),
        heuristic.random_masked(mask, rng),
        heuristic.static(features, mask),
    ):
        assert ALLOWED[mask, actions].all()
