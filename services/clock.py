"""Clocks as arguments: a service never asks the time of anything but the clock it was given."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Nanoseconds that never go backwards."""

    def now_ns(self) -> int: ...


class MonotonicClock:
    """This machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()


class ManualClock:
    """A clock that stands still until it is moved: for tests and for a simulated node."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_to(self, t_ns: int) -> None:
        """Move forward; an earlier time than now is ignored, since late news must not turn time back."""
        self._now_ns = max(self._now_ns, t_ns)
