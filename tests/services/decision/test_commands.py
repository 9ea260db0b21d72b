"""From states to commands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from schemas.actions import ACTION_BATCH, ALL_ACTIONS, Action, ActionBatch, Hold, MaskReason, actions_of
from schemas.features import FEATURE_COUNT
from schemas.identity import action_id
from schemas.states import StateBatch, features_of
from services.decision.book import InForce
from services.decision.commands import Decider
from services.decision.heuristic import HeuristicSettings
from services.decision.intake import Admitted
from services.decision.policy import DqnPolicy, rule
from services.decision.settings import Settings
from services.decision.shield import ALLOWED
from tests.services.decision.rows import state, state_batch, weights
from tests.services.decision.test_policy import risky

DQN = DqnPolicy(weights("v1", [0, 1, 2, 3, 4]))
HEURISTIC = rule("heuristic", HeuristicSettings(), np.random.default_rng(0))
ALONE = InForce(HEURISTIC, None)


def decided(batches: Sequence[StateBatch], in_force: InForce = ALONE, **settings: object) -> list[ActionBatch]:
    decider = Decider(Settings(**settings), np.random.default_rng(0))  # type: ignore[arg-type]
    admitted = [Admitted(b, features_of(b), bytes(b.classes), bytes(b.holds)) for b in batches]
    return decider.decide(admitted, in_force).batches


def test_a_command_is_absolute_and_tells_why() -> None:
    (batch,) = decided([state_batch(state(tpot_p95=1.5), step=4, t_ns=10_000_000_000)])
    (command,) = actions_of(batch)
    assert (batch.node, batch.boot_id, batch.step, batch.t_ns) == ("n0", 7, 4, 10_000_000_000)
    assert batch.policy_version == command.policy == "heuristic"
    assert command.worker == "n0/0/w0"
    assert command.action_id == action_id("n0/0/w0", 7, 4)
    assert (command.action, command.target_rho, command.target_max_running) == (Action.TIGHTEN, 1.1, 204)
    assert command.base_generation == 3
    assert (command.deadline_ns, command.lease_ns) == (12_000_000_000, 16_000_000_000), "1 and 3 steps of 2 s"
    assert command.probability == 1.0
    assert command.mask == ALL_ACTIONS & ~(1 << Action.WIDEN)
    assert command.mask_reasons == (0, MaskReason.LATENCY_AT_LIMIT, 0, 0, 0)
    assert not command.q_values
    assert not command.shadows


def test_a_network_sends_its_q_values_and_a_shadow_what_it_would_have_done() -> None:
    (batch,) = decided([state_batch(state())], InForce(HEURISTIC, DQN))
    (shadow,) = actions_of(batch)[0].shadows
    assert actions_of(batch)[0].action == Action.HOLD, "the heuristic acts"
    assert (shadow.policy, shadow.action, shadow.q_values) == ("dqn:v1", Action.EVICT, (-1.0, 0.0, 1.0, 2.0, 3.0))
    (batch,) = decided([state_batch(state())], InForce(DQN, None))
    assert actions_of(batch)[0].q_values == (-1.0, 0.0, 1.0, 2.0, 3.0)
    assert (actions_of(batch)[0].action, actions_of(batch)[0].policy, batch.policy_version) == (
        Action.EVICT,
        "dqn:v1",
        "v1",
    )


def test_a_held_worker_gets_hold_with_its_reason_and_keeps_its_quota() -> None:
    rows = np.repeat(state(rho=1.4), 2, axis=0)
    (batch,) = decided([state_batch(rows, holds=[Hold.STALE, 0])], InForce(DQN, DQN))
    held, free = actions_of(batch)
    assert (held.action, held.hold, held.mask, held.target_rho) == (Action.HOLD, Hold.STALE, 1, 1.4)
    assert held.mask_reasons == (0, *[MaskReason.HELD] * 4)
    assert len(held.q_values) + len(held.shadows) == 0, "nothing is made of a state that is not to be trusted"
    assert (free.action, free.hold) == (Action.EVICT, Hold.NONE)


def test_each_message_of_a_drain_gets_its_own_answer_the_same_as_alone() -> None:
    many = [
        state_batch(np.concatenate([state(rho=1.0 + k / 10), state(u_alloc=k / 4)]), node=f"n{k}") for k in range(5)
    ]
    many.insert(2, state_batch(state()[:0], node="empty"))
    together = decided(many, InForce(DQN, HEURISTIC))
    assert together == [decided([batch], InForce(DQN, HEURISTIC))[0] for batch in many]
    assert decided([]) == []


def test_a_fixed_policy_jumps_to_its_rho() -> None:
    fixed = rule("fixed:1.6", HeuristicSettings(), np.random.default_rng(0))
    (batch,) = decided([state_batch(state(rho=1.0))], InForce(fixed, None))
    assert (actions_of(batch)[0].action, actions_of(batch)[0].target_rho) == (Action.WIDEN, 1.6)
    assert actions_of(batch)[0].target_max_running == 256


def test_a_step_of_another_length_moves_deadline_and_lease() -> None:
    (batch,) = decided([state_batch(state(), t_ns=0)], step_s=1.0, deadline_steps=1.5, lease_steps=4)
    assert (actions_of(batch)[0].deadline_ns, actions_of(batch)[0].lease_ns) == (1_500_000_000, 4_000_000_000)


def test_canaries_are_the_same_workers_in_every_step_and_only_they_explore() -> None:
    rows = np.repeat(state(), 200, axis=0)
    steps = [state_batch(rows, step=step) for step in range(30)]
    explored: set[str] = set()
    for batch in decided(steps, epsilon=0.2, canary_share=0.1):
        explored |= {a.worker for a in actions_of(batch) if a.probability < 1.0}
        assert all(a.probability > 0.8 for a in actions_of(batch) if a.action == Action.HOLD)
    assert 5 <= len(explored) <= 40, "about a tenth of 200"
    again = decided(steps[:1], epsilon=0.2, canary_share=0.1)[0]
    assert {a.worker for a in actions_of(again) if a.probability < 1.0} == explored
    assert all(a.probability == 1.0 for a in actions_of(decided(steps[:1], epsilon=0.2)[0])), "no share, no canary"


@given(
    arrays(np.float32, (3, FEATURE_COUNT), elements=st.floats(width=32)),
    st.lists(st.integers(0, 6), min_size=3, max_size=3),
    st.lists(st.integers(0, 7), min_size=3, max_size=3),
    st.sampled_from([DQN, HEURISTIC]),
)
def test_whatever_comes_in_every_command_is_allowed_in_range_and_encodable(
    features: np.ndarray, classes: list[int], holds: list[int], acting: DqnPolicy
) -> None:
    (batch,) = decided([state_batch(features, classes=classes, holds=holds)], InForce(acting, DQN))
    for command in actions_of(batch):
        assert ALLOWED[command.mask, command.action]
        assert 1.0 <= command.target_rho <= 1.6
        assert 4 <= command.target_max_running <= 1024
        assert not command.hold or command.action == Action.HOLD
    assert ACTION_BATCH.decode(ACTION_BATCH.encode(batch)) == batch


def test_an_action_that_the_risk_head_took_away_carries_its_own_reason_and_stays_in_the_mask() -> None:
    policy = DqnPolicy(risky("v1", [0, 1, 2, 3, 4], [0.1, 0.2, 0.3, 0.7, 0.9]))
    (batch,) = decided([state_batch(state(f_frag=0.0))], InForce(policy, None))
    (told,) = actions_of(batch)
    assert (told.action, told.policy, told.probability) == (Action.TIGHTEN, "dqn:v1", 1.0)
    assert told.mask_reasons == (0, 0, 0, MaskReason.NOTHING_FRAGMENTED, MaskReason.RISK_VETO)
    assert told.mask == ALL_ACTIONS & ~(1 << Action.COMPACT), "learning needs the shield's mask alone"
    assert told.q_values[Action.EVICT] == max(told.q_values)
