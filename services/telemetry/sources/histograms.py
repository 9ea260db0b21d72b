"""Cumulative histograms of an engine: what a window brought, its quantiles, and the bins of METRICS.

Everything here is arithmetic on bucket differences. Inside a bucket the values are taken as spread evenly, as
Prometheus's own ``histogram_quantile`` does, around the mean that the sum of the values tells (:func:`spans`); of the
open last bucket all that is known is its lower edge, so what lies in it counts as beyond everything.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.metrics import HISTOGRAM_BINS, LATENCY_RATIO_EDGES

OTHERS_DOUBT: Final = 0.25
"""A bucket's mean is known when the other buckets can shift it by no more than this share of its width."""


class Histogram(NamedTuple):
    """``edges``: upper edges, rising, the last inf; ``counts``: events at or below each; ``total``: sum of the
    values, NaN when it was not said."""

    edges: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def events(self) -> float:
        return self.counts[-1] if self.counts else 0.0


def gained(now: Histogram, before: Histogram | None) -> Histogram:
    """What came since ``before``. Counts that went back or other edges are an engine that began anew: everything
    it shows is then new."""
    if before is None or before.edges != now.edges:
        return now
    counts = tuple(later - earlier for later, earlier in zip(now.counts, before.counts, strict=True))
    if counts[-1] < 0 or any(later < earlier for earlier, later in pairwise((0.0, *counts))):
        return now
    return Histogram(now.edges, counts, max(0.0, now.total - before.total) if counts[-1] else 0.0)


def nothing(like: Histogram) -> Histogram:
    """No events, with the edges of ``like``."""
    return Histogram(like.edges, (0.0,) * len(like.counts), 0.0)


def spans(histogram: Histogram) -> list[tuple[float, float, float]]:
    """(low, high, events) of each bucket that has any: where its values lie.

    They are taken as spread evenly over the bucket; where the sum of all values tells the bucket's mean well enough
    (the other buckets' own uncertainty is small beside its width), over what of the bucket lies around that mean. A
    real server's buckets are coarse (vLLM: 1 to 2.5 s for a limit of 2), and often one of them holds all.
    """
    found: list[tuple[float, float, float]] = []
    lower_edge = lower_count = 0.0
    for edge, count in zip(histogram.edges, histogram.counts, strict=True):
        if count > lower_count:
            found.append((lower_edge, edge, count - lower_count))
        lower_edge, lower_count = edge, count
    middles = math.fsum(n * (low + high) / 2 for low, high, n in found)
    doubt = math.fsum(n * (high - low) / 2 for low, high, n in found)
    if not (math.isfinite(middles) and math.isfinite(histogram.total)):
        return found
    out = []
    for low, high, n in found:
        mean = (histogram.total - (middles - n * (low + high) / 2)) / n
        others = doubt - n * (high - low) / 2
        if low <= mean <= high and others <= n * (high - low) * OTHERS_DOUBT:
            half = min(mean - low, high - mean)
            out.append((mean - half, mean + half, n))
        else:
            out.append((low, high, n))
    return out


def below(histogram: Histogram, limit: float) -> float:
    """Events at or below ``limit``; those of the open bucket are below no finite limit."""
    return _below(spans(histogram), limit)


def _below(found: list[tuple[float, float, float]], limit: float) -> float:
    return math.fsum(n * _part(low, high, limit) for low, high, n in found)


def _part(low: float, high: float, limit: float) -> float:
    """Share of even values between ``low`` and ``high`` that are at or below ``limit``."""
    if limit >= high:
        return 1.0
    if limit < low or high == math.inf:
        return 0.0
    return (limit - low) / (high - low)


def share_within(histogram: Histogram, limit: float) -> float:
    """Share of the events at or below ``limit``; NaN without events."""
    return below(histogram, limit) / histogram.events if histogram.events > 0 else math.nan


def quantile(histogram: Histogram, q: float) -> float:
    """The q-quantile, the last finite edge for what lies beyond it; NaN without events."""
    if histogram.events <= 0:
        return math.nan
    left = q * histogram.events
    last = 0.0
    for low, high, n in spans(histogram):
        if high == math.inf:
            return low
        if n >= left:
            return low + (high - low) * left / n
        left -= n
        last = high
    return last


def ratio_bins(histogram: Histogram, limit: float) -> NDArray[np.float64]:
    """float64 [16]: events by value over ``limit`` (same unit, above 0), in the bins of METRICS. With an infinite
    limit all are in the first; what the open bucket holds is in the last."""
    found, edges = spans(histogram), [limit * ratio for ratio in LATENCY_RATIO_EDGES]
    if limit == math.inf:
        return np.array([histogram.events] + [0.0] * (HISTOGRAM_BINS - 1))
    cumulative = np.array([0.0, *(_below(found, edge) for edge in edges), histogram.events])
    return np.diff(cumulative)


def sum_of_squares(histogram: Histogram) -> float:
    """Estimate of the sum of the squared values: each event at the middle of its bucket, in the open one at its
    lower edge; never less than evenly shared values of the known sum would give."""
    squares = 0.0
    lower_edge = lower_count = 0.0
    for edge, count in zip(histogram.edges, histogram.counts, strict=True):
        middle = lower_edge if edge == math.inf else (lower_edge + edge) / 2
        squares += (count - lower_count) * middle**2
        lower_edge, lower_count = edge, count
    if histogram.events > 0 and histogram.total == histogram.total:
        squares = max(squares, histogram.total**2 / histogram.events)
    return squares
