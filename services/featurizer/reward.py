"""Rewards (DESIGN section 3, article 1), per card and credited to each of its workers.

article:   R = alpha x tokens/s / reference + beta x u_alloc(card) - gamma x violation share - 1000 x [OOM]
goodput:   R = (good tokens - preemption cost - re-prefill cost) / (reference x dt) - 20 x [OOM]

Both are computed for every transition; which one trains is the learner's setting.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.identity import STEP_S
from schemas.metrics import COLUMN
from schemas.transitions import REWARD_PARTS
from services.featurizer import kernels

OOM_ARTICLE: Final = 1000.0
OOM_GOODPUT: Final = 20.0
MAX_TOKENS_RATIO: Final = 10.0
"""No card makes more than this multiple of its peak rate: beyond it, a counter leapt (a wrapped number)."""
MAX_GOOD_RATIO: Final = 1000.0
"""Good tokens count when their request ends, so a step may bring those of many steps."""

COUNTERS: Final = (
    "output_tokens", "good_tokens", "recomputed_tokens", "preemptions", "judged", "violations", "oom",
)  # fmt: skip
"""Counters that rewards are made of, in the order of :func:`card_rewards`."""

GAUGES: Final = ("kv_bytes", "card_kv_capacity_bytes", "reference_tokens_per_s")
"""Gauges that they are made of, likewise."""

GAUGE_COLUMNS: Final = np.array([COLUMN[name] for name in GAUGES])
_COLUMNS: Final = np.array([COLUMN[name] for name in COUNTERS])
_LIMITS: Final = np.array([MAX_TOKENS_RATIO, MAX_GOOD_RATIO, OOM_ARTICLE, OOM_GOODPUT])


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights of the reward's parts."""

    alpha: float = 1.0
    """Weight of throughput over the card's reference (article 1)."""
    beta: float = 0.2
    """Weight of the card's KV use; small, because it rewards hoarding (DESIGN section 3)."""
    gamma: float = 1.0
    """Weight of the share of requests beyond their class limit."""
    preemption_cost_tokens: float = 16.0
    """What one preemption costs beside its recomputation, in output tokens: one block's work."""
    recompute_cost: float = 0.5
    """What one recomputed prompt token costs in output tokens: peak decode rate over prefill rate, roughly."""


def reward_parts(
    before: NDArray[np.float64],
    after: NDArray[np.float64],
    cards: NDArray[np.int64],
    settings: RewardSettings,
    dt_s: float | NDArray[np.float64] = STEP_S,
) -> NDArray[np.float32]:
    """Parts float32 [n, len(REWARD_PARTS)] of the step between two samples of the same workers.

    before, after: float64 [n, len(METRICS)]; cards: int64 [n], any numbers, equal for workers of one card;
    dt_s: seconds between the samples. NaN where an input is absent.
    """
    names, dense = np.unique(cards, return_inverse=True)
    return card_rewards(
        increase(before[:, _COLUMNS], after[:, _COLUMNS]),
        np.ascontiguousarray(after[:, GAUGE_COLUMNS]),
        dense.astype(np.int64),
        len(names),
        np.broadcast_to(np.asarray(dt_s, np.float64), len(cards)).copy(),
        settings,
    )


def increase(before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """What counters gained; one that went back was reset and has counted from zero since."""
    return np.ascontiguousarray(after - np.where(after < before, 0.0, before))


def card_rewards(
    gained: NDArray[np.float64],
    gauges: NDArray[np.float64],
    cards: NDArray[np.int64],
    card_count: int,
    dt_s: NDArray[np.float64],
    settings: RewardSettings,
) -> NDArray[np.float32]:
    """Parts float32 [n, len(REWARD_PARTS)] from what the counters gained.

    gained: float64 [n, len(COUNTERS)]; gauges: float64 [n, len(GAUGES)], after the step; cards: int64 [n],
    0 to ``card_count`` - 1; dt_s: float64 [n]. Tokens count over the reference of the worker that made them:
    unlike models share a card by its time. On a card that ran out of memory an absent input counts as
    nothing: a dead engine makes no tokens.
    """
    out = np.empty((len(gained), len(REWARD_PARTS)), np.float32)
    kernels.rewards(
        gained,
        gauges,
        cards,
        card_count,
        dt_s,
        settings.alpha,
        settings.beta,
        settings.gamma,
        settings.preemption_cost_tokens,
        settings.recompute_cost,
        _LIMITS,
        out,
    )
    return out
