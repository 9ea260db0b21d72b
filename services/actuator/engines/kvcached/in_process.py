"""kvcached's own control call, for a plugin that runs inside the engine's process.

``kvcached.control.set_instance_memory_limit(bytes, revision=)`` splits a limit over all pools and answers what became
of it: the surer way where one is inside. It must not be mixed with the segment: once a limit was written there, every
allocation of kvcached 0.1.6 applies that one again (``resize_target_`` is never cleared), over whatever this call set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from services.errors import DeviceError

STATUSES: Final = ("applied", "deferred", "stale", "conflict", "rejected", "unavailable")


class Answer(NamedTuple):
    """Bytes; ``effective_bytes`` is the limit rounded down to whole pages, over all pools."""

    status: str
    effective_bytes: int
    mapped_bytes: int
    revision: int
    why: str = ""

    @property
    def in_force(self) -> bool:
        """A deferred limit is taken, and kept for when use has fallen."""
        return self.status in ("applied", "deferred")

    @property
    def excess_bytes(self) -> int:
        return max(0, self.mapped_bytes - self.effective_bytes) if self.in_force else 0


class Revisions:
    """One owner's revisions: each call has a greater one than any before, and a repeat of the same limit keeps its."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._limit_bytes: int | None = None

    def of(self, limit_bytes: int) -> int:
        if limit_bytes != self._limit_bytes:
            self._limit_bytes = limit_bytes
            self._next += 1
        return self._next - 1

    def overtake(self, revision: int) -> None:
        """Another owner is ahead (``stale``): go past it, once."""
        self._next = max(self._next, revision + 1)
        self._limit_bytes = None


def set_limit(
    control: Callable[..., Mapping[str, Any]], revisions: Revisions, limit_bytes: int, *, takeover: bool = False
) -> Answer:
    """Set it through ``control`` (the function named above).

    ``stale`` and ``conflict`` mean that another owner sets limits too: they are answered as they are, and only
    ``takeover`` (at the start, after a restart of the owner) goes past its revision, once. DeviceError
    ``kvcached_answer`` for an answer that cannot be understood.
    """
    answer = _asked(control, limit_bytes, revisions.of(limit_bytes))
    if answer.status in ("stale", "conflict") and takeover:
        revisions.overtake(answer.revision)
        answer = _asked(control, limit_bytes, revisions.of(limit_bytes))
    return answer


def _asked(control: Callable[..., Mapping[str, Any]], limit_bytes: int, revision: int) -> Answer:
    said = control(limit_bytes, revision=revision)
    status = said.get("status")
    if status not in STATUSES:
        raise DeviceError("kvcached_answer", f"status {status!r}, expected one of {', '.join(STATUSES)}")
    try:
        # A stale answer repeats the asked revision at its top; each pool tells the one it stands at.
        ahead = max((int(pool["revision"]) for pool in said.get("pools", ())), default=int(said["revision"]))
        return Answer(
            status, int(said["effective_limit_bytes"]), int(said["mapped_bytes"]), ahead, str(said.get("reason", ""))
        )
    except (KeyError, TypeError, ValueError) as error:
        raise DeviceError("kvcached_answer", f"{type(error).__name__} {error} in {said!r}") from error
