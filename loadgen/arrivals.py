"""When requests come: renewal processes with a wanted burstiness, and a daily swing.

Pure. Times are seconds from the replay's start, float64, rising. The burstiness is the coefficient of
variation (CV) of the gaps between arrivals: 0 is a metronome, 1 Poisson, Azure's chat 1.1, its code 13.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.requests import F8

GAMMA_CV_MAX: Final = 3.0
"""Up to here gaps are gamma distributed; above, a gamma's shape (1 / CV^2) is so small that nearly all gaps
vanish, which no client does, and on/off bursts take its place."""

BURST_RATE_FACTOR: Final = 8.0
"""Requests inside a burst come at this multiple of the mean rate; the off time follows from the CV."""

DAY_S: Final = 86_400.0


def arrivals(rate_per_s: float, cv: float, duration_s: float, rng: np.random.Generator) -> F8:
    """Arrival times within ``[0, duration_s)`` at ``rate_per_s`` in the mean with gaps of this CV.

    Gamma gaps up to CV 3, two-phase hyperexponential (on/off bursts) above. The first gap is cut at a random
    point, so that a replay does not always start with an arrival. ValueError for a rate or CV that is not
    positive or not finite.
    """
    if not (0 < rate_per_s < float("inf") and 0 < cv < float("inf") and 0 <= duration_s < float("inf")):
        raise ValueError(f"rate {rate_per_s}/s, CV {cv}, duration {duration_s} s: expected finite and positive")
    mean_gap_s = 1.0 / rate_per_s
    chunk = int(rate_per_s * duration_s * 1.1) + 64
    pieces: list[F8] = []
    reached_s = 0.0
    while reached_s < duration_s:
        gaps_s = _gaps(mean_gap_s, cv, chunk, rng)
        if not pieces:
            gaps_s[0] *= rng.random()
        times_s = reached_s + np.cumsum(gaps_s)
        pieces.append(times_s)
        reached_s = float(times_s[-1])
    every_s = np.concatenate(pieces) if pieces else np.empty(0)
    return every_s[every_s < duration_s]


def _gaps(mean_s: float, cv: float, count: int, rng: np.random.Generator) -> F8:
    if cv <= GAMMA_CV_MAX:
        shape = 1.0 / cv**2
        return rng.gamma(shape, mean_s / shape, count)
    short_s, long_s, share_long = burst_phases(mean_s, cv)
    is_long = rng.random(count) < share_long
    return rng.exponential(1.0, count) * np.where(is_long, long_s, short_s)


def burst_phases(mean_s: float, cv: float) -> tuple[float, float, float]:
    """(gap inside a burst, gap between bursts, share of gaps that are between) of on/off arrivals.

    A gap is exponential with mean ``a`` (share 1 - q) or ``b`` (share q). With m the mean gap,
    (1-q) a + q b = m and 2 ((1-q) a^2 + q b^2) = (CV^2 + 1) m^2; ``a`` is m / BURST_RATE_FACTOR.
    """
    a = mean_s / BURST_RATE_FACTOR
    second = (cv**2 + 1.0) / 2.0 * mean_s**2
    # Subtracting a x (first equation) from the second leaves q b (b - a), and from the first q (b - a).
    b = (second - a * mean_s) / (mean_s - a)
    return a, b, (mean_s - a) / (b - a)


def swung(times_s: F8, swing: float, period_s: float = DAY_S) -> F8:
    """The same arrivals with a rate of ``1 + swing x sin(2 pi t / period_s)`` of theirs, still rising.

    Time is warped: an arrival at ``s`` moves to the ``t`` by which the swinging rate has let through what the
    even one had by ``s``, so that burstiness stays and a whole period keeps its count. ``swing`` in [0, 1).
    """
    if not 0 <= swing < 1:
        raise ValueError(f"swing {swing}: expected within [0, 1)")
    if swing == 0 or not len(times_s):
        return times_s
    grid_s = np.linspace(0.0, float(times_s[-1]) + period_s, 20_001)
    omega = 2 * np.pi / period_s
    passed_s = grid_s + swing / omega * (1.0 - np.cos(omega * grid_s))
    return np.interp(times_s, passed_s, grid_s)
