"""What the in-memory network keeps: streams with their pull consumers, and KV buckets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from services.bus.api import Delivery, KvEntry
from services.bus.waiting import Signal

ACK_WAIT_S: Final = 10.0
"""A delivery not acknowledged for this long comes again."""

DUPLICATE_WINDOW_S: Final = 120.0
"""How long a stream remembers message ids, as a NATS stream does by default."""

KV_HISTORY: Final = 64
"""Revisions a bucket keeps per key, so that a watcher that fell behind still sees each of them."""


def matches(pattern: str, subject: str) -> bool:
    """Whether a subject falls under a pattern with ``*`` (one token) and ``>`` (one or more at the end)."""
    if pattern == subject:
        return True
    wanted, found = pattern.split("."), subject.split(".")
    for i, part in enumerate(wanted):
        if part == ">":
            return len(found) > i
        if i >= len(found) or (part != "*" and part != found[i]):
            return False
    return len(wanted) == len(found)


def is_pattern(key: str) -> bool:
    """Whether a KV key has wildcards."""
    return "*" in key or ">" in key


class Stored(NamedTuple):
    """A message of a stream."""

    sequence: int
    subject: str
    data: bytes
    headers: Mapping[str, str]
    stored_s: float
    stored_ns: int


class Stream:
    """Messages under increasing sequences within limits of age and bytes; the oldest go first."""

    def __init__(self) -> None:
        self.subjects: tuple[str, ...] = ()
        self.messages: deque[Stored] = deque()
        self.last_sequence = 0
        self._bytes = 0
        self._max_age_s = 0.0
        self._max_bytes = 0
        self._ids: dict[str, float] = {}

    def limit(self, subjects: tuple[str, ...], max_age_s: float, max_bytes: int) -> None:
        """Set subjects and limits (0: none) and enforce them on what is stored."""
        self.subjects, self._max_age_s, self._max_bytes = subjects, max_age_s, max_bytes
        self._trim(time.monotonic())

    def store(self, subject: str, data: bytes, headers: Mapping[str, str], message_id: str) -> bool:
        """Store unless the id came within the window; whether it was stored."""
        now_s = time.monotonic()
        for known, at_s in list(self._ids.items()):
            if now_s - at_s < DUPLICATE_WINDOW_S:
                break
            del self._ids[known]
        if message_id in self._ids:
            return False
        self._ids[message_id] = now_s
        self.last_sequence += 1
        self.messages.append(Stored(self.last_sequence, subject, data, headers, now_s, time.time_ns()))
        self._bytes += len(data)
        self._trim(now_s)
        return True

    def at_or_after(self, sequence: int) -> Stored | None:
        """The first stored message from ``sequence`` on."""
        if not self.messages or sequence > self.last_sequence:
            return None
        return self.messages[max(0, sequence - self.messages[0].sequence)]

    def _trim(self, now_s: float) -> None:
        while self.messages and (
            (self._max_bytes > 0 and self._bytes > self._max_bytes)
            or (self._max_age_s > 0 and now_s - self.messages[0].stored_s > self._max_age_s)
        ):
            self._bytes -= len(self.messages.popleft().data)


class MemoryPullConsumer:
    """A pull consumer that starts at ``start_sequence``, whatever an earlier one of its name had done."""

    def __init__(
        self,
        stream: Stream,
        start_sequence: int,
        *,
        changed: Signal,
        available: Callable[[], bool],
        restarts: Callable[[], int],
        ack_wait_s: float,
    ) -> None:
        self._stream = stream
        # A position beyond the end belongs to another stream: everything there is comes, nothing is missed.
        self._next = start_sequence if start_sequence <= stream.last_sequence + 1 else 1
        self._changed = changed
        self._available = available
        self._restarts = restarts
        self._restarts_before = restarts()
        self._ack_wait_s = ack_wait_s
        self._unacked: dict[int, tuple[Stored, int, float]] = {}  # (message, delivered, due_s), oldest first
        self._stopped = False

    @property
    def rebinds(self) -> int:
        return self._restarts() - self._restarts_before

    def _take(self, batch: int, now_s: float) -> list[Delivery]:
        taken: list[tuple[Stored, int]] = []
        for message, delivered, due_s in list(self._unacked.values()):
            if due_s > now_s or len(taken) == batch:
                break
            taken.append((message, delivered + 1))
        while len(taken) < batch and (found := self._stream.at_or_after(self._next)) is not None:
            self._next = found.sequence + 1
            taken.append((found, 1))
        for message, delivered in taken:
            self._unacked.pop(message.sequence, None)
            self._unacked[message.sequence] = (message, delivered, now_s + self._ack_wait_s)
        return [Delivery(m.subject, m.data, m.headers, m.sequence, delivered) for m, delivered in taken]

    async def fetch(self, batch: int, timeout_s: float) -> Sequence[Delivery]:
        end_s = time.monotonic() + timeout_s
        while not self._stopped:
            now_s = time.monotonic()
            if self._available() and (taken := self._take(batch, now_s)):
                return taken
            if now_s >= end_s:
                break
            due_s = next((due_s for _, _, due_s in self._unacked.values()), end_s)
            await self._changed.wait(max(min(end_s, due_s) - now_s, 0.001))
        return []

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            self._unacked.pop(delivery.stream_sequence, None)

    async def stop(self) -> None:
        self._stopped = True
        self._changed.notify()


class Bucket:
    """A KV bucket: one revision counter over all keys and the last revisions of each key."""

    def __init__(self) -> None:
        self._revision = 0
        self._entries: dict[str, deque[KvEntry]] = {}
        self._stored_ns: dict[int, int] = {}

    def put(self, key: str, value: bytes) -> int:
        self._revision += 1
        history = self._entries.setdefault(key, deque(maxlen=KV_HISTORY))
        history.append(KvEntry(key, bytes(value), self._revision))
        self._stored_ns[self._revision] = time.time_ns()
        return self._revision

    def last(self, key: str) -> KvEntry | None:
        history = self._entries.get(key)
        return history[-1] if history else None

    def after(self, key: str, revision: int) -> KvEntry | None:
        """The first kept revision above ``revision`` of a key, or of all keys that match its wildcards."""
        kept = self._entries.get(key, ()) if key in self._entries else self._kept(key)
        return next((e for e in kept if e.revision > revision), None)

    def history(self, pattern: str) -> list[KvEntry]:
        """The kept revisions of the keys that match, in order, with the time of each."""
        return [e._replace(stored_ns=self._stored_ns[e.revision]) for e in self._kept(pattern)]

    def _kept(self, pattern: str) -> list[KvEntry]:
        kept = [e for key, entries in self._entries.items() if matches(pattern, key) for e in entries]
        return sorted(kept, key=lambda e: e.revision)

    def revision_of(self, key: str) -> int:
        """The revision in force; 0 for a key that does not exist."""
        last = self.last(key)
        return last.revision if last else 0
