"""Finding load 1.0: where vLLM-like with offload, first-come, meets the SLO for 85 % of offered tokens.

A load is only comparable between cards, models and traces when it is measured in what they can serve.
"""

from __future__ import annotations

from collections.abc import Callable
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
_LOWEST: Final = 1 / 64


class UnitLoad(msgspec.Struct, frozen=True, kw_only=True):
    """``factor`` times the workload's own rate is load 1.0; ``share`` is what the reference met there."""

    factor: float
    share: float


def crossing(
    share: Callable[[float], float], name: str, *, stride: float, highest: float, precision: float
) -> tuple[float, float]:
    """(low, high), at most 1 + ``precision`` apart: at ``low`` times the rate the ``share`` of tokens within the SLO
    is the target's or more, at ``high`` times less.

    The share falls with load up to noise, so bisection on a bracket, found from 1 in strides, is enough. UserError
    when even ``highest`` leaves the cards unpressed or even 1/64 overloads them.
    """
    low = high = 1.0
    if share(1.0) >= TARGET_SHARE:
        while True:
            low, high = high, high * stride
            if high > highest:
                raise UserError(f"{name}: serves even {highest:g} times its rate")
            if share(high) < TARGET_SHARE:
                break
    else:
        while True:
            low, high = low / stride, low
            if low < _LOWEST:
                raise UserError(f"{name}: misses the SLO even at {_LOWEST:g} of its rate: its requests are too heavy")
            if share(low) >= TARGET_SHARE:
                break
    while high / low > 1 + precision:
        middle = (low * high) ** 0.5
        if share(middle) >= TARGET_SHARE:
            low = middle
        else:
            high = middle
    return low, high


def tables_at(workload: Workload, factor: float, workers: int, duration_s: float, seed: int) -> list[RequestTable]:
    """The requests of ``duration_s`` seconds at ``factor`` times the workload's rate, one table a worker."""
    return workload.scaled(factor, seed).excerpt(duration_s).assign(workers, seed)


def find_unit_load(config: FleetConfig, workload: Workload, duration_s: float, seed: int) -> UnitLoad:
    """Search the rate factor on whole replays, to 1 %. UserError as of :func:`crossing`."""
    workers = config.cards * config.workers_per_card
    reference = policy_named(REFERENCE_POLICY)

    def share(factor: float) -> float:
        run = replay(config, tables_at(workload, factor, workers, duration_s, seed), reference, duration_s)
        return run.summary.slo_token_share

    name = f"{workload.name} on {config.cards} x {config.card}"
    low, _ = crossing(share, name, stride=2.0, highest=256.0, precision=0.01)
    return UnitLoad(factor=low, share=share(low))
