"""The risk head: how likely is memory exhausted within the next k steps when action a is taken in state s?

    e_i  = the step from s_i to s_i+1 ended in exhaustion
    z    = 1 - product of (1 - e_i), i = 0 .. k-1        whose steps beyond the first follow whoever acted
    L    = mean over rows with known z of w BCE(sigmoid(logit(s, a)), z)

z is known as soon as one e_i is 1, or when all k steps are known; a row whose trajectory was cut before either
says nothing and is left out (to call it safe would teach that the end of a recording is safe). A crash ends the
trajectory and counts as exhaustion.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from schemas.features import FEATURE

FULL: Final = 0.98
"""KV that cannot be dropped at once, over the hard quota, from which a worker counts as exhausted."""

_COLUMNS: Final = tuple(
    FEATURE[name] for name in ("preemption_rate", "u_alloc", "idle_share", "q0_share", "quota_hard")
)
RISK_COLUMNS: Final = np.array(_COLUMNS)
"""Columns of a raw state that :func:`exhausted` reads, in its order."""


@np.errstate(invalid="ignore", divide="ignore")
def exhausted(before: NDArray[np.float32], after: NDArray[np.float32]) -> NDArray[np.bool_]:
    """e, bool [...]: from :data:`RISK_COLUMNS` of raw states before and after steps, float32 [..., 5].

    A request was preempted (the rate, a mean over 10 s, rose: one that only stays up tells of an earlier step),
    or the KV of running requests filled the hard quota (idle KV does not count: the guard drops it at once). An
    absent value never counts.
    """
    preempted = after[..., 0] > np.nan_to_num(before[..., 0], nan=0.0) + 1e-6
    used = after[..., 1] * (1.0 - np.nan_to_num(after[..., 2], nan=0.0)) * after[..., 3]
    full: NDArray[np.bool_] = (used >= FULL * after[..., 4]) & (after[..., 4] > 0)
    return preempted | full


def within(events: NDArray[np.bool_], known: NDArray[np.bool_], ends: NDArray[np.bool_]) -> NDArray[np.float32]:
    """z float32 [b] of chains of k rows, each argument [k, b], row 0 first; NaN where it is not known.

    ``events`` are e, ``known`` whether the chain reaches the row, ``ends`` whether the row was terminal, which
    is a crash. Values of unknown rows are never read into a result. ValueError when the shapes differ.
    """
    if not events.shape == known.shape == ends.shape or events.ndim != 2:
        raise ValueError(f"events {events.shape}, known {known.shape}, ends {ends.shape}: expected equal [k, b]")
    reached = np.logical_and.accumulate(known, axis=0)
    happened = (reached & (events | ends)).any(axis=0)
    return np.where(happened, 1.0, np.where(reached.all(axis=0), 0.0, np.nan)).astype(np.float32)


def risk_loss(
    logits: torch.Tensor, actions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, its derivative by the logits): logits float32 [b, actions], ``actions`` int64 [b] executed, ``labels`` z
    float32 [b] with NaN for not known, ``weights`` w float32 [b]. 0 when nothing is known.

    The derivative of BCE by the logit is sigmoid(logit) - z.
    """
    known = ~labels.isnan()
    share = weights * known / known.sum().clamp(min=1)
    chosen = actions.unsqueeze(1)
    logit, told = logits.gather(1, chosen).squeeze(1), labels.nan_to_num(0.0)
    loss = share.dot(functional.softplus(logit) - told * logit)
    slopes = torch.zeros_like(logits).scatter_(1, chosen, (share * (torch.sigmoid(logit) - told)).unsqueeze(1))
    return loss, slopes
