"""What a bus can do. Payloads are bytes: typed codecs live in ``schemas``, next to their messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

PENDING_LIMIT_MESSAGES = 65_536
"""Messages a subscription may hold before it drops; what it drops is counted and never silent."""

PENDING_LIMIT_BYTES = 512 * 1024 * 1024


class Message(NamedTuple):
    """One message as it came."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None


class Delivery(NamedTuple):
    """One message of a pull consumer."""

    subject: str
    data: bytes
    headers: Mapping[str, str] | None
    stream_sequence: int
    delivered: int
    """1 the first time; more after a redelivery."""
    stored_ns: int = 0
    """When the stream took it, wall clock of the server; 0 where the reader does not ask."""


class KvEntry(NamedTuple):
    """A value of a KV bucket; ``value`` is None when the key was deleted."""

    key: str
    value: bytes | None
    revision: int
    stored_ns: int = 0
    """When it was written, wall clock of the server; only in a history."""


class Subscription(Protocol):
    """A live subscription. ``dropped`` counts messages lost to the pending limit since it began."""

    @property
    def dropped(self) -> int: ...

    async def unsubscribe(self) -> None: ...


class PullConsumer(Protocol):
    """A durable consumer of a stream that survives the server's restart by binding itself anew."""

    async def fetch(self, batch: int, timeout_s: float) -> Sequence[Delivery]:
        """Up to ``batch`` messages, an empty sequence when none came in ``timeout_s``; never raises for an
        interrupted connection."""
        ...

    async def ack(self, deliveries: Sequence[Delivery]) -> None: ...

    @property
    def rebinds(self) -> int: ...

    async def stop(self) -> None: ...


class Bus(Protocol):
    """Core publish/subscribe, streams, KV and objects.

    ``on_batch`` callbacks get every message that arrived since the last event-loop turn, in order and
    possibly from several nodes: the subscription's own callback only appends. An exception in ``on_batch``
    is counted (``callback_errors``) and logged with its trace; the subscription lives on.
    """

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        """Fire and forget; while disconnected, messages are dropped and counted, not queued: the newest wins."""
        ...

    async def subscribe(
        self,
        subject: str,
        on_batch: Callable[[list[Message]], Awaitable[None]],
        *,
        queue: str = "",
        pending_limit_messages: int = PENDING_LIMIT_MESSAGES,
    ) -> Subscription: ...

    async def ensure_stream(self, name: str, subjects: Sequence[str], *, max_age_s: float, max_bytes: int) -> None:
        """Create the stream or bring its limits to these."""
        ...

    async def publish_stream(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        """Hand to a stream without waiting for the acknowledgement; one that fails is counted in
        ``stream_failures``. A repeat of ``message_id`` within the stream's window is stored once."""
        ...

    async def flush_stream(self, timeout_s: float) -> None:
        """Wait until all handed messages are acknowledged or counted as failed."""
        ...

    async def pull_consumer(self, stream: str, durable: str, *, start_sequence: int = 1) -> PullConsumer:
        """Bind a durable consumer, deleting and making it anew when it does not start at ``start_sequence``:
        what the caller's checkpoint says wins over what the server remembers."""
        ...

    def stream_read(
        self, stream: str, subject: str, *, start_sequence: int = 1, since_ns: int = 0, follow: bool = False
    ) -> AsyncIterator[Delivery]:
        """What a stream holds of the subjects that match ``subject``, in order, from ``start_sequence`` or, when
        given, from the wall clock ``since_ns`` on; then the iterator ends or, with ``follow``, waits for more.
        Leaves no consumer behind; BusError when the stream is not there, BusUnavailable when the connection is lost."""
        ...

    async def stream_span(self, stream: str) -> tuple[int, int] | None:
        """First and last sequence that a stream holds; None when there is no such stream."""
        ...

    async def kv_put(self, bucket: str, key: str, value: bytes, *, revision: int | None = None) -> int:
        """Put and give the new revision; with ``revision``, only if the entry still has it (0: must not
        exist), else Conflict."""
        ...

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None: ...

    def kv_watch(self, bucket: str, key: str) -> AsyncIterator[KvEntry]:
        """The entry as it is (if any), then every change, each revision once and in order; a slow poll beside
        the server's watch makes a change visible within 3 s of the server's return. A ``key`` with wildcards
        (``>``) begins with all kept revisions of all keys that match."""
        ...

    async def kv_history(self, bucket: str, key: str = ">") -> Sequence[KvEntry]:
        """The kept revisions of the keys that match, in order."""
        ...

    async def object_put(self, bucket: str, name: str, data: bytes) -> None: ...

    async def object_get(self, bucket: str, name: str) -> bytes | None: ...

    def counters(self) -> Mapping[str, int]:
        """``dropped``, ``publish_dropped``, ``callback_errors``, ``stream_failures``, ``reconnects``,
        ``rebinds``: since the bus began."""
        ...

    @property
    def connected(self) -> bool: ...

    async def drain(self, timeout_s: float = 5.0) -> None:
        """Stop taking messages, finish the callbacks, flush what is to be sent, close."""
        ...
