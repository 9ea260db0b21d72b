"""Windows: what happened in the last 10 s and 60 s, from ring buffers over worker rows.

The rings hold cumulative counters, one slot a step, so a window is the difference of two slots. A lost step
takes the values of the step before it: its events then count in the step that brought them, and none is lost.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.metrics import COLUMN, COUNTER_COLUMNS, HISTOGRAM_BINS, LATENCY_RATIO_EDGES
from services.featurizer import kernels
from services.featurizer.reward import COUNTERS as REWARD_COUNTERS

SHORT_STEPS: Final = 5
"""10 s: the window of slopes, quantiles and rates."""

MAX_GAP_STEPS: Final = 10
"""Steps that may be lost before a worker's windows start anew."""

COUNTERS: Final = (
    "finished", "finished_context_tokens", "finished_context_tokens_sq", "preemptions",
    *(f"ttft_{k:02d}" for k in range(HISTOGRAM_BINS)), *(f"tpot_{k:02d}" for k in range(HISTOGRAM_BINS)),
)  # fmt: skip
"""Counters that windows are made of; the first three go over the long window, the others over the short."""

_PLACE: Final = {column: place for place, column in enumerate(COUNTER_COLUMNS)}
_COLUMNS: Final = np.array(COUNTER_COLUMNS)
_WINDOW_PLACES: Final = np.array([_PLACE[COLUMN[name]] for name in COUNTERS])
_REWARD_PLACES: Final = np.array([_PLACE[COLUMN[name]] for name in REWARD_COUNTERS])
_LONG_WIDTH: Final = 3
_SHORT_WIDTH: Final = 1 + 2 * HISTOGRAM_BINS
_EDGES: Final = np.array((0.0, *LATENCY_RATIO_EDGES, LATENCY_RATIO_EDGES[-1]))
"""The last bin is open: all that is known of it is its lower edge."""


class Moved(NamedTuple):
    """What a step brought, for n workers."""

    windows: NDArray[np.float64]
    """float64 [n, 6]: du_alloc, t_len_mean, t_len_std, tpot_p95, ttft_p95, preemption_rate; NaN where the
    window is not full or nothing happened in it."""
    gained: NDArray[np.float64]
    """float64 [n, rewards' counters]: since the step before; NaN where that was not seen."""
    dt_s: NDArray[np.float64]
    filling: NDArray[np.bool_]
    resets: int
    """Workers whose counters went back."""


class Windows:
    """Ring buffers and last counters of all worker rows; rows are the caller's numbers, 0 to capacity - 1."""

    def __init__(self, window_steps: int = 30) -> None:
        """``window_steps``: length of the long window (60 s), 1 or more; the short one is no longer than it."""
        if window_steps < 1:
            raise ValueError(f"a window of {window_steps} steps: expected 1 or more")
        slots = min(SHORT_STEPS, window_steps) + 1
        self._counters = np.empty((0, len(_COLUMNS)))
        self._counter_steps = np.empty(0, np.int64)
        self._counter_t_s = np.empty(0)
        self._first = np.empty(0, np.int64)
        self._last = np.empty(0, np.int64)
        self._long = np.empty((0, window_steps + 1, _LONG_WIDTH))
        self._short = np.empty((0, slots, _SHORT_WIDTH))
        self._t_s = np.empty((0, slots))
        self._u = np.empty((0, slots))

    def grow(self, capacity: int) -> None:
        """Room for ``capacity`` rows; new ones are empty."""
        more = capacity - len(self._first)
        if more <= 0:
            return
        for name, array in vars(self).items():
            fill = kernels.NEVER if array.dtype == np.int64 else np.nan
            setattr(self, name, np.concatenate((array, np.full((more, *array.shape[1:]), fill, array.dtype))))

    def restart(self, rows: NDArray[np.int64]) -> None:
        """Forget the rows' windows and that there was a step before; their next step is the first."""
        for steps in (self._first, self._last, self._counter_steps):
            steps[rows] = kernels.NEVER

    def clear(self, rows: NDArray[np.int64]) -> None:
        """Forget the rows' counters too: they belong to new workers."""
        self.restart(rows)
        self._counters[rows] = np.nan

    def advance(
        self,
        values: NDArray[np.float64],
        rows: NDArray[np.int64],
        steps: NDArray[np.int64],
        t_s: NDArray[np.float64],
        rejected: NDArray[np.bool_],
        starting: NDArray[np.bool_],
    ) -> Moved:
        """Take one step of n workers.

        values: float64 [n, len(METRICS)], C-ordered; rows: int64 [n], each once; steps: int64 [n], greater
        than the row's last; t_s: float64 [n], seconds, rising with a row's steps; rejected, starting: bool [n].
        A rejected row changes nothing; a starting one, or one whose counters went back, begins anew.
        """
        n = len(rows)
        assert values.shape[0] == len(steps) == len(t_s) == n, (values.shape, n)
        moved = Moved(np.empty((n, 6)), np.empty((n, len(_REWARD_PLACES))), np.empty(n), np.empty(n, np.bool_), 0)
        resets = kernels.advance(
            values, rows, steps, t_s, rejected, starting, _COLUMNS, _WINDOW_PLACES, _REWARD_PLACES,
            COLUMN["kv_bytes"], COLUMN["q0_bytes"], _EDGES, MAX_GAP_STEPS, self._counters, self._counter_steps,
            self._counter_t_s, self._first, self._last, self._long, self._short, self._t_s, self._u,
            moved.windows, moved.gained, moved.dt_s, moved.filling,
        )  # fmt: skip
        return moved._replace(resets=resets)


def quantile(counts: NDArray[np.float64], q: float) -> NDArray[np.float64]:
    """The q-quantile of latency histograms [n, 16] in multiples of the class limit, float64 [n]."""
    return np.array([kernels.quantile_of(np.ascontiguousarray(line, np.float64), q, _EDGES) for line in counts])
