"""How much better the slow control could be at all: the heuristic improved by looking into the future.

Every few steps each worker's allowed actions are tried out on copies of the whole emulated card, requests to come
included: the action now, the heuristic from then on, and what it brought ``horizon_steps`` later. The best is taken
where it brings more than the heuristic's own choice. No policy can know what this one knows. It is no upper bound: it
deviates one action at a time, looks no further than the horizon, and on some fleets holding beats it, which is why
holding stands beside it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Control, Seen
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.evaluate.entrants import Choose
from loadgen.evaluate.pool import results
from loadgen.evaluate.rows import HELD_S
from loadgen.fleets import Configuration, held_out_configurations, tables_for, unit_factor
from loadgen.policies import tidegate_mode
from loadgen.train.validation import by_rules
from schemas.actions import ACTION_COUNT
from schemas.identity import STEP_S
from services.decision import heuristic
from services.decision.shield import ALLOWED
from services.errors import UserError

SEED: Final = 4_000_001
"""Of no training, search or examination."""
TIE: Final = 0.002
"""Share of what the heuristic's choice brings within the horizon by which another must be better."""


class Headroom(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration on one draw of requests; goodput in tokens per second of its card."""

    configuration: str
    heuristic: float
    holding: float
    clairvoyant: float
    deviations: int
    """Steps of a worker at which another action than the heuristic's was taken."""
    decisions: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Geometric means over configurations, relative to the heuristic."""

    admission: str
    horizon_s: float
    holding: float
    clairvoyant: float
    runs: list[Headroom]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What one process is asked for."""

    configuration: Configuration
    admission: str
    seconds: float
    horizon_steps: int
    every_steps: int


def bench_headroom(
    *, admission: str = "deadline_cap_shed", seconds: float = 240.0, horizon_steps: int = 45, every_steps: int = 4,
    names: Sequence[str] = (), jobs: int = 2, tell: Callable[[str], None] = lambda line: None,
) -> Report:  # fmt: skip
    """Measure it on the held-out configurations (``names``: only those), a minute or so of CPU each; UserError for an
    unknown one."""
    known = [one.name for one in held_out_configurations()]
    if unknown := sorted(set(names) - set(known)):
        raise UserError(f"fleets {', '.join(unknown)}: expected some of {', '.join(known)}")
    tasks = [
        Task(configuration=one, admission=admission, seconds=seconds, horizon_steps=horizon_steps,
             every_steps=every_steps)
        for one in held_out_configurations() if not names or one.name in names
    ]  # fmt: skip
    runs = []
    for _, found in results(measure, tasks, jobs):
        if min(found.heuristic, found.holding, found.clairvoyant) <= 0:
            raise UserError(f"{found.configuration}: nothing met its limits in {seconds:g} s, expected more --seconds")
        runs.append(found)
        tell(
            f"{found.configuration}: holding {found.holding / found.heuristic:.3f}, "
            f"clairvoyant {found.clairvoyant / found.heuristic:.3f} of the heuristic"
        )
    return Report(
        admission=admission,
        horizon_s=horizon_steps * STEP_S,
        holding=_geometric([one.holding / one.heuristic for one in runs]),
        clairvoyant=_geometric([one.clairvoyant / one.heuristic for one in runs]),
        runs=sorted(runs, key=lambda one: one.configuration),
    )


def measure(task: Task) -> Headroom:
    """One configuration: the heuristic, holding, and the heuristic improved by foresight."""
    hold, rule, seer = (_run(task, chooses) for chooses in (_holding, by_rules, None))
    return Headroom(
        configuration=task.configuration.name,
        heuristic=rule[0],
        holding=hold[0],
        clairvoyant=seer[0],
        deviations=seer[1],
        decisions=seer[2],
    )


def _holding(seen: Seen) -> NDArray[np.integer]:
    return heuristic.static(seen.features, seen.mask)


def _run(task: Task, chooses: Choose | None) -> tuple[float, int, int]:
    """(goodput, deviations, decisions) under a rule; None: foresight."""
    configuration = task.configuration
    duration_s = task.seconds + HELD_S
    config = msgspec.structs.replace(configuration.fleet, cards=1, mode=tidegate_mode(task.admission))
    tables = tables_for(configuration, SEED, duration_s, unit_factor(configuration))
    fleet = Fleet(config, tables)
    control = Control(fleet, config, tables)
    deviations = decisions = 0
    for step in range(round(duration_s / STEP_S)):
        seen = control.observe(step)
        actions = (chooses or by_rules)(seen).astype(np.int64)
        if chooses is None and step * STEP_S >= HELD_S and step % task.every_steps == 0:
            better = _improved(fleet, control, seen, actions, step, task.horizon_steps)
            deviations += int((better != actions).sum())
            decisions += len(actions)
            actions = better
        control.act(actions)
        fleet.advance(STEP_S)
    return summary(fleet.results(), HELD_S).goodput_tokens_per_s, deviations, decisions


def _improved(
    fleet: Fleet, control: Control, seen: Seen, actions: NDArray[np.int64], step: int, horizon: int
) -> NDArray[np.int64]:
    """The actions with each worker's best one in turn, given the others'."""
    best = actions.copy()
    worth = _worth(fleet, control, best, step, horizon)
    for worker in range(len(actions)):
        for action in range(ACTION_COUNT):
            if action == best[worker] or not ALLOWED[seen.mask[worker], action] or seen.holds[worker]:
                continue
            tried = best.copy()
            tried[worker] = action
            found = _worth(fleet, control, tried, step, horizon)
            if found > worth + TIE * abs(worth):
                best, worth = tried, found
    return best


def _worth(fleet: Fleet, control: Control, actions: NDArray[np.int64], step: int, horizon: int) -> float:
    """Tokens of requests that meet their limits, from now to the horizon, on a copy of everything."""
    fleet, control = copy.deepcopy((fleet, control))
    before = fleet.state.worker["good_tokens"].sum()
    control.act(actions)
    fleet.advance(STEP_S)
    for later in range(step + 1, step + horizon):
        control.act(by_rules(control.observe(later)))
        fleet.advance(STEP_S)
    return float(fleet.state.worker["good_tokens"].sum() - before)


def _geometric(ratios: Sequence[float]) -> float:
    return math.exp(float(np.mean(np.log(ratios))))
