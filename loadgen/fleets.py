"""Randomised fleets: configurations to train on and to be examined on, their requests, and where load 1.0 lies.

Load 1.0 is where vLLM-like with offload, first-come, meets the SLO for 85 % of offered tokens. For the held-out
configurations it was searched on whole replays over several seeds and stands in ``fleets_unit_load.json``; for drawn
ones :func:`unit_factor` does a short search: two seeds, 200 s, to a twelfth, in a second or so of one core.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadgen.configurations import Configuration, held_out_configurations, training_configurations
from loadgen.fleet_tables import tables_at, tables_for
from loadgen.load import REFERENCE_POLICY, crossing
from loadgen.policies import policy_named
from loadgen.replay import replay

__all__ = [
    "Configuration",
    "held_out_configurations",
    "search_unit_factor",
    "tables_at",
    "tables_for",
    "training_configurations",
    "unit_factor",
]

UNIT_LOADS: Final = Path(__file__).with_name("fleets_unit_load.json")
QUICK_SEEDS: Final = (1_000_001, 1_000_002)
"""Of no examination."""
QUICK_S: Final = 200.0
QUICK_PRECISION: Final = 0.08


def unit_factor(configuration: Configuration) -> float:
    """What the nominal rates are multiplied by at load 1.0: searched long before for the held-out, a quick search
    for others. UserError when the fleet cannot be pressed or relieved to the target."""
    kept = _kept().get(configuration.name)
    return kept if kept is not None else _quick(msgspec.json.encode(configuration), configuration)


def search_unit_factor(
    configuration: Configuration, seeds: Sequence[int], duration_s: float, precision: float = 0.01
) -> float:
    """The factor at which the reference meets the SLO for the target share of tokens, over all seeds together."""
    reference = policy_named(REFERENCE_POLICY)

    def share(factor: float) -> float:
        good = offered = 0.0
        for seed in seeds:
            tables = tables_at(configuration, seed, duration_s, factor)
            told = replay(configuration.fleet, tables, reference, duration_s).summary
            met = told.goodput_tokens_per_s * duration_s
            good += met
            offered += met / told.slo_token_share if told.slo_token_share > 0 else float(told.arrived > 0)
        return good / offered if offered else 1.0

    low, high = crossing(share, configuration.name, stride=1.5, highest=16.0, precision=precision)
    return float((low * high) ** 0.5)


@functools.cache
def _kept() -> dict[str, float]:
    return msgspec.json.decode(UNIT_LOADS.read_bytes(), type=dict[str, float]) if UNIT_LOADS.exists() else {}


_quick_found: Final[dict[bytes, float]] = {}


def _quick(key: bytes, configuration: Configuration) -> float:
    if key not in _quick_found:
        _quick_found[key] = search_unit_factor(configuration, QUICK_SEEDS, QUICK_S, QUICK_PRECISION)
    return _quick_found[key]
