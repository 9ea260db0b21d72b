"""The heuristic improved by foresight: trials leave the real run alone, and are worth what then happens."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.bench import headroom
from loadgen.bench.headroom import Task
from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from loadgen.fleets import held_out_configurations
from loadgen.policies import TIDEGATE
from loadgen.train.validation import by_rules
from schemas.identity import STEP_S
from services.errors import UserError
from tests.loadgen.engine.tables import random_table

SMALL = next(one for one in held_out_configurations() if one.name == "h100-2x14b-small-slow")


def _fleet() -> tuple[Fleet, Control]:
    tables = [random_table(np.random.default_rng(seed), 2.0, 120.0, 2.0) for seed in (1, 2)]
    config = FleetConfig(mode=TIDEGATE)
    fleet = Fleet(config, tables)
    return fleet, Control(fleet, config, tables)


def test_what_a_trial_foretells_is_what_happens_and_the_trial_leaves_no_trace() -> None:
    fleet, control = _fleet()
    for step in range(35):
        seen = control.observe(step)
        control.act(by_rules(seen))
        fleet.advance(STEP_S)
    seen = control.observe(35)
    actions = by_rules(seen).astype(np.int64)
    before, begun = fleet.state.request.tobytes(), fleet.state.worker["good_tokens"].sum()
    told = headroom._worth(fleet, control, actions, 35, 10)
    assert fleet.state.request.tobytes() == before
    for step in range(35, 45):
        if step > 35:
            actions = by_rules(control.observe(step)).astype(np.int64)
        control.act(actions)
        fleet.advance(STEP_S)
    assert told == fleet.state.worker["good_tokens"].sum() - begun > 0


def test_the_three_are_compared_on_the_same_requests() -> None:
    found = headroom.measure(
        Task(configuration=SMALL, admission="deadline_cap_shed", seconds=20.0, horizon_steps=6, every_steps=5)
    )
    assert found.configuration == SMALL.name
    assert found.decisions == 4, "two looks at two workers"
    assert 0 <= found.deviations <= found.decisions
    for goodput in (found.heuristic, found.holding, found.clairvoyant):
        assert 0.5 < goodput / found.heuristic < 2.0


def test_a_run_too_short_to_serve_anything_is_refused() -> None:
    with pytest.raises(UserError, match=r"h100-2x14b-small-slow: nothing met its limits in 0\.5 s"):
        headroom.bench_headroom(names=(SMALL.name,), seconds=0.5, jobs=1)


def test_an_unknown_fleet_is_named() -> None:
    with pytest.raises(UserError, match="h100-9x: expected some of a100-2x8b-chat-agent"):
        headroom.bench_headroom(names=("h100-9x",))
