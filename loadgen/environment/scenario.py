"""What an episode runs on: a fleet and its requests, drawn anew at every reset. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from loadgen.engine.specs import FleetConfig
from loadgen.requests import RequestTable
from loadgen.workload import builtin

DEFAULT_WORKLOAD: Final = "mixed"
DEFAULT_RATE: Final = 0.25
"""Of the published rates, per card: near load 1.0 of ``loadgen.load`` for two 8B models on an A100 (0.18 to 0.30 over
two seeds of 660 s)."""

_SEEDS: Final = 2**31


class Episode(NamedTuple):
    """One card or more and what their workers are asked, a table a worker, card by card."""

    fleet: FleetConfig
    tables: Sequence[RequestTable]


Scenario = Callable[[np.random.Generator, float], Episode]
"""(rng, duration_s) -> the next episode. All randomness comes from ``rng``: the same state, the same episode."""

Tables = Callable[[int, float], Sequence[RequestTable]]
"""(seed, duration_s) -> one table a worker."""


class HasFleet(Protocol):
    """Anything that names a fleet, such as ``loadgen.fleets.Configuration``."""

    @property
    def fleet(self) -> FleetConfig: ...


def generated(
    fleet: FleetConfig | None = None, workload: str = DEFAULT_WORKLOAD, rate: float = DEFAULT_RATE
) -> Scenario:
    """Episodes of a built-in workload (``loadgen.workload.KINDS``) at ``rate`` times its published rate per card."""
    config = fleet or FleetConfig()
    context = min(model.context_tokens for model in config.model_specs())
    workers = config.cards * config.workers_per_card

    def draw(rng: np.random.Generator, duration_s: float) -> Episode:
        seed = int(rng.integers(_SEEDS))
        whole = builtin(workload, duration_s=duration_s, rate_scale=rate * config.cards, seed=seed)
        return Episode(config, whole.within_context(context).excerpt(duration_s).assign(workers, seed))

    return draw


def configured(configuration: HasFleet, tables: Tables) -> Scenario:
    """Episodes of one configuration, with the requests that ``tables`` makes from a seed."""

    def draw(rng: np.random.Generator, duration_s: float) -> Episode:
        return Episode(configuration.fleet, tables(int(rng.integers(_SEEDS)), duration_s))

    return draw
