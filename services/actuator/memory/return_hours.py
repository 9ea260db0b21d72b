"""What the hour of the day says about returns, and only where the data shows it. Pure.

A wait that begins in an hour comes back at its kind's rates times the hour's factor. Noise looks like an hour effect
too (few waits; a handful of busy sessions), but it does not repeat: counts are kept apart for odd and even days, what
both have in common is the effect, what they differ by is the noise, and factors are shrunk by the share of the one in
both (1 = no effect). Before every hour that counts was seen on two days there is no effect to speak of.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.return_rates import BINS, add_exposure

F8 = NDArray[np.float64]

HOURS: Final = 24
HOUR_S: Final = 3600.0
_LEAST_EXPECTED: Final = 5.0
"""Returns expected on odd and on even days each, below which an hour says nothing."""
_LEAST_HOURS: Final = 6
_CHANCE: Final = 1.65
"""Correlation over n hours, times sqrt(n), that chance exceeds once in twenty."""
_AGAIN: Final = 0.02
"""Share of new events after which the factors are made anew."""


class HourCounts:
    """Events and exposure of a kind by day parity, hour in which the wait began, and bin."""

    __slots__ = ("_factors", "_made_at", "_total", "events", "seconds")

    def __init__(self) -> None:
        self.events = np.zeros((2, HOURS))
        self.seconds = np.zeros((2, HOURS, BINS))
        self._factors: F8 | None = None
        self._made_at = 0.0
        self._total = 0.0

    def copy(self) -> HourCounts:
        other = HourCounts()
        other.events[:], other.seconds[:], other._total = self.events, self.seconds, self._total
        return other

    def exposed(self, began_s: float, from_s: float, to_s: float) -> None:
        """A wait that began at ``began_s`` seconds after a midnight was away from idle time ``from_s`` to ``to_s``."""
        add_exposure(self.seconds[_place(began_s)], from_s, to_s)

    def returned(self, began_s: float) -> None:
        """It came back."""
        self.events[_place(began_s)] += 1.0
        self._total += 1.0

    def scale(self, share: float) -> None:
        """Forget all but a share of what was counted."""
        self.events *= share
        self.seconds *= share

    @property
    def stale(self) -> bool:
        """Whether enough was seen since the factors were made to make them anew."""
        return self._factors is None or self._total - self._made_at > _AGAIN * self._made_at

    def make(self, rates: F8) -> None:
        """Make the factors from all that was seen beside the ``rates`` of the kind, 1/s, float64 [BINS]."""
        self._factors, self._made_at = factors(self.events, self.seconds @ rates), self._total

    def by_hour(self) -> F8:
        """What the kind's rates are multiplied by in each hour, float64 [24]; as last made."""
        return np.ones(HOURS) if self._factors is None else self._factors

    def factor(self, began_s: float) -> float:
        """The same in a wait that begins then."""
        return float(self.by_hour()[_place(began_s)[1]])


def _place(began_s: float) -> tuple[int, int]:
    hour = int(began_s // HOUR_S)
    return hour // HOURS % 2, hour % HOURS


def factors(events: F8, expected: F8) -> F8:
    """Factors by hour, float64 [24], from returns and those expected, float64 [2, 24] each: odd and even days.

    Both ratios are taken about their own means, since a level is no effect of an hour. Empirical Bayes: their
    covariance over the hours is the variance of the true factors, half the variance of their difference the noise of
    one; their mean keeps tau^2 / (tau^2 + noise / 2) of its distance from 1. A correlation that chance would bring
    in one of twenty days counts as none.
    """
    known = (expected >= _LEAST_EXPECTED).all(axis=0)
    result = np.ones(HOURS)
    if known.sum() < _LEAST_HOURS:
        return result
    ratios = events[:, known] / expected[:, known]
    odd, even = ratios / np.maximum(ratios.mean(axis=1, keepdims=True), 1e-9) - 1.0
    true = float((odd * even).mean())
    noise = float(((odd - even) ** 2).mean()) / 2.0
    if true > _CHANCE / known.sum() ** 0.5 * float(odd.std() * even.std()):
        result[known] += true / (true + noise / 2.0) * (odd + even) / 2.0
    return np.maximum(result, 0.05)
