"""States from checked samples and windows: the formulas of ``schemas.features``."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT
from schemas.classes import ServiceClass
from schemas.features import FEATURE, FEATURE_COUNT, MAX_SINCE_STEPS
from schemas.metrics import COLUMN, CONTEXT_SLICE
from services.featurizer.window import WindowValues

_CLASS: Final = FEATURE["class_chat"]
_SINCE: Final = FEATURE["since_hold"]
_CONTEXT: Final = FEATURE["context_00"]
_GAUGES: Final = CONTEXT_SLICE.start
"""All gauges that features use stand before the counters and histograms."""


def build(
    values: NDArray[np.float64],
    windows: WindowValues,
    cards: NDArray[np.int64],
    classes: NDArray[np.int64],
    since: NDArray[np.int64],
) -> NDArray[np.float32]:
    """Raw states float32 [n, FEATURE_COUNT]; NaN = absent.

    values: float64 [n, len(METRICS)]; cards: int64 [n], 0, 1, ... over all cards; classes: int64 [n], others
    than ServiceClass give no one-hot; since: int64 [n, 5], steps since each action.
    A worker's neighbours are its card's other workers; where one of them is absent, so is their sum.
    """
    rows = len(values)
    out = np.empty((rows, FEATURE_COUNT), np.float32)
    if not rows:
        return out
    column = np.ascontiguousarray(values[:, :_GAUGES].T)

    def of(name: str) -> NDArray[np.float64]:
        return np.asarray(column[COLUMN[name]])

    def put(name: str, value: NDArray[np.float64]) -> None:
        out[:, FEATURE[name]] = value

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        capacity = of("card_kv_capacity_bytes")
        kv, waiting, running = of("kv_bytes"), of("waiting"), of("running")
        put("u_alloc", kv / of("q0_bytes"))
        put("du_alloc", windows.du_alloc)
        put("f_frag", np.minimum(of("frag"), 1.0))
        put("l_queue", waiting)
        put("p_prefill", np.where(running == 0, 0.0, of("prefilling") / running))
        put("t_len_mean", windows.t_len_mean)
        put("t_len_std", windows.t_len_std)
        put("s_swap", of("swapped"))
        put("l_queue_memory", of("waiting_for_memory"))
        put("card_free", of("card_free_bytes") / capacity)
        put("neighbour_queue", np.bincount(cards, waiting)[cards] - waiting)
        put("neighbour_use", np.maximum(np.bincount(cards, kv)[cards] - kv, 0.0) / capacity)
        put("rho", of("rho"))
        put("quota_hard", of("quota_hard_bytes") / capacity)
        put("u_reserved", _finite(of("kv_reserved_bytes") / of("quota_soft_bytes")))
        put("tpot_p95", windows.tpot_p95)
        put("ttft_p95", windows.ttft_p95)
        put("preemption_rate", windows.preemption_rate)
        host, host_used = of("host_capacity_bytes"), of("host_used_bytes")
        # A tier or a link that is known not to exist is full: nothing can be moved there.
        put("host_use", np.where(host == 0, 1.0, host_used / host))
        put("host_free", np.maximum(host - host_used, 0.0) / capacity)
        link = of("link_bytes_per_s")
        put("link", link / 1e9)
        put("link_use", np.where(link == 0, 1.0, of("link_used_bytes_per_s") / link))
        put("kv_per_token", of("kv_bytes_per_token") / 1024)
        put("idle_share", np.where(kv == 0, 0.0, of("kv_idle_bytes") / kv))
        put("idle_return", of("idle_return_s"))
        put("running", running)
        put("max_running", of("max_running"))
        put("q0_share", of("q0_bytes") / capacity)
        put("hbm", of("hbm_bytes") / 1e9)
        put("reference_rate", of("reference_tokens_per_s"))
        put("iteration", of("iteration_s") * 1e3)
        out[:, _CLASS : _CLASS + len(ServiceClass)] = classes[:, None] == np.arange(len(ServiceClass))
        out[:, _SINCE : _SINCE + ACTION_COUNT] = np.clip(since, 0, MAX_SINCE_STEPS)
        context = values[:, CONTEXT_SLICE]
        sequences = context.sum(axis=1)
        out[:, _CONTEXT:] = context / np.where(sequences == 0, 1.0, sequences)[:, None]
    return out


def _finite(value: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(value), value, np.nan)
