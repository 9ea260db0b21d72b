"""Policies on emulated fleets, offline: deterministic, safe, and doing what their names say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.engine.specs import FleetConfig
from loadgen.load import TARGET_SHARE, find_unit_load, tables_at
from loadgen.policies import policy_named
from loadgen.replay import Controls, replay
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.actions import Action
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from services import qweights
from services.decision.heuristic import HeuristicSettings
from services.decision.shield import ShieldSettings
from services.errors import UserError

DURATION_S = 160.0
CONFIG = FleetConfig()


@pytest.fixture(scope="module")
def tables() -> list[RequestTable]:
    workload = builtin("agent", duration_s=DURATION_S, seed=3).within_context(131_072)
    return tables_at(workload, 1.0, 2, DURATION_S, 3)


def _weights(bias: Action) -> qweights.Weights:
    """A network that prefers one action in every state."""
    tensors = {name: np.zeros(shape, np.float32) for name, shape in qweights.shapes((8,)).items()}
    tensors["advantage.bias"][bias] = 1.0
    return qweights.Weights(tensors, (8,), "constant")


def test_the_same_requests_give_the_same_answer(tables: list[RequestTable]) -> None:
    first = replay(CONFIG, tables, policy_named("heuristic"), DURATION_S)
    second = replay(CONFIG, tables, policy_named("heuristic"), DURATION_S)
    assert first.summary == second.summary
    assert (first.actions == second.actions).all()


def test_policies_that_never_act_do_not(tables: list[RequestTable]) -> None:
    for name in ("static", "rho_1.0", "vllm_recompute", "vllm_offload"):
        assert replay(CONFIG, tables, policy_named(name), DURATION_S).actions.sum() == 0


def test_fixed_rho_is_reached_with_one_action_a_worker(tables: list[RequestTable]) -> None:
    actions = replay(CONFIG, tables, policy_named("fixed:1.6"), DURATION_S).actions
    assert actions[Action.WIDEN] == 2
    assert actions[Action.TIGHTEN] == actions[Action.EVICT] == 0


def test_workers_are_held_while_their_windows_fill(tables: list[RequestTable]) -> None:
    run = replay(CONFIG, tables, policy_named("heuristic"), DURATION_S)
    assert run.steps == 80
    assert run.actions.sum() == 2 * (80 - 30), "30 steps of 2 s are held and not counted as decisions"


@pytest.mark.parametrize("action", list(Action))
def test_a_network_with_one_idea_never_runs_the_card_out_of_memory(tables: list[RequestTable], action: Action) -> None:
    summary = replay(CONFIG, tables, policy_named("dqn"), DURATION_S, weights=_weights(action)).summary
    assert summary.oom == 0
    assert summary.finished > 0, "whatever the policy wants, the engine goes on serving"


def test_a_dqn_without_weights_is_a_mistake(tables: list[RequestTable]) -> None:
    with pytest.raises(ValueError, match="needs weights"):
        replay(CONFIG, tables, policy_named("dqn"), DURATION_S)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="vllm_offload"):
        policy_named("magic")


def test_the_air_bag_costs_goodput_where_the_card_could_serve_more() -> None:
    chat = tables_at(builtin("chat", duration_s=DURATION_S, seed=3), 0.95, 2, DURATION_S, 3)
    static = replay(CONFIG, chat, policy_named("static"), DURATION_S).summary
    whole = replay(CONFIG, chat, policy_named("rho_1.0"), DURATION_S).summary
    assert static.goodput_tokens_per_s < whole.goodput_tokens_per_s


def test_tightening_on_late_tokens_alone_starves_a_card_that_is_short_of_compute() -> None:
    chat = tables_at(builtin("chat", duration_s=600.0, seed=1), 1.14, 2, 600.0, 1)
    careless = Controls(
        heuristic=HeuristicSettings(latency_high=1.0, first_token_late=math.inf),
        shield=ShieldSettings(first_token_late=math.inf),
    )
    rules = policy_named("heuristic")
    default = replay(CONFIG, chat, rules, 600.0).summary.goodput_tokens_per_s
    starved = replay(CONFIG, chat, rules, 600.0, controls=careless).summary.goodput_tokens_per_s
    assert starved < 0.6 * default


def test_load_one_is_where_the_reference_meets_the_slo_for_85_percent() -> None:
    workload = builtin("chat", duration_s=100.0, seed=5)
    unit = find_unit_load(CONFIG, workload, 100.0, 5)
    assert TARGET_SHARE <= unit.share < TARGET_SHARE + 0.1
    heavier = replay(CONFIG, tables_at(workload, unit.factor * 1.1, 2, 100.0, 5), policy_named("vllm_offload"), 100.0)
    assert heavier.summary.slo_token_share < TARGET_SHARE


def test_a_workload_that_no_card_can_serve_is_named() -> None:
    impossible = ClassLimits(ttft_base_s=1e-6, ttft_per_token_s=0.0, tpot_s=1e-6)
    limits = {**DEFAULT_LIMITS, ServiceClass.CHAT: impossible}
    with pytest.raises(UserError, match="too heavy"):
        find_unit_load(FleetConfig(limits=limits), builtin("chat", duration_s=60.0, seed=1), 60.0, 1)
