"""Fixed validation traces, and what a policy brings on them: the offline half of the examination."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.engine.specs import FleetConfig
from loadgen.evaluate.rows import HELD_S
from loadgen.examiner.settings import Settings
from loadgen.fleets import tables_for, training_configurations, unit_factor
from loadgen.load import find_unit_load, tables_at
from loadgen.policies import ADMISSIONS, tidegate_mode
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.identity import STEP_S
from services.decision.policy import Policy
from services.errors import TidegateError, UserError

_FURTHER: Final = 3
"""Times as many fleets are drawn at most: some cannot be pressed to load 1.0."""


class Trial(NamedTuple):
    """A fleet and its requests; trials of one ``group`` (a configuration) are told together."""

    group: str
    config: FleetConfig
    tables: list[RequestTable]
    duration_s: float


class Result(msgspec.Struct, frozen=True):
    """What a policy brought on a trial."""

    goodput: float
    """Tokens per second within the SLO, once the featurizer's windows were full."""
    oom: int


class Stopped(TidegateError):
    """Nobody wants the result any more."""


class Trials:
    """The traces, made once, and the results of policies that come again (champions). One thread at a time."""

    def __init__(self, make: Callable[[], Sequence[Trial]]) -> None:
        self._make = make
        self._trials: Sequence[Trial] | None = None
        self._kept: dict[str, list[Result]] = {}
        self.stopping = threading.Event()

    @property
    def trials(self) -> Sequence[Trial]:
        if self._trials is None:
            self._trials = self._make()
        return self._trials

    @property
    def groups(self) -> list[str]:
        return [trial.group for trial in self.trials]

    def results(self, policy: Policy, keep: str = "") -> list[Result]:
        """Every trial under ``policy``; kept under the name ``keep`` (one at a time besides the heuristic). Stopped
        once ``stopping`` is set."""
        if keep and keep in self._kept:
            return self._kept[keep]
        found = []
        for trial in self.trials:
            if self.stopping.is_set():
                raise Stopped("the examination was given up")
            found.append(run(trial, policy))
        if keep:
            self._kept = {name: kept for name, kept in self._kept.items() if name == "heuristic"} | {keep: found}
        return found


def run(trial: Trial, policy: Policy) -> Result:
    """One trial; ``policy`` decides as it would live."""
    fleet = Fleet(trial.config, trial.tables)
    control = Control(fleet, trial.config, trial.tables)
    for step in range(round(trial.duration_s / STEP_S)):
        seen = control.observe(step)
        choice = policy.choose(seen.features, seen.mask)
        control.act(choice.actions, choice.goal_rho)
        fleet.advance(STEP_S)
    told = summary(fleet.results(), HELD_S)
    return Result(told.goodput_tokens_per_s, int(told.oom))


def fleet_trials(settings: Settings) -> list[Trial]:
    """Traces of drawn fleets at their own loads, admissions in turn. UserError when none can be pressed to load 1.0."""
    out: list[Trial] = []
    made = 0
    for configuration in training_configurations(settings.seed, _FURTHER * settings.configurations):
        try:
            factor = unit_factor(configuration)
        except UserError:
            continue
        mode = tidegate_mode(ADMISSIONS[made % len(ADMISSIONS)])
        fleet = msgspec.structs.replace(configuration.fleet, mode=mode)
        configuration = msgspec.structs.replace(configuration, fleet=fleet)
        for trace in range(settings.traces):
            tables = tables_for(configuration, settings.seed + trace, HELD_S + settings.trace_s, factor)
            out.append(Trial(configuration.name, fleet, tables, HELD_S + settings.trace_s))
        made += 1
        if made == settings.configurations:
            break
    if not out:
        raise UserError(f"examiner: none of the fleets of seed {settings.seed} can be pressed to load 1.0")
    return out


def workload_trials(
    config: FleetConfig, kinds: Sequence[str], load: float, duration_s: float, seeds: Sequence[int]
) -> list[Trial]:
    """Built-in workloads on one fleet at ``load`` times load 1.0, one trial a kind and seed."""
    out: list[Trial] = []
    context = min(model.context_tokens for model in config.model_specs())
    workers = config.cards * config.workers_per_card
    for kind in kinds:
        factor = None
        for seed in seeds:
            workload = builtin(kind, duration_s=duration_s, seed=seed).within_context(context)
            if factor is None:
                factor = find_unit_load(config, workload, duration_s, seed).factor
            tables = tables_at(workload, factor * load, workers, duration_s, seed)
            out.append(Trial(kind, config, tables, duration_s))
    return out


def goodputs(results: Sequence[Result]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([result.goodput for result in results], np.float64)
