"""Unlike fleets under one control run as each would alone."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from loadgen.control import Control, Controls
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.engine.specs import FleetConfig
from loadgen.joint import JointFleet
from loadgen.policies import TIDEGATE, policy_named
from loadgen.replay import replay
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.identity import STEP_S
from services.decision import heuristic
from services.featurizer.tracker import TrackerSettings

DURATION_S = 60.0
SHORT = Controls(tracker=TrackerSettings(window_steps=5))
CONFIGS = (
    FleetConfig(cards=2, mode=TIDEGATE),
    FleetConfig(card="H200-141G", workers_per_card=3, host_bytes_per_card=20e9, mode=TIDEGATE),
    FleetConfig(card="A100-80G", model="Llama-3.1-70B-4bit", workers_per_card=1, mode=TIDEGATE),
)


def _tables(config: FleetConfig, seed: int) -> list[RequestTable]:
    workload = builtin("mixed", duration_s=DURATION_S, seed=seed, rate_scale=1.0).within_context(131_072)
    return workload.assign(config.cards * config.workers_per_card, seed)


def test_each_fleet_runs_as_it_would_alone() -> None:
    tables = [_tables(config, seed) for seed, config in enumerate(CONFIGS)]
    joint = JointFleet([Fleet(config, own) for config, own in zip(CONFIGS, tables, strict=True)])
    assert joint.card_of.tolist() == [0, 0, 1, 1, 2, 2, 2, 3]
    control = Control(joint, joint.config, [table for own in tables for table in own], SHORT)
    for step in range(round(DURATION_S / STEP_S)):
        seen = control.observe(step)
        control.act(heuristic.choose(seen.features, seen.mask, control.controls.heuristic))
        joint.advance()
    alone = [
        replay(config, own, policy_named("heuristic"), DURATION_S, controls=SHORT)
        for config, own in zip(CONFIGS, tables, strict=True)
    ]
    for fleet, run in zip(joint.fleets, alone, strict=True):
        assert summary(fleet.results()) == run.summary, "bit for bit"
    assert (control.counts == np.sum([run.actions for run in alone], axis=0)).all()
    assert len([n for n in control.counts if n]) > 2, "a run in which things happened"


def test_fleets_that_promise_different_things_are_refused() -> None:
    strict = {**DEFAULT_LIMITS, ServiceClass.CHAT: ClassLimits(ttft_base_s=1.0, ttft_per_token_s=0.0, tpot_s=0.01)}
    other = msgspec.structs.replace(CONFIGS[0], limits=strict)
    with pytest.raises(ValueError, match="unlike class limits"):
        JointFleet([Fleet(config, _tables(config, 0)) for config in (CONFIGS[0], other)])
    with pytest.raises(ValueError, match="at least one"):
        JointFleet([])
