"""The limit of one kvcached engine under one owner: set, observed, contested, lost and found again."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from services.actuator.engines.kvcached.contest import Contest, ContestRule, Foreign, Growth
from services.actuator.engines.kvcached.segment import Owner, holders, write_limit
from services.clock import Clock
from services.errors import SegmentError
from services.kvsegment import Usage, read_usage


class Set(NamedTuple):
    """A limit that is written and was read back. kvcached follows at its next allocation: ``usage.excess_bytes``
    tells what it will not give back by itself."""

    revision: int
    usage: Usage
    raised: bool


class Limits:
    """Writes one segment's limit. Nothing is opened before ``begin``.

    Every method raises SegmentError. What an engine writes at its own start (its whole pool, nothing in use) is a
    restart and not a contest: the limit is simply set again with the next command.
    """

    def __init__(self, path: Path, clock: Clock, rule: ContestRule = ContestRule()) -> None:  # noqa: B008
        self.path = path
        self.owner = Owner(path)
        self.contest = Contest(rule)
        self.restarts = 0
        self._clock = clock
        self._wanted = 0
        """The last limit written here; 0: none since the engine's (re)start."""
        self._last: Usage | None = None
        self.growth: Growth | None = None

    def begin(self) -> Usage:
        """Become the owner and look. The segment may be away: then it is ``vanished``, and this one owns its name."""
        self.owner.take()
        return self.observe()

    def end(self) -> None:
        self.owner.release()

    @property
    def last(self) -> Usage | None:
        """What was read last; None before the first and after the segment was lost."""
        return self._last

    def observe(self) -> Usage:
        """Read, and notice who changed what since."""
        try:
            usage = read_usage(self.path)
        except SegmentError as error:
            if error.reason != "busy":
                self._last = None
                self.growth = None
            raise
        before, self._last = self._last, usage
        if usage.identity != self.owner.identity:
            self._started(usage)
        elif before is None:
            return usage  # the same segment again, or its first sight by a new owner
        elif self._is_restart(before, usage):
            self._started(usage)
        elif self._wanted and usage.limit_bytes not in (self._wanted, before.limit_bytes):
            self._foreign(before, usage)
        return usage

    def set(self, limit_bytes: int) -> Set:
        """Put a limit in force, at most the engine's whole pool; a repeat writes nothing.

        Refused while contested (``contested``), and ``changed`` when another one wrote between looking and writing.
        The revision grows with each write and across restarts.
        """
        if not self.owner.taken:
            raise SegmentError(str(self.path), "owned", "its limit is not this process's to write")
        usage = self.observe()
        if self.contest.contested:
            raise SegmentError(str(self.path), "contested", self._who())
        # kvcached 0.1.6 checks no upper bound here: beyond its pool it would hand out pages it has no addresses for.
        limit_bytes = min(limit_bytes, self.owner.pool_bytes) if self.owner.pool_bytes else limit_bytes
        if usage.limit_bytes == limit_bytes:
            self._wanted = limit_bytes
            return Set(self.owner.revision, usage, False)
        revision = self.owner.next_revision(limit_bytes)
        written = write_limit(self.path, limit_bytes, usage.limit_bytes)
        self._wanted = limit_bytes
        self._last = written.after
        raised = limit_bytes > written.before.limit_bytes
        # Raise upon raise is one growth: each step has its own small one, and none would ever be old enough to judge.
        if self.growth is not None:
            grows = limit_bytes > self.growth.from_bytes
            self.growth = self.growth._replace(to_bytes=limit_bytes) if grows else None
        elif raised:
            self.growth = Growth(written.before.limit_bytes, limit_bytes, self._clock.now_ns())
        return Set(revision, written.after, raised)

    def verify_growth(self, waiting: int) -> str:
        """``none``, ``pending``, ``taken`` or ``not_taken`` of the latest raise (see ``Growth.judge``)."""
        if self.growth is None or self._last is None:
            return "none"
        said = self.growth.judge(self._last, waiting, self._clock.now_ns())
        if said == "taken":
            self.growth = None
        return said

    @staticmethod
    def _is_restart(before: Usage, usage: Usage) -> bool:
        """An engine that begins anew on a segment that a killed one left writes its pool, and no use."""
        return before.mapped_bytes > 0 and not usage.mapped_bytes and usage.limit_bytes != before.limit_bytes

    def _foreign(self, before: Usage, usage: Usage) -> None:
        self.contest.note(Foreign(self._clock.now_ns(), self._wanted, usage.limit_bytes))
        self.growth = None
        if not before.mapped_bytes and 0 < usage.limit_bytes < self.owner.pool_bytes:
            # An idle engine's restart with a smaller pool looks the same: no more than that until the next start.
            self.owner.pool(usage.limit_bytes, usage.identity)

    def _started(self, usage: Usage) -> None:
        if self._wanted:
            self.restarts += 1
        self._wanted = 0
        self.growth = None
        self.contest.forget()
        # Limit 0: the file was removed under a living engine, and its next report of use made it anew.
        self.owner.pool(usage.limit_bytes or self.owner.pool_bytes, usage.identity)

    def _who(self) -> str:
        seen = "; ".join(holders(self.path)) or "none seen"
        return f"{self.contest.story()}; no more is written; processes that have it open: {seen}"
