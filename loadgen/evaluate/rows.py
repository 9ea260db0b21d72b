"""What one run brought, small enough to keep: sums, and waits as counts in bins so that tails pool over runs.

Requests count from the end of the minute in which the featurizer's windows fill and nobody decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.engine.records import Phase, Reason
from loadgen.engine.report import Results, summary
from schemas.identity import STEP_S

HELD_S: Final = 60.0
"""Until the windows are full: the same for all policies, those that never act among them."""
BINS_PER_DECADE: Final = 90
"""A bin is 2.6 % wide: percentiles are true to 1.3 %."""
LEAST: Final = 1e-4
"""Seconds; what is shorter counts as this."""
_REFUSED: Final = (int(Reason.NEVER_FITS), int(Reason.TOO_LONG))

Counts = dict[int, int]
"""Bin to how many; bin 0 is LEAST or less."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A policy under an admission on one trace of a configuration."""

    policy: str
    admission: str
    timeouts: bool
    configuration: str
    block: int = 0
    card: int = 0
    """Of the block: the two together are the trace."""
    seconds: float
    """Simulated, in which requests were counted."""
    workers: int
    worker_steps: int
    """All that were simulated."""
    goodput_tokens_per_s: float
    tokens_per_s: float
    offered_tokens_per_s: float
    """Of all that arrived, whether served or not."""
    hbm_utilisation: float
    preemptions: int
    oom: int
    arrived: int
    shed: int
    actions: list[int]
    """Executed, five numbers; held workers left out."""
    waits: Counts
    """Seconds from arrival to admission; who never got in counts with the wait until it was refused or the end."""
    tpots: Counts
    """Seconds per token of finished requests."""
    key: str = ""
    """What the run depends on, as the cache knows it."""


def binned(values_s: NDArray[np.float64]) -> Counts:
    """Finite values by bin."""
    kept = values_s[np.isfinite(values_s)]
    places = np.rint(BINS_PER_DECADE * np.log10(np.maximum(kept, LEAST) / LEAST)).astype(np.int64)
    bins, counts = np.unique(places, return_counts=True)
    return dict(zip(bins.tolist(), counts.tolist(), strict=True))


def pooled_percentile(parts: Iterable[Counts], percent: float) -> float:
    """The percentile in seconds over all parts together; NaN when they are empty."""
    whole: Counts = {}
    for part in parts:
        for place, count in part.items():
            whole[place] = whole.get(place, 0) + count
    wanted = percent / 100.0 * sum(whole.values())
    seen = 0
    for place in sorted(whole):
        seen += whole[place]
        if seen >= wanted:
            return float(LEAST * 10.0 ** (place / BINS_PER_DECADE)) if place else 0.0
    return float("nan")


def row_of(
    results: Results, names: tuple[str, str, bool, str], actions: NDArray[np.int64], from_s: float = HELD_S
) -> Row:
    """The row of (policy, admission, timeouts, configuration); executed ``actions`` int64 [5]."""
    told = summary(results, from_s)
    counted = (results.phase != int(Phase.FUTURE)) & (results.arrival_s >= from_s)
    policy, admission, timeouts, configuration = names
    seconds = results.duration_s - from_s
    steps = round(results.duration_s / STEP_S)
    return Row(
        policy=policy,
        admission=admission,
        timeouts=timeouts,
        configuration=configuration,
        seconds=seconds,
        workers=len(results.oom),
        worker_steps=steps * len(results.oom),
        goodput_tokens_per_s=told.goodput_tokens_per_s,
        tokens_per_s=told.tokens_per_s,
        offered_tokens_per_s=float(results.output_tokens[counted].sum()) / seconds,
        hbm_utilisation=told.hbm_utilisation,
        preemptions=told.preemptions,
        oom=told.oom,
        arrived=told.arrived,
        shed=told.rejected.get("shed", 0),
        actions=actions.tolist(),
        waits=binned(results.wait_s[counted & ~np.isin(results.reason, _REFUSED)]),
        tpots=binned(results.tpot_s[counted & (results.phase == int(Phase.FINISHED))]),
    )
