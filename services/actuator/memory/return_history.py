"""What the return estimator remembers: counts by bin, a session's history, a wait under way. Pure."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.endings import Ending
from services.actuator.memory.return_rates import BINS, HORIZON_S, add_exposure, bin_of

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
    """What a session did: its counts by ending, its tempo and its last gap."""

    __slots__ = ("counts", "gaps", "last_s", "log_mean")

    def __init__(self) -> None:
        self.counts: dict[Ending, Counts] = {}
        self.gaps = 0
        self.last_s = 0.0
        self.log_mean = 0.0

    def own(self, ending: Ending) -> Counts | None:
        """Its counts after such endings; after UNKNOWN those of all. None where it has none."""
        if ending is not Ending.UNKNOWN or not self.counts:
            return self.counts.get(ending)
        total = Counts()
        for counts in self.counts.values():
            total.events += counts.events
            total.seconds += counts.seconds
        return total

    def add(self, gap_s: float, ending: Ending, tempo_memory: float, session_memory: float) -> None:
        """It came back ``gap_s`` seconds after a turn that ended so; beyond the horizon only the tempo shows it."""
        if gap_s <= HORIZON_S:
            counts = self.counts.setdefault(ending, Counts())
            counts.events *= session_memory
            counts.seconds *= session_memory
            add_exposure(counts.seconds, 0.0, gap_s)
            counts.events[bin_of(gap_s)] += 1.0
        keep = tempo_memory if self.gaps else 0.0
        self.log_mean = keep * self.log_mean + (1.0 - keep) * math.log1p(gap_s)
        self.last_s = gap_s
        self.gaps += 1

    def context(self) -> int:
        if not self.gaps:
            return FIRST
        tempo = int(np.searchsorted(_TEMPO_EDGES, math.expm1(self.log_mean), side="right"))
        return tempo * (len(_LAST_EDGES) + 1) + int(np.searchsorted(_LAST_EDGES, self.last_s, side="right"))


class Wait:
    """A session between two turns. Its rates are made when they are first asked for, and then stay for the wait:
    most waits end before anybody asks."""

    __slots__ = ("context", "credited_s", "ending", "kind", "rates", "since_s")

    def __init__(self, kind: int, context: int, since_s: float, ending: Ending = Ending.UNKNOWN) -> None:
        self.kind = kind
        self.ending = ending
        self.context = context
        self.since_s = since_s
        self.credited_s = 0.0
        self.rates: F8 | None = None
