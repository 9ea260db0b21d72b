"""Who is admitted next: those who can still meet their limit first, then by deadline."""

from __future__ import annotations

import math

LATE = 1e12
"""Rank of who has no limit, seconds; the late come behind."""
RATE_WEIGHT = 0.2
"""How much of a new measurement the prefill rate takes over."""


def deadline_s(arrival_s: float, first_token_limit_s: float, completion_limit_s: float) -> float:
    """When the request's promise is broken at the latest: its first token's limit, or its completion's."""
    return arrival_s + min(first_token_limit_s, completion_limit_s)


def prefill_rate(rate: float, measured: float) -> float:
    """The worker's prompt tokens per second while prompts wait, smoothed; 0 = not known yet."""
    if rate <= 0.0:
        return measured
    return rate + RATE_WEIGHT * (measured - rate)


def first_token_in_s(ahead_tokens: float, own_tokens: float, tokens_per_s: float, iteration_s: float) -> float:
    """Predicted seconds until the first token of a request that is admitted now: ``ahead_tokens`` of prompts before
    it, ``own_tokens`` that it computes itself, then one iteration. Unknown rate: the iteration alone."""
    if tokens_per_s <= 0.0:
        return iteration_s
    return (ahead_tokens + own_tokens) / tokens_per_s + iteration_s


def can_meet(now_s: float, deadline_s: float, first_token_in_s: float) -> bool:
    """Whether its first token can still be in time."""
    return now_s + first_token_in_s <= deadline_s


def rank(deadline_s: float, meets: bool, has_first_token: bool) -> float:
    """The queue is served from the lowest rank: requests whose client already reads (preempted ones) first, then by
    deadline, and those that are late after all others."""
    if not meets:
        return LATE + deadline_s
    return -math.inf if has_first_token else min(deadline_s, LATE)


def prefill_ahead_tokens(batch_tokens: float, tokens_per_s: float, period_s: float) -> float:
    """Prompt tokens that the batch may hold before admission waits: enough to keep the engine busy until the next
    look, no more, since what is in the batch is computed in order of admission and not by deadline."""
    return max(batch_tokens, 2.0 * tokens_per_s * period_s)
