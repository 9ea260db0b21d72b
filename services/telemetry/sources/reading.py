"""What every source gives: a step's numbers of one node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol


class Reading(NamedTuple):
    """A step of one node as its source saw it; not yet in any boot."""

    node: str
    step: int
    t_ns: int
    """Node clock."""
    workers: tuple[str, ...]
    cards: tuple[int, ...]
    classes: tuple[int, ...]
    metrics: bytes
    """float64 [workers, len(METRICS)], little-endian; NaN = missing."""
    waited_s: float = 0.0
    """How long the source waited for it, seconds."""
    ages_s: tuple[float, ...] = ()
    """How old each worker's numbers are at ``t_ns``, seconds; empty: of that moment. NaN: there are none."""
    flags: tuple[tuple[int, str, str], ...] = ()
    """(row, metric, why) of what was said and not believed, or had to be assumed."""


class Source(Protocol):
    """Readings of one or several nodes, for ever; a source that fails tries again and reports it."""

    name: str

    def readings(self) -> AsyncIterator[Reading]: ...
