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

_COLUMNS: Final = np.array([COLUMN[name] for name in COUNTERS])


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
    _, dense = np.unique(cards, return_inverse=True)
    return card_rewards(
        increase(before[:, _COLUMNS], after[:, _COLUMNS]),
        after[:, COLUMN["kv_bytes"]],
        after[:, COLUMN["card_kv_capacity_bytes"]],
        after[:, COLUMN["reference_tokens_per_s"]],
        dense.astype(np.int64),
        dt_s,
        settings,
    )


def increase(before: NDArray[np.float64], after: NDArray[np.float64]) -> NDArray[np.float64]:
    """What counters gained; one that went back was reset and has counted from zero since."""
    return after - np.where(after < before, 0.0, before)


def card_rewards(
    gained: NDArray[np.float64],
    kv_bytes: NDArray[np.float64],
    capacity_bytes: NDArray[np.float64],
    reference_tokens_per_s: NDArray[np.float64],
    cards: NDArray[np.int64],
    dt_s: float | NDArray[np.float64],
    settings: RewardSettings,
) -> NDArray[np.float32]:
    """Parts float32 [n, len(REWARD_PARTS)] from what the counters gained.

    gained: float64 [n, len(COUNTERS)]; the others float64 [n]; cards: int64 [n], 0, 1, ... over all cards.
    Tokens count over the reference of the worker that made them: unlike models share a card by its time.
    On a card that ran out of memory an absent input counts as nothing: a dead engine makes no tokens.
    """
    rows = len(gained)
    out = np.full((rows, len(REWARD_PARTS)), np.nan, np.float32)
    if not rows:
        return out

    def over_card(column: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(cards, np.where(dead & np.isnan(column), 0.0, column))[cards])

    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        crashes = np.nan_to_num(gained[:, 6])
        dead = (np.bincount(cards, crashes) > 0)[cards]
        work = 1.0 / (reference_tokens_per_s * dt_s)
        work[~np.isfinite(work) | (work <= 0)] = np.nan
        tokens = over_card(gained[:, 0] * work)
        tokens[tokens > MAX_TOKENS_RATIO] = np.nan
        cost = settings.preemption_cost_tokens * gained[:, 3] + settings.recompute_cost * gained[:, 2]
        good = over_card((gained[:, 1] - cost) * work)
        good[np.abs(good) > MAX_GOOD_RATIO] = np.nan
        alloc = over_card(kv_bytes) / capacity_bytes
        judged, violations = over_card(gained[:, 4]), over_card(gained[:, 5])
        violation = np.where(judged == 0, 0.0, violations / judged)
        violation[violation > 1.0] = np.nan
        oom = over_card(gained[:, 6])
        alloc[dead & np.isnan(alloc)] = 0.0
        for part in (tokens, good, violation):
            part[dead & np.isnan(part)] = 0.0
        armed = np.where(oom > 0, 1.0, np.where(oom == 0, 0.0, np.nan))
        out[:, 0] = settings.alpha * tokens + settings.beta * alloc - settings.gamma * violation - OOM_ARTICLE * armed
        out[:, 1] = good - OOM_GOODPUT * armed
        out[:, 2], out[:, 3], out[:, 4], out[:, 5] = tokens, alloc, violation, oom
    return out
