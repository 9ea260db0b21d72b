"""States from checked samples and windows: the formulas of ``schemas.features``."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.features import FEATURE, FEATURE_COUNT, MAX_SINCE_STEPS
from schemas.metrics import COLUMN, CONTEXT_SLICE
from services.featurizer import kernels

_ABSENT, _ZERO, _ONE = -1, 0, 1
"""What a feature is when its denominator is 0."""

_QUOTIENTS: Final = (
    ("u_alloc", "kv_bytes", "q0_bytes", _ABSENT, 1.0),
    ("f_frag", "frag", "", _ABSENT, 1.0),
    ("l_queue", "waiting", "", _ABSENT, 1.0),
    ("p_prefill", "prefilling", "running", _ZERO, 1.0),
    ("s_swap", "swapped", "", _ABSENT, 1.0),
    ("l_queue_memory", "waiting_for_memory", "", _ABSENT, 1.0),
    ("card_free", "card_free_bytes", "card_kv_capacity_bytes", _ABSENT, 1.0),
    ("rho", "rho", "", _ABSENT, 1.0),
    ("quota_hard", "quota_hard_bytes", "card_kv_capacity_bytes", _ABSENT, 1.0),
    ("u_reserved", "kv_reserved_bytes", "quota_soft_bytes", _ABSENT, 1.0),
    # A tier or a link that is known not to exist is full: nothing can be moved there.
    ("host_use", "host_used_bytes", "host_capacity_bytes", _ONE, 1.0),
    ("link", "link_bytes_per_s", "", _ABSENT, 1e-9),
    ("link_use", "link_used_bytes_per_s", "link_bytes_per_s", _ONE, 1.0),
    ("kv_per_token", "kv_bytes_per_token", "", _ABSENT, 1 / 1024),
    ("idle_share", "kv_idle_bytes", "kv_bytes", _ZERO, 1.0),
    ("idle_return", "idle_return_s", "", _ABSENT, 1.0),
    ("running", "running", "", _ABSENT, 1.0),
    ("max_running", "max_running", "", _ABSENT, 1.0),
    ("q0_share", "q0_bytes", "card_kv_capacity_bytes", _ABSENT, 1.0),
    ("hbm", "hbm_bytes", "", _ABSENT, 1e-9),
    ("reference_rate", "reference_tokens_per_s", "", _ABSENT, 1.0),
    ("iteration", "iteration_s", "", _ABSENT, 1e3),
)
"""(feature, numerator, denominator, when that is 0, factor): the formulas that are quotients of two metrics."""

_TABLE: Final = np.array(
    [(FEATURE[name], COLUMN[over], COLUMN[under] if under else -1, zero) for name, over, under, zero, _ in _QUOTIENTS]
)
_FACTORS: Final = np.array([factor for *_, factor in _QUOTIENTS])
_WINDOWS: Final = np.array(
    [FEATURE[n] for n in ("du_alloc", "t_len_mean", "t_len_std", "tpot_p95", "ttft_p95", "preemption_rate")]
)
"""In the order of the kernels' window row."""
_BESIDE: Final = np.array([FEATURE["neighbour_queue"], FEATURE["neighbour_use"]])
_HOST_FREE: Final = np.array([FEATURE["host_free"], COLUMN["host_capacity_bytes"], COLUMN["host_used_bytes"]])


def build(
    values: NDArray[np.float64],
    windows: NDArray[np.float64],
    cards: NDArray[np.int64],
    card_count: int,
    classes: NDArray[np.int64],
    rows: NDArray[np.int64],
    steps: NDArray[np.int64],
    executed: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Raw states float32 [n, FEATURE_COUNT]; NaN = absent.

    values: float64 [n, len(METRICS)]; windows: float64 [n, 6]; cards: int64 [n], 0 to ``card_count`` - 1;
    classes: int64 [n], others than ServiceClass give no one-hot; executed: int64 [rows, 5], the step in which
    each action was executed last. A worker's neighbours are its card's other workers; where one of them is
    absent, so is their sum.
    """
    out = np.empty((len(values), FEATURE_COUNT), np.float32)
    beside = np.empty((len(values), 2))
    kernels.neighbours(values, cards, card_count, COLUMN["waiting"], COLUMN["kv_bytes"], beside)
    kernels.states(
        values,
        _TABLE,
        _FACTORS,
        windows,
        _WINDOWS,
        beside,
        rows,
        steps,
        classes,
        executed,
        _BESIDE,
        _HOST_FREE,
        COLUMN["card_kv_capacity_bytes"],
        FEATURE["class_chat"],
        FEATURE["since_hold"],
        FEATURE["context_00"],
        CONTEXT_SLICE.start,
        MAX_SINCE_STEPS,
        out,
    )
    return out
