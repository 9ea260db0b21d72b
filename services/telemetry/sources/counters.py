"""Counters of an engine that restarts: one series that never goes back.

Samples carry cumulative counters so that a lost sample loses no events; an engine that starts again counts from
zero. The sum over its lives is what the node reports. Whether it restarted is told by the marker (the process's
start time, or the time at which a counter was created) where the page has one: then a counter that has already
passed its old value is seen too. Without a marker any counter that went back means a restart of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


class Counters:
    """The counters of one engine by name."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._base: dict[str, float] = {}
        self._marker = float("nan")
        self.restarts = 0
        """Lives of the engine that ended."""

    def take(self, raw: Mapping[str, float], marker: float = float("nan")) -> dict[str, float]:
        """Cumulative values of what the engine says now; NaN and unnamed ones are absent and forget nothing.

        ``marker``: a number that changes with each life of the engine; NaN: unknown.
        """
        known = marker == marker and self._marker == self._marker
        restarted = known and marker != self._marker
        back = {name for name, value in raw.items() if value < self._last.get(name, 0.0)}
        if not known and back:
            restarted = True
        if restarted:
            self.restarts += 1
            back = set(self._last)
        for name in back:
            self._base[name] = self._base.get(name, 0.0) + self._last.get(name, 0.0)
            self._last[name] = 0.0
        if marker == marker:
            self._marker = marker
        for name, value in raw.items():
            if value == value:
                self._last[name] = value
        return {name: self._base.get(name, 0.0) + value for name, value in raw.items() if value == value}


class Joined:
    """One series of each counter from two witnesses, of which either may be away for a while: the preferred one's
    increase where it is known, else the other's. Their own totals differ, so changing from one to the other must not
    look like events, or like a counter that went back."""

    def __init__(self) -> None:
        self._total: dict[str, float] = {}
        self._before: tuple[Mapping[str, float], Mapping[str, float]] = ({}, {})

    def take(self, preferred: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        """Totals of every counter that one of them tells; both are series that never go back (:class:`Counters`)."""
        out = {}
        for name in preferred.keys() | other.keys():
            known = self._total.get(name)
            if known is None:
                known = preferred.get(name, other.get(name, 0.0))
            else:
                by_preferred, by_other = (
                    now.get(name, math.nan) - before.get(name, math.nan)
                    for now, before in zip((preferred, other), self._before, strict=True)
                )
                increase = by_preferred if by_preferred == by_preferred else by_other
                known += max(0.0, increase) if increase == increase else 0.0
            self._total[name] = out[name] = known
        self._before = ({**preferred}, {**other})
        return out
