"""The bins of METRICS' latency histograms."""

from __future__ import annotations

from loadgen.engine.jit import kernel
from loadgen.engine.records import BINS
from schemas.metrics import LATENCY_RATIO_EDGES

EDGES = LATENCY_RATIO_EDGES


@kernel
def latency_bin(ratio: float) -> int:
    """Bin of METRICS' latency histograms for time / limit; a ratio at an edge is within the limit."""
    k = 0
    while k < BINS - 1 and ratio > EDGES[k]:
        k += 1
    return k
