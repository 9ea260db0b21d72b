"""Windows: what happened in the last 10 s and 60 s, from ring buffers over worker rows.

The rings hold cumulative counters, one slot a step, so a window is the difference of two slots. A lost step
takes the values of the step before it: its events then count in the step that brought them, and none is lost.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.metrics import COLUMN, HISTOGRAM_BINS, LATENCY_RATIO_EDGES

SHORT_STEPS: Final = 5
"""10 s: the window of slopes, quantiles and rates."""

MAX_GAP_STEPS: Final = 10
"""Steps that may be lost before a worker's windows start anew."""

COUNTERS: Final = tuple(
    name
    for name in COLUMN
    if name in ("finished", "finished_context_tokens", "finished_context_tokens_sq", "preemptions")
    or name.startswith(("ttft_", "tpot_"))
)
"""Counters that windows are made of, in METRICS order."""

_LONG: Final = slice(0, 3)
_PREEMPTIONS: Final = 3
_TTFT: Final = slice(4, 4 + HISTOGRAM_BINS)
_TPOT: Final = slice(4 + HISTOGRAM_BINS, 4 + 2 * HISTOGRAM_BINS)
_SHORT: Final = slice(3, 4 + 2 * HISTOGRAM_BINS)
_SHORT_WIDTH: Final = 1 + 2 * HISTOGRAM_BINS
_EDGES: Final = np.array((0.0, *LATENCY_RATIO_EDGES, LATENCY_RATIO_EDGES[-1]))
"""The last bin is open: all that is known of it is its lower edge."""
_NONE: Final = np.iinfo(np.int64).min // 2


class WindowValues(NamedTuple):
    """float64 [n] each, NaN where the window is not full or nothing happened in it; ``filling``: bool [n]."""

    du_alloc: NDArray[np.float64]
    t_len_mean: NDArray[np.float64]
    t_len_std: NDArray[np.float64]
    tpot_p95: NDArray[np.float64]
    ttft_p95: NDArray[np.float64]
    preemption_rate: NDArray[np.float64]
    filling: NDArray[np.bool_]


class Windows:
    """Ring buffers of all worker rows; rows are the caller's numbers, 0 to capacity - 1."""

    def __init__(self, window_steps: int = 30) -> None:
        """``window_steps``: length of the long window (60 s), 1 or more; the short one is no longer than it."""
        if window_steps < 1:
            raise ValueError(f"a window of {window_steps} steps: expected 1 or more")
        self.window_steps = window_steps
        self.short_steps = min(SHORT_STEPS, window_steps)
        self._capacity = 0
        self._first = np.empty(0, np.int64)
        self._last = np.empty(0, np.int64)
        self._long = np.empty((window_steps + 1, 0, 3))
        self._short = np.empty((self.short_steps + 1, 0, _SHORT_WIDTH))
        self._t_s = np.empty((self.short_steps + 1, 0))
        self._u = np.empty((self.short_steps + 1, 0))

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` rows; new ones are empty."""
        more = capacity - self._capacity
        if more <= 0:
            return
        self._first = np.concatenate((self._first, np.full(more, _NONE)))
        self._last = np.concatenate((self._last, np.full(more, _NONE)))
        self._long = np.concatenate((self._long, np.empty((self.window_steps + 1, more, 3))), axis=1)
        slots = self.short_steps + 1
        self._short = np.concatenate((self._short, np.empty((slots, more, _SHORT_WIDTH))), axis=1)
        self._t_s = np.concatenate((self._t_s, np.empty((slots, more))), axis=1)
        self._u = np.concatenate((self._u, np.empty((slots, more))), axis=1)
        self._capacity = capacity

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Forget the rows' past: their next step is the first."""
        self._first[rows] = _NONE
        self._last[rows] = _NONE

    def advance(
        self,
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        t_s: NDArray[np.float64],
        u_alloc: NDArray[np.float64],
        counters: NDArray[np.float64],
    ) -> WindowValues:
        """Take one step of some rows and give their windows.

        rows: int64 [n], each once; steps: int64 [n], greater than the row's last; t_s: float64 [n], seconds,
        rising with a row's steps; u_alloc: float64 [n]; counters: float64 [n, len(COUNTERS)].
        """
        assert counters.shape == (len(rows), len(COUNTERS)), counters.shape
        last = self._last[rows]
        gap = steps - last
        anew = gap > MAX_GAP_STEPS
        if anew.any():
            self._first[rows[anew]] = steps[anew]
        lost = (gap > 1) & ~anew
        if lost.any():
            self._carry(rows[lost], steps[lost], last[lost])
        self._last[rows] = steps
        first = self._first[rows]
        age = steps - first
        long_now = self._at(steps, self.window_steps + 1, rows)
        short_now = self._at(steps, self.short_steps + 1, rows)
        _flat(self._long)[long_now] = counters[:, _LONG]
        _flat(self._short)[short_now] = counters[:, _SHORT]
        self._t_s.reshape(-1)[short_now] = t_s
        self._u.reshape(-1)[short_now] = u_alloc

        filling_long = age < self.window_steps
        filling_short = age < self.short_steps
        long_base = self._at(steps + 1, self.window_steps + 1, rows)
        short_base = self._at(steps + 1, self.short_steps + 1, rows)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            finished = counters[:, _LONG] - _flat(self._long).take(long_base, axis=0)
            finished[filling_long] = np.nan
            recent = counters[:, _SHORT] - _flat(self._short).take(short_base, axis=0)
            recent[filling_short] = np.nan
            elapsed = t_s - self._t_s.reshape(-1)[short_base]
            mean, std = _mean_std(finished)
            rate = recent[:, 0] / elapsed
            rate[~(rate >= 0) | np.isinf(rate)] = np.nan
            return WindowValues(
                du_alloc=np.where(filling_short, np.nan, self._slope(rows, t_s)),
                t_len_mean=mean,
                t_len_std=std,
                tpot_p95=quantile(recent[:, 1 + HISTOGRAM_BINS :], 0.95),
                ttft_p95=quantile(recent[:, 1 : 1 + HISTOGRAM_BINS], 0.95),
                preemption_rate=rate,
                filling=filling_long | filling_short,
            )

    def _at(self, steps: NDArray[np.int64], slots: int, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (steps % slots) * self._capacity + rows

    def _carry(self, rows: NDArray[np.int64], steps: NDArray[np.int64], last: NDArray[np.int64]) -> None:
        """Give lost steps the counters and the time of the step before them, and no allocation."""
        for back in range(1, int((steps - last).max())):
            here = steps - back > last
            row, step, source = rows[here], (steps - back)[here], last[here]
            for ring in (self._long, self._short, self._t_s):
                slots = ring.shape[0]
                if back < slots:
                    ring[step % slots, row] = ring[source % slots, row]
            if back < self._u.shape[0]:
                self._u[step % self._u.shape[0], row] = np.nan

    def _slope(self, rows: NDArray[np.int64], now_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Least squares over the slots that have an allocation; NaN with fewer than two of them."""
        u = self._u[:, rows]
        t = self._t_s[:, rows] - now_s
        there = ~np.isnan(u)
        if there.all():
            t -= t.mean(axis=0)
            return np.asarray((t * u).sum(axis=0) / (t * t).sum(axis=0))
        number = there.sum(axis=0)
        t = np.where(there, t, 0.0)
        u = np.where(there, u, 0.0)
        t = np.where(there, t - t.sum(axis=0) / number, 0.0)
        slope = (t * u).sum(axis=0) / (t * t).sum(axis=0)
        value: NDArray[np.float64] = np.where(number >= 2, slope, np.nan)
        return value


def spread(values: WindowValues, live: NDArray[np.bool_]) -> WindowValues:
    """Values of some rows as those of all: ``live`` bool [n] marks them, the others are absent and filling."""

    def wide(value: NDArray[np.float64]) -> NDArray[np.float64]:
        column = np.full(len(live), np.nan)
        column[live] = value
        return column

    filling = np.ones(len(live), np.bool_)
    filling[live] = values.filling
    return WindowValues(
        wide(values.du_alloc),
        wide(values.t_len_mean),
        wide(values.t_len_std),
        wide(values.tpot_p95),
        wide(values.ttft_p95),
        wide(values.preemption_rate),
        filling,
    )


def quantile(counts: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """The q-quantile of latency histograms [n, 16] in multiples of the class limit, float64 [n].

    Linear inside a bin; the lower edge of the open last one. NaN where nothing was counted, a bin is missing
    or a bin is negative (its counter went back).
    """
    cumulative = counts.cumsum(axis=1)
    total = cumulative[:, -1]
    wanted = q * total
    place = np.minimum((cumulative < wanted[:, None]).sum(axis=1), HISTOGRAM_BINS - 1)
    line = np.arange(len(counts))
    inside = counts[line, place]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (wanted - (cumulative[line, place] - inside)) / inside
        value: NDArray[np.float64] = _EDGES[place] + share * (_EDGES[place + 1] - _EDGES[place])
        bad = ~(total > 0) | (counts.min(axis=1) < 0)
    value[bad] = np.nan
    return value


def _mean_std(finished: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    number, total, squares = finished.T
    mean = total / number
    mean[~(number > 0) | (total < 0)] = np.nan
    std = np.sqrt(np.maximum(squares / number - mean * mean, 0.0))
    std[~(squares >= 0)] = np.nan
    return mean, std


def _flat(ring: NDArray[np.float64]) -> NDArray[np.float64]:
    return ring.reshape(-1, ring.shape[2])
