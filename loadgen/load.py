"""Finding load 1.0: where vLLM-like with offload, first-come, meets the SLO for 85 % of offered tokens.

A load is only comparable between cards, models and traces when it is measured in what they can serve.
"""

from __future__ import annotations

from typing import Final

import msgspec

from loadgen.engine.specs import FleetConfig
from loadgen.policies import policy_named
from loadgen.replay import replay
from loadgen.requests import RequestTable
from loadgen.workload import Workload
from services.errors import UserError

TARGET_SHARE: Final = 0.85
REFERENCE_POLICY: Final = "vllm_offload"
_LOWEST, _HIGHEST = 1 / 64, 256.0
_RELATIVE_PRECISION: Final = 0.01


class UnitLoad(msgspec.Struct, frozen=True, kw_only=True):
    """``factor`` times the workload's own rate is load 1.0; ``share`` is what the reference met there."""

    factor: float
    share: float
    evaluations: int


def tables_at(workload: Workload, factor: float, workers: int, duration_s: float, seed: int) -> list[RequestTable]:
    """The requests of ``duration_s`` seconds at ``factor`` times the workload's rate, one table a worker."""
    return workload.scaled(factor, seed).excerpt(duration_s).assign(workers, seed)


def find_unit_load(config: FleetConfig, workload: Workload, duration_s: float, seed: int) -> UnitLoad:
    """Bisect the rate factor on the whole replay.

    The share falls with load up to noise, so bisection on a bracket is enough. UserError when even the highest
    factor leaves the cards unpressed or even the lowest overloads them.
    """
    workers = config.cards * config.workers_per_card
    reference = policy_named(REFERENCE_POLICY)
    evaluations = 0

    def share(factor: float) -> float:
        nonlocal evaluations
        evaluations += 1
        run = replay(config, tables_at(workload, factor, workers, duration_s, seed), reference, duration_s)
        return run.summary.slo_token_share

    low = high = 1.0
    at_low = share(low)
    if at_low >= TARGET_SHARE:
        while share(high) >= TARGET_SHARE:
            low, high = high, high * 2
            if high > _HIGHEST:
                raise UserError(f"{workload.name}: {config.cards} cards serve even {_HIGHEST:g} times its rate")
    else:
        while (at_low := share(low)) < TARGET_SHARE:
            low, high = low / 2, low
            if low < _LOWEST:
                raise UserError(
                    f"{workload.name}: at {_LOWEST:g} of its rate the reference still meets the SLO for only "
                    f"{100 * at_low:.0f} % of tokens: its requests are too heavy for {config.cards} x {config.card}"
                )
    while high / low > 1 + _RELATIVE_PRECISION:
        middle = (low * high) ** 0.5
        if share(middle) >= TARGET_SHARE:
            low = middle
        else:
            high = middle
    return UnitLoad(factor=low, share=share(low), evaluations=evaluations)
