"""Policies that choose for a batch, and exploration on top of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import ALL_ACTIONS, Action
from services.decision.heuristic import HeuristicSettings
from services.decision.policy import Choice, DqnPolicy, explore, greedy, rule
from services.decision.shield import ALLOWED
from services.errors import SettingsError
from tests.services.decision.rows import state, weights

ANYTHING = np.array([ALL_ACTIONS], np.uint8)


def named(name: str) -> Choice:
    policy = rule(name, HeuristicSettings(), np.random.default_rng(0))
    assert policy.name == policy.version == name
    return policy.choose(state(rho=1.0, tpot_p95=1.5), ANYTHING)


def test_the_network_takes_the_highest_q_among_the_allowed_actions() -> None:
    policy = DqnPolicy(weights("v1", [0, 1, 2, 3, 4]))
    choice = policy.choose(np.repeat(state(), 3, axis=0), np.array([ALL_ACTIONS, 0b00111, 1], np.uint8))
    assert choice.actions.tolist() == [Action.EVICT, Action.TIGHTEN, Action.HOLD]
    assert choice.q_values is not None
    assert choice.q_values[0].tolist() == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert choice.probabilities.tolist() == [1.0, 1.0, 1.0]
    assert (policy.name, policy.version) == ("dqn:v1", "v1")


def test_among_equals_the_lowest_action_wins_so_that_an_untrained_network_holds() -> None:
    assert greedy(np.zeros((1, 5), np.float32), ANYTHING).tolist() == [Action.HOLD]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5), st.integers(0, 15))
def test_greedy_never_leaves_the_mask(q: list[float], bits: int) -> None:
    mask = np.array([bits << 1 | 1], np.uint8)
    action = greedy(np.array([q], np.float32), mask)[0]
    assert ALLOWED[mask[0], action]
    assert np.float32(q[action]) == max(np.float32(q[a]) for a in range(5) if ALLOWED[mask[0], a])


def test_rules_by_name() -> None:
    assert named("static").actions.tolist() == [Action.HOLD]
    assert named("heuristic").actions.tolist() == [Action.TIGHTEN]
    assert named("one_line").actions.tolist() == [Action.WIDEN]
    fixed = named("fixed:1.4")
    assert (fixed.actions.tolist(), fixed.goal_rho) == ([Action.WIDEN], 1.4)
    assert named("random").probabilities.tolist() == [0.2]


@pytest.mark.parametrize("name", ["fixed", "fixed:", "fixed:1.7", "fixed:0.9", "fixed:nan", "fixed:x", "best", ""])
def test_a_name_that_is_no_rule_is_the_users_mistake(name: str) -> None:
    with pytest.raises(SettingsError, match="expected"):
        rule(name, HeuristicSettings(), np.random.default_rng(0))


def test_only_canaries_explore_and_the_probability_is_that_of_what_was_done() -> None:
    rows = 4000
    mask = np.full(rows, 0b10111, np.uint8)
    canary = np.arange(rows) % 2 == 0
    own = Choice(np.full(rows, Action.EVICT, np.int8), np.ones(rows))
    explored = explore(own, mask, canary, 0.2, np.random.default_rng(0))
    assert (explored.actions[~canary] == Action.EVICT).all()
    assert (explored.probabilities[~canary] == 1.0).all()
    assert ALLOWED[mask, explored.actions].all(), "never a masked action"
    others = canary & (explored.actions != Action.EVICT)
    assert 0.12 < others.sum() / canary.sum() < 0.18, "three of four random draws differ: 15 %"
    assert np.allclose(explored.probabilities[others], 0.2 / 4)
    assert np.allclose(explored.probabilities[canary & ~others], 0.8 + 0.2 / 4)


def test_without_epsilon_or_canaries_nothing_is_drawn() -> None:
    own = Choice(np.zeros(1, np.int8), np.ones(1))
    assert explore(own, ANYTHING, np.array([True]), 0.0, np.random.default_rng(0)) is own
    assert explore(own, ANYTHING, np.array([False]), 0.2, np.random.default_rng(0)) is own
