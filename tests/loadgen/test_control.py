"""The offline control loop: the live loop's parts, in the live loop's order."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from loadgen.control import Control, Controls, Seen, class_of
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.engine.specs import FleetConfig
from loadgen.load import tables_at
from loadgen.policies import PolicySpec, policy_named
from loadgen.replay import replay
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.actions import Action, Hold, MaskReason
from schemas.classes import ServiceClass
from schemas.identity import SCHEMA_VERSION, STEP_NS, STEP_S
from schemas.outcomes import WorkerOutcome, outcome_batch
from schemas.telemetry import NodeSample, pack_metrics
from schemas.transitions import REWARD_PARTS, TransitionBatch, columns_of
from services import qweights
from services.actuator import budget, effects, views
from services.decision import heuristic
from services.decision.shield import ALLOWED, ShieldSettings, masks
from services.decision.targets import targets
from services.featurizer.tracker import Tracker, TrackerSettings
from services.featurizer.transitions import Transitions

DURATION_S = 160.0
CONFIG = FleetConfig(cards=2)
WORKERS = 4
NODE = "n0"
LISTED = tuple(f"{NODE}/{k // 2}/w{k}" for k in range(WORKERS))
SHORT = Controls(tracker=TrackerSettings(window_steps=5))


@pytest.fixture(scope="module")
def tables() -> list[RequestTable]:
    workload = builtin("agent", duration_s=DURATION_S, seed=3).within_context(131_072)
    return tables_at(workload, 2.0, WORKERS, DURATION_S, 3)


def _random_weights() -> qweights.Weights:
    rng = np.random.default_rng(1)
    tensors = {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in qweights.shapes((16,)).items()}
    return qweights.Weights(tensors, (16,), "random")


def _by_hand(tables: list[RequestTable], spec: PolicySpec, weights: qweights.Weights) -> tuple[Any, list[int]]:
    """The loop as the services run it, spelled out."""
    fleet = Fleet(msgspec.structs.replace(CONFIG, mode=spec.mode), tables)
    tracker, shield = Tracker(), ShieldSettings()
    cards, classes = fleet.card_of, np.array([class_of(table) for table in tables], np.uint8)
    scales, counts = np.ones(CONFIG.cards), np.zeros(5, np.int64)
    for step in range(round(DURATION_S / STEP_S)):
        metrics = fleet.metrics()
        states = tracker.observe(_sample(step, metrics, cards, classes))
        assert states is not None
        mask, reasons = masks(states.features, states.classes, states.holds, shield)
        if spec.control == "heuristic":
            actions = heuristic.choose(states.features, mask, heuristic.HeuristicSettings()).astype(np.int64)
        else:
            actions = np.where(ALLOWED[mask], qweights.q_values(weights, states.features), -np.inf).argmax(1)
        rho, ceiling = targets(actions, states.features, states.classes, shield)
        late = [(reasons[cards == card] == MaskReason.LATENCY_AT_LIMIT).any() for card in range(CONFIG.cards)]
        scales = budget.next_scales(scales, np.array(late))
        seen = views.views_of(metrics, cards, classes, CONFIG.limits)
        plan = effects.plan(actions, rho, ceiling, seen, scales)
        fleet.command(
            rho=plan.rho, max_running=plan.max_running, evict_bytes=plan.evict_bytes, compact_bytes=plan.compact_bytes
        )
        tracker.executed(NODE, actions, step)
        counts += np.bincount(actions[states.holds == 0], minlength=5)
        fleet.advance(STEP_S)
    return summary(fleet.results()), counts.tolist()


def _sample(step: int, metrics: np.ndarray, cards: np.ndarray, classes: np.ndarray) -> NodeSample:
    return NodeSample(
        NODE, 1, step, SCHEMA_VERSION, step * STEP_NS, LISTED, tuple(cards.tolist()), tuple(classes.tolist()),
        pack_metrics(metrics),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["heuristic", "dqn"])
def test_replay_is_the_loop_that_the_services_run(tables: list[RequestTable], name: str) -> None:
    weights = _random_weights()
    run = replay(CONFIG, tables, policy_named(name), DURATION_S, weights=weights)
    expected, counts = _by_hand(tables, policy_named(name), weights)
    assert run.summary == expected, "bit for bit"
    assert run.actions.tolist() == counts
    assert len([n for n in counts if n]) > 2, "a run in which things happened"


class _Live:
    """The featurizer's pure part, fed with the samples and outcomes of the same fleet."""

    def __init__(self, fleet: Fleet, tables: list[RequestTable]) -> None:
        self.tracker = Tracker(SHORT.tracker, SHORT.rewards)
        self.pairs = Transitions(self.tracker)
        self._cards, self._classes = fleet.card_of, np.array([class_of(table) for table in tables], np.uint8)

    def step(self, seen: Seen, metrics: np.ndarray, executed: np.ndarray) -> list[TransitionBatch]:
        states = self.tracker.observe(_sample(seen.step, metrics, self._cards, self._classes))
        assert states is not None
        batches = self.pairs.sampled(states)
        rows = [
            WorkerOutcome(
                worker=worker, action_id=f"{worker}@1:{seen.step}", kind=0, status=0, refusal=0,
                requested_action=int(executed[k]), executed_action=int(executed[k]), requested_rho=1.0,
                effective_rho=1.0, effective_generation=1, effective_max_running=256, policy="any",
                probability=1.0, mask=int(seen.mask[k]),
            )
            for k, worker in enumerate(LISTED)
        ]  # fmt: skip
        return batches + self.pairs.executed([outcome_batch(NODE, 1, seen.step, seen.step * STEP_NS, rows)])


@pytest.mark.parametrize("guard", [True, False])
def test_transitions_are_those_that_the_featurizer_publishes(guard: bool) -> None:
    config = msgspec.structs.replace(CONFIG, guard=guard)
    workload = builtin("long", duration_s=200.0, seed=2, rate_scale=6.0)
    tables = workload.within_context(131_072).assign(WORKERS, 2)
    fleet = Fleet(config, tables)
    control, live = Control(fleet, config, tables, SHORT), _Live(fleet, tables)
    rng = np.random.default_rng(0)
    compared = crashed = 0
    for step in range(100):
        metrics = fleet.metrics()
        seen = control.observe(step)
        allowed = np.where(ALLOWED[seen.mask], rng.random((WORKERS, 5)) + 2.0 * (np.arange(5) == Action.WIDEN), -1)
        executed = control.act(allowed.argmax(1))
        published = live.step(seen, metrics, executed)
        own = control.transitions()
        rows = np.flatnonzero(own.whole) if own is not None else np.empty(0, np.int64)
        assert [worker for batch in published for worker in batch.workers] == [LISTED[k] for k in rows]
        for batch in published:
            assert own is not None
            assert batch.step == step - 1
            columns = columns_of(batch)
            for name in ("states", "next_states", "actions", "masks", "next_masks", "rewards", "discounts"):
                np.testing.assert_array_equal(getattr(columns, name), getattr(own, name)[rows], err_msg=name)
            assert not own.held[rows].any()
            compared += len(rows)
            crashed += int((columns.discounts == 0).sum())
        fleet.advance(STEP_S)
    assert compared > 150
    assert (crashed > 0) == (not guard), "without the guard the card runs out of memory, and trajectories end"


def test_rewards_are_the_featurizers_of_the_step_just_passed(tables: list[RequestTable]) -> None:
    fleet = Fleet(CONFIG, tables)
    control = Control(fleet, CONFIG, tables, SHORT)
    with pytest.raises(RuntimeError, match="nothing was observed"):
        control.rewards("goodput")
    control.observe(0)
    assert np.isnan(control.rewards("goodput")).all(), "no step has passed"
    assert control.transitions() is None
    control.act(np.zeros(WORKERS, np.int64))
    fleet.advance(STEP_S)
    seen = control.observe(1)
    for objective in ("goodput", "article"):
        assert (control.rewards(objective) == seen.parts[:, REWARD_PARTS.index(objective)]).all()
        assert np.isfinite(control.rewards(objective)).all()


def test_held_workers_and_forbidden_actions_become_hold(tables: list[RequestTable]) -> None:
    fleet = Fleet(CONFIG, tables)
    control = Control(fleet, CONFIG, tables, SHORT)
    for step in range(6):
        seen = control.observe(step)
        executed = control.act(np.full(WORKERS, Action.WIDEN))
        assert executed.tolist() == [0 if hold else 1 for hold in seen.holds], "the windows are full at step 5"
        assert (seen.holds == (Hold.WINDOW_FILLING if step < 5 else 0)).all()
        fleet.advance(STEP_S)
    assert control.counts.tolist() == [0, WORKERS, 0, 0, 0], "what was held is no decision"
    seen = control.observe(6)
    forbidden = np.array([int(np.flatnonzero(~ALLOWED[mask])[0]) for mask in seen.mask])
    assert control.act(forbidden).tolist() == [0] * WORKERS
    assert [int(seen.reasons[k, action]) > 0 for k, action in enumerate(forbidden)] == [True] * WORKERS


def test_a_step_nobody_acted_in_and_a_left_out_step_give_no_transition(tables: list[RequestTable]) -> None:
    fleet = Fleet(CONFIG, tables)
    control = Control(fleet, CONFIG, tables, SHORT)
    with pytest.raises(RuntimeError, match="observe before act"):
        control.act(np.zeros(WORKERS, np.int64))
    control.observe(0)
    control.observe(1)
    assert control.transitions() is None
    control.act(np.zeros(WORKERS, np.int64))
    control.observe(3)
    assert control.transitions() is None
    with pytest.raises(ValueError, match="step 3"):
        control.observe(3)
    with pytest.raises(ValueError, match="4 numbers from 0 to 4"):
        control.act(np.array([0, 1, 2, 9]))


def test_a_worker_is_of_the_class_of_most_of_its_requests() -> None:
    code = builtin("code", duration_s=60.0, seed=1).assign(1, 0)[0]
    assert class_of(code) == ServiceClass.COPILOT
