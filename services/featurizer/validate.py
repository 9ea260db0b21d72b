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
from services.featurizer import kernels

Counts = dict[tuple[str, str], int]
"""How often by (reason, metric)."""

_LOW: Final = np.array([metric.low for metric in METRICS])
_HIGH: Final = np.array([metric.high for metric in METRICS])
_REQUIRED: Final = np.array([i for i, metric in enumerate(METRICS) if metric.required])
_IS_REQUIRED: Final = np.array([metric.required for metric in METRICS])
_NAMES: Final = tuple(metric.name for metric in METRICS)
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

_ORDERED: Final = np.array([(COLUMN[small], COLUMN[large]) for small, large in (*_REJECTING, *_BLANKING)])
_HBM: Final = COLUMN["hbm_bytes"]
_KV: Final = COLUMN["kv_bytes"]
_CLASS_COUNT: Final = len(ServiceClass)


class Checked(NamedTuple):
    """``values``: float64 [n, len(METRICS)], absent as NaN, rejected rows all NaN; ``rejected``: bool [n]."""

    values: NDArray[np.float64]
    rejected: NDArray[np.bool_]
    starting: NDArray[np.bool_]
    odd: bool
    """Whether there was anything to reject, to blank or to wait for."""


def check(
    metrics: NDArray[np.float64],
    classes: NDArray[np.int64],
    cards: NDArray[np.int64],
    card_count: int,
    counts: Counts,
) -> Checked:
    """Checked values of a METRICS matrix; what was left out is added to ``counts``.

    metrics: float64 [n, len(METRICS)], C-ordered, never written to; classes: int64 [n]; cards: int64 [n], 0 to
    ``card_count`` - 1. A starting engine's row is not rejected for what it does not say yet.
    """
    odd = kernels.any_odd(metrics, _LOW, _HIGH, _REQUIRED, _ORDERED, cards, card_count, _KV, _HBM, COLUMN["starting"])
    if not odd and classes.max(initial=0) < _CLASS_COUNT:
        nothing = np.zeros(len(metrics), np.bool_)
        return Checked(metrics, nothing, nothing, False)
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
            over = values[:, COLUMN[smaller]] > values[:, COLUMN[larger]] * kernels.SLACK
            if over.any():
                _add(counts, f"beyond_{larger}", smaller, over)
                rejected |= over
        for smaller, larger in _BLANKING:
            over = values[:, COLUMN[smaller]] > values[:, COLUMN[larger]] * kernels.SLACK
            if over.any():
                _add(counts, f"beyond_{larger}", smaller, over)
                values = values.copy() if values is metrics else values
                values[over, COLUMN[smaller]] = np.nan
        crowded = np.bincount(cards, values[:, _KV])[cards] > values[:, _HBM] * kernels.SLACK
        if crowded.any():
            # Their sum does not fit the card, so at least one of its workers lies: none is believed.
            _add(counts, "beyond_card", "kv_bytes", crowded & ~rejected)
            rejected = rejected | crowded
    if rejected.any():
        values = values.copy() if values is metrics else values
        values[rejected] = np.nan
    return Checked(values, rejected, starting, True)


def _add(counts: Counts, reason: str, metric: str, where: NDArray[np.bool_]) -> None:
    number = int(np.count_nonzero(where))
    if number:
        counts[reason, metric] = counts.get((reason, metric), 0) + number
