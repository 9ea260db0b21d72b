"""Piecewise-constant return rates: the arithmetic under the return-time estimator. Pure.

A conversation that waits for its client comes back at rate ``rate[b]`` (1/s) while its idle time is in bin b
(``EDGES_S``), so the chance that it still is away at idle time t is S(t) = exp(-sum of rate x time spent in each
bin). Events and exposure add up, whether the session came back, still waits (a censored observation: exposure
without an event) or never comes: what is left of S at the horizon *is* the probability of having ended.
"""

from __future__ import annotations

import bisect
from typing import Final

import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]

_STARTS_S: Final = (
    0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 15.0, 20.0, 25.0, 30.0, 40.0, 50.0, 60.0, 80.0, 100.0,
    130.0, 170.0, 220.0, 300.0, 400.0, 550.0, 750.0, 1000.0, 1400.0, 2000.0, 3000.0, 4500.0, 7000.0, 10000.0,
)  # fmt: skip
HORIZON_S: Final = 4 * 3600.0
"""Whoever stays away longer has ended, as far as memory is concerned: no tier keeps KV that long unasked."""

EDGES_S: Final[F8] = np.array((*_STARTS_S, HORIZON_S))
WIDTHS_S: Final[F8] = np.diff(EDGES_S)
BINS: Final = len(WIDTHS_S)
_EDGES: Final = EDGES_S.tolist()


def _stretches(starts_s: tuple[float, ...]) -> tuple[I8, I8]:
    """First bin of each stretch, and the stretch of each bin: int64 [stretches], int64 [BINS]."""
    starts = np.array([bisect.bisect_left(_STARTS_S, start_s) for start_s in starts_s], dtype=np.int64)
    return starts, np.repeat(np.arange(len(starts)), np.diff(starts, append=BINS))


_STRETCHES: Final = tuple(_stretches(starts_s) for starts_s in ((0.0, 5.0, 15.0, 60.0, 300.0, 2000.0), _STARTS_S))
"""Over which rates are scaled, long ones first."""


def bin_of(idle_s: float) -> int:
    """The bin that holds an idle time, 0..BINS-1; beyond the horizon the last."""
    return min(bisect.bisect_right(_EDGES, idle_s) - 1, BINS - 1)


def add_exposure(seconds: F8, from_s: float, to_s: float) -> None:
    """Add the time spent in each bin between two idle times to ``seconds``, float64 [BINS]."""
    first, last = bin_of(from_s), bin_of(to_s)
    seconds[first:last] += WIDTHS_S[first:last]
    seconds[first] -= from_s - _EDGES[first]
    seconds[last] += to_s - _EDGES[last]


def shrunk(events: F8, exposure_s: F8, parent: F8, strength: float) -> F8:
    """Rates after events in exposure where ``parent`` rates (1/s, > 0) were expected, float64 [BINS].

    Over stretches of bins, from long ones to single bins, the rate is scaled to the posterior mean of a
    gamma-distributed factor whose prior is worth ``strength`` events: with nothing seen it is the parent's rate,
    with much it is events over exposure. The long stretches let a session that never came back early say so with
    few waits, where each bin alone would have too little to go by.
    """
    rates = parent
    for starts, place in _STRETCHES:
        seen = np.add.reduceat(events, starts)
        expected = np.add.reduceat(rates * exposure_s, starts)
        rates = rates * ((seen + strength) / (expected + strength))[place]
    return rates


def cumulated(rates: F8, idle_s: F8) -> F8:
    """-log S(idle) for rates float64 [n, BINS] and idle times float64 [n]; constant beyond the horizon."""
    spent = np.clip(idle_s[:, None] - EDGES_S[None, :-1], 0.0, WIDTHS_S[None, :])
    return np.asarray(np.einsum("nb,nb->n", rates, spent))


def within(rates: F8, idle_s: F8, window_s: F8) -> F8:
    """P(back within ``window_s`` | away for ``idle_s``), float64 [n]."""
    return -np.expm1(cumulated(rates, idle_s) - cumulated(rates, idle_s + window_s))


def ended(rates: F8, idle_s: F8) -> F8:
    """P(not back by the horizon | away for ``idle_s``), float64 [n]; 1 beyond the horizon."""
    left = cumulated(rates, np.full(len(idle_s), HORIZON_S)) - cumulated(rates, idle_s)
    return np.where(idle_s >= HORIZON_S, 1.0, np.exp(-left))


def quantile(rates: F8, idle_s: F8, share: float) -> F8:
    """Seconds from now by which a ``share`` of those that do come back are back, float64 [n]; inf beyond the
    horizon. ValueError unless 0 < share < 1."""
    if not 0 < share < 1:
        raise ValueError(f"share {share}: expected within (0, 1)")
    before = cumulated(rates, idle_s)
    target = before - np.log1p(-share * (1.0 - ended(rates, idle_s)))
    totals = np.concatenate([np.zeros((len(rates), 1)), np.cumsum(rates * WIDTHS_S, axis=1)], axis=1)
    place = np.clip((totals <= target[:, None]).sum(axis=1) - 1, 0, BINS - 1)
    rows = np.arange(len(rates))
    reached = EDGES_S[place] + (target - totals[rows, place]) / rates[rows, place]
    return np.where(idle_s >= HORIZON_S, np.inf, np.maximum(np.minimum(reached, HORIZON_S) - idle_s, 0.0))


def mean_away(rates: F8, idle_s: F8, window_s: float) -> F8:
    """Expected seconds away out of the next ``window_s``, float64 [n]: the integral of the chance to be away.

    Those that ended count with the whole window, so it is what evicting a session frees in byte-seconds a byte.
    """
    ends = idle_s[:, None] + window_s
    low = np.clip(EDGES_S[None, :-1], idle_s[:, None], ends)
    high = np.clip(EDGES_S[None, 1:], idle_s[:, None], ends)
    spent = high - low
    passed = np.cumsum(rates * spent, axis=1) - rates * spent  # -log of the chance to be away as a bin begins
    inside = -np.expm1(-rates * spent) / rates
    beyond = np.maximum(ends[:, 0] - np.maximum(idle_s, HORIZON_S), 0.0)
    last = np.exp(-(passed[:, -1] + rates[:, -1] * spent[:, -1]))
    return np.asarray((np.exp(-passed) * inside).sum(axis=1) + beyond * last)
