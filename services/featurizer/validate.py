"""What a sane sample can say: values that cannot be are marked absent, rows that cannot be are rejected.

Missing is not zero. A value outside its metric's range (a wrapped unsigned number, an infinity, more than
any card has) is absent where the metric may be missing, and rejects the row where it may not. Values that
contradict each other reject the row too: nobody knows which of them lies.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.classes import ServiceClass
from schemas.metrics import COLUMN, METRICS

Counts = dict[tuple[str, str], int]
"""How often by (reason, metric)."""

_LOW: Final = np.array([metric.low for metric in METRICS])
_HIGH: Final = np.array([metric.high for metric in METRICS])
_REQUIRED: Final = np.array([i for i, metric in enumerate(METRICS) if metric.required])
_IS_REQUIRED: Final = np.array([metric.required for metric in METRICS])
_NAMES: Final = tuple(metric.name for metric in METRICS)
_SLACK: Final = 1.0 + 1e-6
"""Sums of bytes taken at slightly different moments, or rounded, are no contradiction."""

_REJECTING: Final = (
    ("kv_bytes", "hbm_bytes"),
    ("card_kv_capacity_bytes", "hbm_bytes"),
    ("q0_bytes", "card_kv_capacity_bytes"),
    ("kv_idle_bytes", "kv_bytes"),
)
"""(smaller, larger): a row where the first exceeds the second is rejected."""

_BLANKING: Final = (
    ("prefilling", "running"),
    ("waiting_for_memory", "waiting"),
    ("card_free_bytes", "hbm_bytes"),
    ("kv_mapped_bytes", "hbm_bytes"),
    ("quota_hard_bytes", "hbm_bytes"),
    ("host_used_bytes", "host_capacity_bytes"),
)
"""(smaller, larger): the first is absent where it exceeds the second."""

_HBM: Final = COLUMN["hbm_bytes"]
_KV: Final = COLUMN["kv_bytes"]
_CLASS_COUNT: Final = len(ServiceClass)


class Checked(NamedTuple):
    """``values``: float64 [n, len(METRICS)], absent as NaN, rejected rows all NaN; ``rejected``: bool [n]."""

    values: NDArray[np.float64]
    rejected: NDArray[np.bool_]
    starting: NDArray[np.bool_]


def check(
    metrics: NDArray[np.float64], classes: NDArray[np.int64], cards: NDArray[np.int64], counts: Counts
) -> Checked:
    """Checked values of a METRICS matrix; what was left out is added to ``counts``.

    metrics: float64 [n, len(METRICS)], never written to; classes: int64 [n]; cards: int64 [n], 0, 1, ... over
    all cards of the matrix. A starting engine's row is not rejected for what it does not say yet.
    """
    values = metrics
    with np.errstate(invalid="ignore"):
        outside = (metrics < _LOW) | (metrics > _HIGH)
        if outside.any():
            values = np.where(outside, np.nan, metrics)
            for column in np.flatnonzero(outside.any(axis=0)).tolist():
                _add(counts, "out_of_range", _NAMES[column], outside[:, column])
        starting = values[:, COLUMN["starting"]] >= 0.5
        rejected = (classes < 0) | (classes >= _CLASS_COUNT)
        _add(counts, "unknown_class", "class", rejected)
        absent = np.isnan(values[:, _REQUIRED])
        if absent.any():
            # An engine that starts has nothing to say yet; only silence of a running one is a fault.
            silent = absent.any(axis=1) & ~starting
            rejected |= silent
            missing = absent & silent[:, None] & ~outside[:, _REQUIRED]
            for place in np.flatnonzero(missing.any(axis=0)).tolist():
                _add(counts, "missing", _NAMES[_REQUIRED[place]], missing[:, place])
        for smaller, larger in _REJECTING:
            over = values[:, COLUMN[smaller]] > values[:, COLUMN[larger]] * _SLACK
            if over.any():
                _add(counts, f"beyond_{larger}", smaller, over)
                rejected |= over
        for smaller, larger in _BLANKING:
            over = values[:, COLUMN[smaller]] > values[:, COLUMN[larger]] * _SLACK
            if over.any():
                _add(counts, f"beyond_{larger}", smaller, over)
                values = values.copy() if values is metrics else values
                values[over, COLUMN[smaller]] = np.nan
        crowded = np.bincount(cards, values[:, _KV])[cards] > values[:, _HBM] * _SLACK if len(cards) else rejected
        if crowded.any():
            # Their sum does not fit the card, so at least one of its workers lies: none is believed.
            _add(counts, "beyond_card", "kv_bytes", crowded & ~rejected)
            rejected = rejected | crowded
    if rejected.any():
        values = values.copy() if values is metrics else values
        values[rejected] = np.nan
    return Checked(values, rejected, starting)


def _add(counts: Counts, reason: str, metric: str, where: NDArray[np.bool_]) -> None:
    number = int(np.count_nonzero(where))
    if number:
        counts[reason, metric] = counts.get((reason, metric), 0) + number
