"""Two policies side by side: who acts where, and what is told of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import OPERATOR, Action, Hold, WorkerAction, actions_of
from schemas.config import mode_key
from schemas.states import features_of
from services.decision.book import InForce
from services.decision.commands import Decider
from services.decision.heuristic import HeuristicSettings
from services.decision.intake import Admitted
from services.decision.policy import DqnPolicy, Policy, rule
from services.decision.probation import Split, split_for, tried_on
from services.decision.settings import Settings
from tests.services.decision.rows import state, state_batch, weights
from tests.services.decision.test_modes import NOW, SHADOW, modes

NEW = DqnPolicy(weights("v2", [0, 0, 0, 0, 1]))
"""Always evicts."""
OLD = DqnPolicy(weights("v1", [0, 0, 0, 1, 0]))
"""Always compacts."""
HEURISTIC = rule("heuristic", HeuristicSettings(), np.random.default_rng(0))
HALF = Split(0.5, part_cards=True)


def workers_of(node: str, cards: int, each: int = 2) -> tuple[str, ...]:
    return tuple(f"{node}/{card}/w{k}" for card in range(cards) for k in range(each))


def test_a_cards_workers_stay_together_and_some_cards_are_on_either_side() -> None:
    node = workers_of("n0", 4)
    tried = tried_on(node, "v1", 0.5)
    assert sum(tried) == 4
    assert all(tried[row] == tried[row + 1] for row in range(0, 8, 2))
    assert sum(tried_on(node, "v1", 0.01)) == 2, "at least one card"
    assert sum(tried_on(node, "v1", 0.99)) == 6, "and not all"
    assert all(tried_on(node, "v1", 1.0))
    assert tried_on((), "v1", 0.5) == ()


def test_the_order_of_a_nodes_workers_does_not_matter_and_another_champion_is_tried_on_others() -> None:
    node = workers_of("n0", 6)
    tried = dict(zip(node, tried_on(node, "v1", 0.5), strict=True))
    assert dict(zip(node[::-1], tried_on(node[::-1], "v1", 0.5), strict=True)) == tried
    assert len({tried_on(node, f"v{k}", 0.5) for k in range(20)}) > 5


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 3), st.floats(0.01, 0.99), st.text(max_size=8))
def test_of_two_workers_or_more_some_are_on_either_side(
    nodes: int, cards: int, each: int, wanted: float, version: str
) -> None:
    fleet = [workers_of(f"n{k}", cards, each) for k in range(nodes)]
    split = split_for(fleet, version, wanted)
    sides = {side for node in fleet for side in tried_on(node, version, *split)}
    assert sides == ({True} if nodes * cards * each == 1 else {True, False})
    assert split.part_cards == (nodes * cards == 1 and each > 1)


def test_a_fleet_of_single_workers_is_parted_near_the_share_that_is_wanted() -> None:
    fleet = [workers_of(f"n{k}", 1, 1) for k in range(200)]
    split = split_for(fleet, "v1", 0.3)
    assert sum(tried_on(node, "v1", *split)[0] for node in fleet) == 60
    assert split_for(fleet[:1], "v1", 0.5) == split_for([], "v1", 0.5) == Split(1.0), "nobody to compare with"


def decided(acting: Policy, former: Policy | None, *, settings: Settings | None = None, split: Split = HALF,
            orders: dict[str, Any] | None = None, rows: int = 4, **features: float) -> list[WorkerAction]:  # fmt: skip
    batch = state_batch(np.repeat(state(**features), rows, axis=0))
    admitted = [Admitted(batch, features_of(batch), bytes(batch.classes), bytes(batch.holds))]
    standings = modes(orders).standings(batch.workers, batch.classes, NOW) if orders else None
    decider = Decider(settings or Settings(), np.random.default_rng(0))
    (found,) = decider.decide(admitted, InForce(acting, None, former, split), standings).batches
    assert found.policy_version == acting.version
    return actions_of(found)


def test_each_worker_is_commanded_by_its_own_policy_and_says_so() -> None:
    told = decided(NEW, OLD)
    sides = tried_on(tuple(one.worker for one in told), "v2", *HALF)
    assert sum(sides) == 2
    for one, tried in zip(told, sides, strict=True):
        assert (one.policy, one.action) == (("dqn:v2", Action.EVICT) if tried else ("dqn:v1", Action.COMPACT))
        assert one.q_values[one.action] == max(one.q_values), "the Q values are those of the policy that chose"
        assert (one.probability, one.shadows) == (1.0, ())


def test_a_former_rule_has_no_q_values_and_jumps_to_its_own_rho() -> None:
    fixed = rule("fixed:1.6", HeuristicSettings(), np.random.default_rng(0))
    told = decided(NEW, fixed, rho=1.2)
    assert {(one.policy, one.action, one.target_rho) for one in told} == {
        ("dqn:v2", Action.EVICT, 1.2),
        ("fixed:1.6", Action.WIDEN, 1.6),
    }
    assert all(np.isfinite(one.q_values).all() == (one.policy == "dqn:v2") for one in told)


def test_a_node_on_one_side_alone_names_one_policy() -> None:
    rows = decided(NEW, HEURISTIC, split=Split(1e-9), rows=1)
    assert [one.policy for one in rows] == ["heuristic"]
    assert [one.policy for one in decided(NEW, HEURISTIC, split=Split(1 - 1e-9), rows=1)] == ["dqn:v2"]


def test_a_worker_that_an_operator_holds_is_told_what_its_own_policy_would_have_done() -> None:
    free = {one.worker: one for one in decided(NEW, OLD)}
    orders = {mode_key(worker=worker): SHADOW for worker in list(free)[:3]}
    for one in decided(NEW, OLD, orders=orders):
        if one.worker not in [*free][:3]:
            assert one.policy == free[one.worker].policy
            continue
        own = free[one.worker]
        assert (one.policy, one.hold, one.action) == (OPERATOR, Hold.SHADOW, Action.HOLD)
        assert [(shadow.policy, shadow.action) for shadow in one.shadows] == [(own.policy, own.action)]


def test_exploration_keeps_the_policy_and_its_probability() -> None:
    told = decided(NEW, OLD, settings=Settings(epsilon=0.2, canary_share=1.0), rows=400)
    for one in told:
        own = Action.EVICT if one.policy == "dqn:v2" else Action.COMPACT
        assert one.probability == pytest.approx(0.84 if one.action == own else 0.04)
    assert {one.policy for one in told if one.probability < 0.5} == {"dqn:v1", "dqn:v2"}
