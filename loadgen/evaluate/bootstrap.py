"""Paired bootstrap over traces, and the rule of three. Pure, vectorised, seeded."""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.float64]

WEEK_S: Final = 7 * 86_400.0
"""What rates of crashes are told in."""
DRAWS: Final = 4000
CONFIDENCE: Final = 0.95
MOST: Final = 100.0
"""A configuration's ratio is taken to be within 1/MOST and MOST: a policy that serves nothing has no logarithm."""
_CHUNK: Final = 500


class Ratio(msgspec.Struct, frozen=True):
    """A mean or a ratio of means with its interval."""

    ratio: float
    ci95: tuple[float, float]


def mean(values: F8, seed: int = 0, draws: int = DRAWS) -> Ratio:
    """Mean over configurations of the mean over traces, float64 [C, S]; traces are drawn anew within each
    configuration."""
    _checked(values)
    found = np.concatenate([picked.mean(axis=(1, 2)) for (picked,) in _resampled((values,), seed, draws)])
    return Ratio(float(values.mean()), _interval(found))


def ratio(ours: F8, theirs: F8, seed: int = 0, draws: int = DRAWS) -> Ratio:
    """Geometric mean over configurations of the ratio of sums over traces, ``ours`` over ``theirs``, float64 [C, S].

    Cell [c, s] of both is the same requests: both are drawn together. The configurations are fixed: the interval
    speaks for other traces of these, not for other configurations.
    """
    _checked(ours)
    if ours.shape != theirs.shape:
        raise ValueError(f"traces {ours.shape} and {theirs.shape}: expected the same ones")
    found = [_ratio(a.sum(axis=2), b.sum(axis=2)) for a, b in _resampled((ours, theirs), seed, draws)]
    return Ratio(float(_ratio(ours.sum(axis=1), theirs.sum(axis=1))), _interval(np.concatenate(found)))


def upper_rate(events: int, exposure: float) -> float:
    """Upper 95 % bound of a Poisson rate after ``events`` in ``exposure``: the rule of three when there were none.

    Exact otherwise: the rate at which so few events have a probability of 5 %.
    """
    if exposure <= 0:
        return math.inf
    if events == 0:
        return 3.0 / exposure
    low, high = float(events), events + 10.0 * math.sqrt(events) + 10.0
    for _ in range(60):
        middle = (low + high) / 2
        if _at_most(events, middle) > 1.0 - CONFIDENCE:
            low = middle
        else:
            high = middle
    return high / exposure


def _at_most(events: int, expected: float) -> float:
    logs = [k * math.log(expected) - expected - math.lgamma(k + 1) for k in range(events + 1)]
    return sum(math.exp(one) for one in logs)


def _ratio(ours: F8, theirs: F8) -> F8:
    """Over the last axis, which is that of configurations."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = np.where(theirs > 0, ours / theirs, np.where(ours > 0, MOST, 1.0))
    return np.asarray(np.exp(np.log(np.clip(quotient, 1.0 / MOST, MOST)).mean(axis=-1)))


def _resampled(tables: tuple[F8, ...], seed: int, draws: int) -> list[tuple[F8, ...]]:
    """Each table [C, S] drawn anew, the same traces of all, [draws, C, S] in chunks."""
    rng = np.random.default_rng([0xB007, seed])
    configurations, traces = tables[0].shape
    rows = np.arange(configurations)[None, :, None]
    found = []
    for begin in range(0, draws, _CHUNK):
        size = (min(_CHUNK, draws - begin), configurations, traces)
        places = rng.integers(0, traces, size)
        found.append(tuple(table[rows, places] for table in tables))
    return found


def _interval(found: F8) -> tuple[float, float]:
    tail = 50.0 * (1.0 - CONFIDENCE)
    low, high = np.percentile(found, [tail, 100.0 - tail])
    return float(low), float(high)


def _checked(values: F8) -> None:
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise ValueError(f"values of shape {values.shape}: expected finite numbers, configurations x traces")
