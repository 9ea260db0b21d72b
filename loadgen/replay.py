"""A policy on an emulated fleet without processes: the same pure parts as the live loop, called in a row.

    Fleet.metrics -> Tracker -> shield -> policy -> targets -> effects -> Fleet.command -> Fleet.advance

so that a policy compared offline acts as it would live. Given tables and a seed the answer is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.engine.fleet import Fleet
from loadgen.engine.report import Summary, summary
from loadgen.engine.specs import FleetConfig
from loadgen.policies import PolicySpec
from loadgen.requests import RequestTable
from schemas.actions import ACTION_COUNT, Action, MaskReason
from schemas.classes import ServiceClass
from schemas.identity import SCHEMA_VERSION, STEP_NS, STEP_S, worker_id
from schemas.telemetry import NodeSample
from services import qweights
from services.actuator import budget, effects
from services.decision import heuristic
from services.decision.shield import ALLOWED, ShieldSettings, masks
from services.decision.targets import targets
from services.featurizer.tracker import States, Tracker

Choose = Callable[[NDArray[np.float32], NDArray[np.uint8]], NDArray[np.integer]]
"""(states float32 [n, F], masks uint8 [n]) -> actions int [n], each of them allowed."""

_NODE: Final = "replay"
LATE: Final = int(MaskReason.LATENCY_AT_LIMIT)


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a policy brought on one workload."""

    spec: PolicySpec
    summary: Summary
    actions: NDArray[np.int64]
    """int64 [5]: executed actions, held workers left out."""
    steps: int


class Controls(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the pure parts; the defaults are those of the services."""

    shield: ShieldSettings = msgspec.field(default_factory=ShieldSettings)
    heuristic: heuristic.HeuristicSettings = msgspec.field(default_factory=heuristic.HeuristicSettings)
    effects: effects.EffectSettings = msgspec.field(default_factory=effects.EffectSettings)


def chooser(spec: PolicySpec, controls: Controls, weights: qweights.Weights | None = None) -> Choose | None:
    """The policy's rule; None for one that never acts. ValueError when a dqn comes without weights."""
    if spec.control == "hold":
        return None
    if spec.control == "fixed":
        return lambda features, mask: heuristic.fixed(features, mask, spec.rho)
    if spec.control == "heuristic":
        return lambda features, mask: heuristic.choose(features, mask, controls.heuristic)
    if weights is None:
        raise ValueError(f"policy {spec.name!r} needs weights")
    return lambda features, mask: np.where(ALLOWED[mask], qweights.q_values(weights, features), -np.inf).argmax(1)


def replay(
    config: FleetConfig,
    tables: Sequence[RequestTable],
    spec: PolicySpec,
    duration_s: float,
    *,
    controls: Controls | None = None,
    weights: qweights.Weights | None = None,
) -> Run:
    """Run ``spec`` over the request tables (one per worker, cards x workers_per_card of them)."""
    controls = controls or Controls()
    fleet = Fleet(msgspec.structs.replace(config, mode=spec.mode), tables)
    choose = chooser(spec, controls, weights)
    loop = None if choose is None else _Loop(fleet, config, tables, spec, choose, controls)
    steps = round(duration_s / STEP_S)
    for step in range(steps):
        if loop is not None:
            loop.act(step)
        fleet.advance(STEP_S)
    counts = np.zeros(ACTION_COUNT, np.int64) if loop is None else loop.counts
    return Run(spec, summary(fleet.results()), counts, steps)


class _Loop:
    """The control loop of one fleet: sees it as one node with all its cards."""

    def __init__(
        self,
        fleet: Fleet,
        config: FleetConfig,
        tables: Sequence[RequestTable],
        spec: PolicySpec,
        choose: Choose,
        controls: Controls,
    ) -> None:
        self._fleet = fleet
        self._limits = config.limits
        self._choose = choose
        self._controls = controls
        self._goal = spec.rho if spec.control == "fixed" else None
        self._tracker = Tracker()
        self._cards = np.asarray(fleet.card_of, np.int64)
        self._classes = np.array([_class_of(table) for table in tables], np.uint8)
        self._scales = np.ones(config.cards)
        self._workers = tuple(worker_id(_NODE, int(card), f"w{i}") for i, card in enumerate(self._cards))
        self.counts = np.zeros(ACTION_COUNT, np.int64)

    def act(self, step: int) -> None:
        metrics = self._fleet.metrics()
        states = self._observe(metrics, step)
        mask, reasons = masks(states.features, states.classes, states.holds, self._controls.shield)
        actions = np.asarray(self._choose(states.features, mask), np.int64)
        actions[states.holds != 0] = Action.HOLD
        rho, ceiling = targets(actions, states.features, states.classes, self._controls.shield, self._goal)
        views = effects.views_of(metrics, self._cards, self._classes, self._limits)
        self._scales = budget.next_scales(self._scales, self._late_cards(reasons))
        commands = effects.plan(actions, rho, ceiling, views, self._scales, self._controls.effects)
        self._fleet.command(
            rho=commands.rho,
            max_running=commands.max_running,
            evict_bytes=commands.evict_bytes,
            compact_bytes=commands.compact_bytes,
        )
        self._tracker.executed(_NODE, actions, step)
        self.counts += np.bincount(actions[states.holds == 0], minlength=ACTION_COUNT)

    def _observe(self, metrics: NDArray[np.float64], step: int) -> States:
        sample = NodeSample(
            _NODE, 1, step, SCHEMA_VERSION, step * STEP_NS, self._workers,
            tuple(self._cards.tolist()), tuple(self._classes.tolist()), b"", "replay",
        )  # fmt: skip
        states = self._tracker.observe(sample, metrics)
        if states is None:
            raise RuntimeError(f"step {step}: the emulated fleet's own sample was refused: {self._tracker.counts}")
        return states

    def _late_cards(self, reasons: NDArray[np.uint8]) -> NDArray[np.bool_]:
        late = np.zeros(len(self._scales), np.bool_)
        late[self._cards[(reasons == LATE).any(axis=1)]] = True
        return late


def _class_of(table: RequestTable) -> int:
    """A worker's class is that of most of its requests, as the live node says it."""
    return int(np.bincount(table.service_class).argmax()) if len(table) else int(ServiceClass.CHAT)
