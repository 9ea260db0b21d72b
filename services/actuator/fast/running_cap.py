"""How many requests run at a time: additive increase, multiplicative decrease, driven by the gap between tokens."""

from __future__ import annotations

import math

LOWEST = 16.0
"""A batch this small is bound by the weights: less would not bring tokens sooner, unless the ceiling says so."""
CUT = 0.9
"""What remains of the cap when tokens come later than their limit."""
RAISE = 2.0
"""What a calm look adds."""
CALM = 0.95
"""Share of the limit below which there is room for more."""
GAP_WEIGHT = 0.15
"""How much of a new measurement the mean gap takes over: a look a second makes it a memory of some 6 s, about what an
answer takes, whose mean gap is what is promised."""


def smoothed_gap_s(gap_s: float, measured_s: float) -> float:
    """The worker's mean time between two tokens of a request; NaN or 0 = nothing decoded."""
    if not measured_s > 0.0:
        return gap_s
    if not gap_s > 0.0:
        return measured_s
    return gap_s + GAP_WEIGHT * (measured_s - gap_s)


def next_cap(cap: float, ceiling: float, running: float, gap_s: float, limit_s: float) -> float:
    """The cap in force for the next second, at most ``ceiling``, which the slow control moves.

    Beyond ``limit_s`` it falls to a share of what runs (a cap that nobody touches would take long to bite); in calm
    it rises where it holds somebody back. No limit, no cap.
    """
    if math.isinf(limit_s):
        return ceiling
    if gap_s > limit_s:
        return min(ceiling, max(LOWEST, CUT * min(cap, max(running, LOWEST))))
    if gap_s < CALM * limit_s and running >= cap - 1.0:
        return min(ceiling, cap + RAISE)
    return min(ceiling, cap)
