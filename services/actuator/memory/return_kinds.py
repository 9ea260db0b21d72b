"""What the return estimator knows of kinds of sessions: rates from the general to the particular. Pure.

A kind as a whole leans on a flat guess; the kind after one ending of its turns (``schemas.endings``) on the kind; and
that at one tempo (``History.context``) on it. After a turn of which nobody says how it ended, the kind and its tempo
are asked over all endings: what is missing is not an ending of its own, so a source that never says is none the worse.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from schemas.endings import Ending
from services.actuator.memory import return_rates as rates_of
from services.actuator.memory.return_history import Counts, Wait
from services.actuator.memory.return_hours import HourCounts

F8 = NDArray[np.float64]

ALL: Final = Ending.UNKNOWN
"""Counts over all endings, the unknown ones among them."""


class Kinds:
    """Events and exposure by kind, ending, tempo and hour."""

    def __init__(self) -> None:
        self._endings: dict[tuple[int, Ending], Counts] = {}
        self._contexts: dict[tuple[int, Ending, int], Counts] = {}
        self.hours: dict[int, HourCounts] = {}

    def copy(self) -> Kinds:
        other = Kinds()
        other._endings = {place: counts.copy() for place, counts in self._endings.items()}
        other._contexts = {place: counts.copy() for place, counts in self._contexts.items()}
        other.hours = {kind: hours.copy() for kind, hours in self.hours.items()}
        return other

    def count(self, wait: Wait, before_s: float, idle_s: float, event: bool) -> float:
        """Count that the wait went on from idle time ``before_s`` to ``idle_s``, and with ``event`` the return that
        ended it; the kind's returns so far."""
        for ending in {ALL, wait.ending}:
            for counts in (
                self._endings.setdefault((wait.kind, ending), Counts()),
                self._contexts.setdefault((wait.kind, ending, wait.context), Counts()),
            ):
                if idle_s > before_s:
                    rates_of.add_exposure(counts.seconds, before_s, idle_s)
                if event:
                    counts.events[rates_of.bin_of(idle_s)] += 1.0
        return float(self._endings[wait.kind, ALL].events.sum())

    def count_hour(self, kind: int, began_s: float, before_s: float, idle_s: float, event: bool) -> None:
        """The same for the hour of the day in which a wait began, seconds after a midnight."""
        hours = self.hours.setdefault(kind, HourCounts())
        if idle_s > before_s:
            hours.exposed(began_s, before_s, idle_s)
        if event:
            hours.returned(began_s)

    def halve(self, kind: int) -> None:
        """Forget half of what was counted of a kind."""
        found = [counts for place, counts in self._endings.items() if place[0] == kind]
        found += [counts for place, counts in self._contexts.items() if place[0] == kind]
        for counts in found:
            counts.events *= 0.5
            counts.seconds *= 0.5
        if (hours := self.hours.get(kind)) is not None:
            hours.scale(0.5)

    def rates(self, kind: int, ending: Ending, flat: F8, flat_strength: float, strength: float) -> F8:
        """Rates of return of a kind after an ending, whatever the session's tempo, 1/s, float64 [BINS]."""
        rates = _leaning(self._endings.get((kind, ALL)), flat, flat_strength)
        return rates if ending is ALL else _leaning(self._endings.get((kind, ending)), rates, strength)

    def at_tempo(self, wait: Wait, rates: F8, strength: float) -> F8:
        """The wait's kind and ending at its tempo, where those are ``rates`` at any, 1/s, float64 [BINS]."""
        return _leaning(self._contexts.get((wait.kind, wait.ending, wait.context)), rates, strength)


def _leaning(counts: Counts | None, parent: F8, strength: float) -> F8:
    if counts is None:
        return parent
    return rates_of.shrunk(counts.events, counts.seconds, parent, strength)
