"""A policy on an emulated fleet without processes, compared offline as it would act live (``loadgen.control``).

Given tables and a seed the answer is one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Control, Controls
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import Summary, summary
from loadgen.engine.specs import FleetConfig
from loadgen.policies import PolicySpec
from loadgen.requests import RequestTable
from schemas.actions import ACTION_COUNT
from schemas.identity import STEP_S
from services import qweights
from services.decision import heuristic
from services.decision.shield import ALLOWED

__all__ = ["Choose", "Controls", "Run", "chooser", "replay"]

Choose = Callable[[NDArray[np.float32], NDArray[np.uint8]], NDArray[np.integer]]
"""(states float32 [n, F], masks uint8 [n]) -> actions int [n], each of them allowed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Run:
    """What a policy brought on one workload."""

    spec: PolicySpec
    summary: Summary
    actions: NDArray[np.int64]
    """int64 [5]: executed actions, held workers left out."""
    steps: int


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
    veto = qweights.veto_of(weights)
    return lambda features, mask: qweights.best(qweights.values(weights, features), ALLOWED[mask], veto)


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
    control = None if choose is None else Control(fleet, config, tables, controls)
    goal_rho = spec.rho if spec.control == "fixed" else None
    steps = round(duration_s / STEP_S)
    for step in range(steps):
        if control is not None and choose is not None:
            seen = control.observe(step)
            control.act(choose(seen.features, seen.mask), goal_rho)
        fleet.advance(STEP_S)
    counts = np.zeros(ACTION_COUNT, np.int64) if control is None else control.counts
    return Run(spec, summary(fleet.results()), counts, steps)
