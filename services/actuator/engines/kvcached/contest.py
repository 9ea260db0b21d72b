"""Whose limit is it: changes by others, restarts, and whether a raise was taken. Pure."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from services.kvsegment import Usage


class ContestRule(NamedTuple):
    """``changes`` by somebody else within ``window_s`` make a contest: twice may be an operator, three times is a
    program."""

    changes: int = 3
    window_s: float = 60.0


class Foreign(NamedTuple):
    """A limit found that this owner did not write."""

    t_ns: int
    wanted_bytes: int
    found_bytes: int


class Contest:
    """Counts foreign changes. Once contested it stays so, until the engine restarts or an operator says otherwise:
    a controller that resumes by itself begins the same fight again."""

    def __init__(self, rule: ContestRule = ContestRule()) -> None:  # noqa: B008 - immutable
        self._rule = rule
        self._seen: deque[Foreign] = deque(maxlen=max(rule.changes, 1))
        self.contested = False
        self.seen = 0
        """Foreign changes so far, forgotten ones included."""

    def note(self, foreign: Foreign) -> None:
        self._seen.append(foreign)
        self.seen += 1
        first = self._seen[0]
        if len(self._seen) >= self._rule.changes and foreign.t_ns - first.t_ns <= self._rule.window_s * 1e9:
            self.contested = True

    def forget(self) -> None:
        self._seen.clear()
        self.contested = False

    def story(self) -> str:
        """What happened, in words for a log or an outcome."""
        if not self._seen:
            return "no change by others"
        last = self._seen[-1]
        found = ", ".join(sorted({str(one.found_bytes) for one in self._seen}))
        return (
            f"{len(self._seen)} changes by others in {(last.t_ns - self._seen[0].t_ns) / 1e9:.1f} s, "
            f"to {found} bytes where {last.wanted_bytes} was written"
        )


GROWTH_PATIENCE_S: Final = 4.0
"""Two steps. kvcached looks at the segment every 0.1 s and takes a limit at its next allocation."""


class Growth(NamedTuple):
    """A raise that was written and read back, and is not yet seen in use."""

    from_bytes: int
    to_bytes: int
    t_ns: int

    def judge(self, usage: Usage, waiting: int, now_ns: int) -> str:
        """``taken``: use went above the former limit. ``not_taken``: requests wait, time passed, and it did not: the
        engine does not follow, or its pool is as large as it gets. ``pending`` otherwise: nobody needed it yet."""
        if usage.mapped_bytes > self.from_bytes:
            return "taken"
        if waiting > 0 and now_ns - self.t_ns > GROWTH_PATIENCE_S * 1e9:
            return "not_taken"
        return "pending"
