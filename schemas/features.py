"""FEATURES: the state that featurizer, decision and learner share (DESIGN section 3, article 1).

A state is one float32 row of raw values in the units below; NaN means absent. The network's input is made
from it by :func:`normalise` alone: every value scaled to its range, then one presence flag for each feature
that a source may lack. :data:`FEATURE_HASH` names the table: a policy trained on another table never acts.
"""

from __future__ import annotations

import hashlib
from typing import Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.metrics import HISTOGRAM_BINS

Scale = Literal["linear", "log"]


class Feature(msgspec.Struct, frozen=True):
    """One column of the state.

    ``linear``: (x - low) / (high - low); ``log``: log1p(x / low) / log1p(high / low), ``low`` being the
    value around which the scale turns from linear to logarithmic. Both clip to [-1, 1.5] and map NaN to 0.
    """

    name: str
    unit: str
    scale: Scale
    low: float
    high: float
    formula: str
    may_be_absent: bool = True


_CLASSES: Final = ("chat", "agent", "batch", "copilot", "training")
_ACTIONS: Final = ("hold", "widen", "tighten", "compact", "evict")

FEATURES: Final[tuple[Feature, ...]] = (
    Feature("u_alloc", "1", "linear", 0, 2, "kv_bytes / q0_bytes", may_be_absent=False),
    Feature("du_alloc", "1/s", "linear", 0, 0.1, "least-squares slope of u_alloc over the last 10 s"),
    Feature("f_frag", "1", "linear", 0, 1, "entropy of the free runs in mapped pages"),
    Feature("l_queue", "requests", "log", 4, 1000, "waiting", may_be_absent=False),
    Feature("p_prefill", "1", "linear", 0, 1, "prefilling / running, 0 when none runs"),
    Feature("t_len_mean", "tokens", "log", 256, 131072, "mean context of requests finished in the last 60 s"),
    Feature("t_len_std", "tokens", "log", 256, 131072, "their standard deviation"),
    Feature("s_swap", "sequences", "log", 4, 1000, "swapped"),
    Feature("l_queue_memory", "requests", "log", 4, 1000, "waiting_for_memory"),
    Feature("card_free", "1", "linear", 0, 1, "card_free_bytes / card_kv_capacity_bytes"),
    Feature("neighbour_queue", "requests", "log", 4, 1000, "sum of waiting of the card's other workers"),
    Feature("neighbour_use", "1", "linear", 0, 1, "their kv_bytes / card_kv_capacity_bytes"),
    Feature("rho", "1", "linear", 1, 1.6, "overcommit factor in force", may_be_absent=False),
    Feature("quota_hard", "1", "linear", 0, 1, "quota_hard_bytes / card_kv_capacity_bytes"),
    Feature("u_reserved", "1", "linear", 0, 1, "kv_reserved_bytes / quota_soft_bytes"),
    Feature("tpot_p95", "1", "linear", 0, 2,
            "p95 of requests' mean time per output token over the class limit, last 10 s"),
    Feature("ttft_p95", "1", "linear", 0, 2, "p95 of time to first token over the class limit, last 10 s"),
    Feature("preemption_rate", "1/s", "log", 0.1, 20, "preemptions over the last 10 s"),
    Feature("host_use", "1", "linear", 0, 1, "host_used_bytes / host_capacity_bytes"),
    Feature("host_free", "1", "linear", 0, 4, "free host tier / card_kv_capacity_bytes"),
    Feature("link", "GB/s", "log", 5, 60, "link_bytes_per_s"),
    Feature("link_use", "1", "linear", 0, 1, "link_used_bytes_per_s / link_bytes_per_s"),
    Feature("kv_per_token", "KiB", "log", 32, 1024, "kv_bytes_per_token"),
    Feature("idle_share", "1", "linear", 0, 1, "kv_idle_bytes / kv_bytes, 0 when there is no KV"),
    Feature("idle_return", "s", "log", 5, 1000, "mean expected time until idle sessions come back"),
    Feature("running", "requests", "log", 8, 1024, "running", may_be_absent=False),
    Feature("max_running", "requests", "log", 8, 1024, "ceiling of the running cap", may_be_absent=False),
    Feature("q0_share", "1", "linear", 0, 1, "q0_bytes / card_kv_capacity_bytes", may_be_absent=False),
    Feature("hbm", "GB", "log", 40, 200, "hbm_bytes", may_be_absent=False),
    Feature("reference_rate", "tokens/s", "log", 1000, 30000, "reference_tokens_per_s"),
    Feature("iteration", "ms", "log", 10, 500, "iteration_s"),
    *(Feature(f"class_{name}", "1", "linear", 0, 1, "class one-hot", may_be_absent=False) for name in _CLASSES),
    *(Feature(f"since_{name}", "steps", "log", 4, 300, f"steps since the last {name}, at most 300",
              may_be_absent=False) for name in _ACTIONS),
    *(Feature(f"context_{k:02d}", "1", "linear", 0, 1, "share of running and idle sequences in the bin")
      for k in range(HISTOGRAM_BINS)),
)  # fmt: skip

FEATURE: Final[dict[str, int]] = {feature.name: i for i, feature in enumerate(FEATURES)}
"""Column number by feature name."""

FEATURE_COUNT: Final = len(FEATURES)
_FLAGGED: Final = np.array([i for i, f in enumerate(FEATURES) if f.may_be_absent])
INPUT_COUNT: Final = FEATURE_COUNT + len(_FLAGGED)
"""Width of the network's input: one column a feature, then one presence flag a feature that may be absent."""

MAX_SINCE_STEPS: Final = 300

FEATURE_HASH: Final = hashlib.sha256(msgspec.json.encode(FEATURES)).hexdigest()[:16]

_LOG: Final = np.array([f.scale == "log" for f in FEATURES])
_LOW: Final = np.array([f.low for f in FEATURES], np.float32)
_HIGH: Final = np.array([f.high for f in FEATURES], np.float32)
_SPAN: Final = np.where(_LOG, np.log1p(_HIGH / np.where(_LOG, _LOW, 1)), _HIGH - _LOW).astype(np.float32)


def normalise(raw: NDArray[np.float32]) -> NDArray[np.float32]:
    """Network input [n, INPUT_COUNT] float32 of raw states [n, FEATURE_COUNT] float32.

    Absent (NaN) and infinite values become 0 with presence flag 0. ValueError for another width.
    """
    if raw.ndim != 2 or raw.shape[1] != FEATURE_COUNT:
        raise ValueError(f"states of shape {raw.shape}: expected [n, {FEATURE_COUNT}]")
    present = np.isfinite(raw)
    value = np.where(present, raw, _LOW).astype(np.float32)
    out = np.empty((raw.shape[0], INPUT_COUNT), np.float32)
    scaled = out[:, :FEATURE_COUNT]
    with np.errstate(over="ignore"):  # what overflows is clipped with the rest
        np.subtract(value, _LOW, out=scaled)
        scaled[:, _LOG] = np.log1p(np.maximum(value[:, _LOG], 0) / _LOW[_LOG])
        scaled /= _SPAN
    np.clip(scaled, -1.0, 1.5, out=scaled)
    scaled[~present] = 0.0
    out[:, FEATURE_COUNT:] = present[:, _FLAGGED]
    return out
