"""How much KV an admitted request is reckoned with: its prompt and the output to be expected of it.

A client's max_tokens is what an answer may be, seldom what it becomes: reserving 4096 tokens for answers of 250 fills a
small quota with nothing. What a worker's finished requests of the same class produced says better what the next will.
Who outgrows the expectation reserves what it holds, and the guard gives way when all of them do (DESIGN section 4).
"""

from __future__ import annotations

import math

LEAST_FINISHED = 8.0
"""Finished requests of a class before which max_tokens stands."""
WEIGHT = 0.02
"""How much of a finished request the moments take over, once some fifty have finished."""
DEVIATIONS = 1.0
"""Standard deviations above the mean that are reserved."""


def weight(finished: float) -> float:
    """What the next finished request counts in the moments, ``finished`` before it."""
    return max(WEIGHT, 1.0 / (finished + 1.0))


def expected_output_tokens(
    finished: float, mean: float, mean_square: float, produced: float, max_tokens: float
) -> float:
    """Output tokens to reserve for a request of which ``produced`` are there already, at most ``max_tokens``.

    ``finished``, ``mean``, ``mean_square``: how many requests of its class this worker has finished, and the moments
    of their output tokens.
    """
    if finished < LEAST_FINISHED:
        return max_tokens
    deviation = math.sqrt(max(0.0, mean_square - mean * mean))
    return min(max_tokens, max(mean + DEVIATIONS * deviation, produced + mean))
