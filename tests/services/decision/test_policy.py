"""Policies that choose for a batch, and exploration on top of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.control import Seen
from loadgen.evaluate.entrants import entrant
from schemas.actions import ALL_ACTIONS, Action
from schemas.features import FEATURE_COUNT
from services import qweights
from services.decision.heuristic import HeuristicSettings
from services.decision.policy import Choice, DqnPolicy, explore, rule
from services.decision.shield import ALLOWED
from services.errors import PolicyError, SettingsError
from services.qweights import Weights
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
    assert DqnPolicy(weights("v1", [0, 0, 0, 0, 0])).choose(state(), ANYTHING).actions.tolist() == [Action.HOLD]


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5), st.integers(0, 15))
def test_greedy_never_leaves_the_mask(q: list[float], bits: int) -> None:
    mask = np.array([bits << 1 | 1], np.uint8)
    action = qweights.best(qweights.Values(np.array([q], np.float32)), ALLOWED[mask])[0]
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


def risky(version: str, q: list[float], risks: list[float], veto: object = 0.5) -> Weights:
    """As ``weights``, with a risk head that says these risks of every state."""
    plain = weights(version, q)
    tensors = dict(plain.tensors)
    for name, shape in qweights.shapes(plain.hidden, 3).items():
        tensors.setdefault(name, np.zeros(shape, np.float32))
    tensors["risk.bias"] = np.log(np.array(risks) / (1.0 - np.array(risks))).astype(np.float32)
    return Weights(tensors, plain.hidden, version, 1, 3, qweights.Origin(config={"veto": veto}))


def test_the_risk_heads_veto_is_the_files_own() -> None:
    q, risks = [0.0, 1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.7, 0.9]
    choice = DqnPolicy(risky("v1", q, risks)).choose(state(), ANYTHING)
    assert choice.actions.tolist() == [Action.TIGHTEN], "the best of those at most as risky as 0.5"
    assert choice.probabilities.tolist() == [1.0]
    assert choice.vetoed is not None
    assert choice.vetoed.tolist() == [[False, False, False, True, True]]
    without = DqnPolicy(risky("v1", q, risks, veto=1.0)).choose(state(), ANYTHING)
    assert (without.actions.tolist(), without.vetoed) == ([Action.EVICT], None)


def test_where_all_that_is_allowed_is_too_risky_the_least_risky_is_done() -> None:
    policy = DqnPolicy(risky("v1", [0, 1, 2, 3, 4], [0.8, 0.7, 0.6, 0.9, 0.9]))
    choice = policy.choose(np.repeat(state(), 2, axis=0), np.array([ALL_ACTIONS, 0b00011], np.uint8))
    assert choice.actions.tolist() == [Action.TIGHTEN, Action.WIDEN]
    assert choice.vetoed is not None
    assert choice.vetoed.tolist() == [[True, True, False, True, True], [True, False, False, False, False]]


def test_exploration_keeps_out_of_what_the_risk_head_forbids() -> None:
    rows = 2000
    mask = np.full(rows, ALL_ACTIONS, np.uint8)
    policy = DqnPolicy(risky("v1", [0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.7, 0.9]))
    own = policy.choose(np.repeat(state(), rows, axis=0), mask)
    explored = explore(own, mask, np.ones(rows, np.bool_), 0.2, np.random.default_rng(0))
    assert set(explored.actions.tolist()) == {Action.HOLD, Action.WIDEN, Action.TIGHTEN}
    assert np.allclose(explored.probabilities[explored.actions == Action.HOLD], 0.2 / 3)


@pytest.mark.parametrize("veto", ["0.5", -0.1, 1.5, None, True, [0.5]])
def test_a_file_whose_veto_is_none_is_refused(veto: object) -> None:
    with pytest.raises(PolicyError, match="veto"):
        DqnPolicy(risky("v1", [0, 1, 2, 3, 4], [0.1] * 5, veto=veto))


def test_the_live_policy_chooses_as_the_examination_does(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    made = risky("v1", [0, 0, 0, 0, 0], [0.4] * 5)
    tensors = {name: rng.normal(0, 0.3, tensor.shape).astype(np.float32) for name, tensor in made.tensors.items()}
    file = tmp_path / "v1.safetensors"
    file.write_bytes(qweights.save(msgspec.structs.replace(made, tensors=tensors)))
    features = np.abs(rng.normal(1.0, 1.0, (400, FEATURE_COUNT))).astype(np.float32)
    mask = (rng.integers(0, 16, 400) << 1 | 1).astype(np.uint8)
    seen = Seen(0, features, mask, *[np.zeros(400)] * 4)  # type: ignore[arg-type]
    examined = entrant("dqn", file).rule([slice(0, 400)], [0])(seen)
    live = DqnPolicy(qweights.load(file.read_bytes())).choose(features, mask)
    assert live.actions.tolist() == examined.tolist()
    assert live.vetoed is not None
    assert live.vetoed.any(), "the veto had something to say"
