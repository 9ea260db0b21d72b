"""What the return estimator remembers: counts by bin, a session's history, a wait under way. Pure."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.return_rates import BINS

F8 = NDArray[np.float64]

_TEMPO_EDGES: Final = (4.0, 6.0, 8.0, 12.0, 18.0, 30.0, 60.0, 150.0)
_LAST_EDGES: Final = (5.0, 10.0, 20.0, 60.0, 300.0)
FIRST: Final = -1
"""Context of a session's first wait."""


class Counts:
    """Events and exposure by bin."""

    __slots__ = ("events", "seconds")

    def __init__(self) -> None:
        self.events = np.zeros(BINS)
        self.seconds = np.zeros(BINS)

    def copy(self) -> Counts:
        other = Counts()
        other.events[:], other.seconds[:] = self.events, self.seconds
        return other


class History:
    """What a session did: its counts, its tempo and its last gap."""

    __slots__ = ("counts", "gaps", "last_s", "log_mean")

    def __init__(self) -> None:
        self.counts = Counts()
        self.gaps = 0
        self.last_s = 0.0
        self.log_mean = 0.0

    def context(self) -> int:
        if not self.gaps:
            return FIRST
        tempo = int(np.searchsorted(_TEMPO_EDGES, math.expm1(self.log_mean), side="right"))
        return tempo * (len(_LAST_EDGES) + 1) + int(np.searchsorted(_LAST_EDGES, self.last_s, side="right"))


class Wait:
    """A session between two turns. Its rates are made when they are first asked for, and then stay for the wait:
    most waits end before anybody asks."""

    __slots__ = ("context", "credited_s", "kind", "rates", "since_s")

    def __init__(self, kind: int, context: int, since_s: float) -> None:
        self.kind = kind
        self.context = context
        self.since_s = since_s
        self.credited_s = 0.0
        self.rates: F8 | None = None
