"""The in-memory bus: the same contract as NATS within one process and event loop, for tests and tools."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Final

from services.bus.api import PENDING_LIMIT_MESSAGES, Delivery, KvEntry, Message
from services.bus.mailbox import Mailbox
from services.bus.memory_store import ACK_WAIT_S, Bucket, MemoryPullConsumer, Stream, is_pattern, matches
from services.bus.waiting import Signal
from services.errors import BusUnavailable, Conflict

COUNTERS: Final = (
    "dropped",
    "publish_dropped",
    "callback_errors",
    "stream_failures",
    "reconnects",
    "rebinds",
)


class MemorySubscription:
    """A subscription of a :class:`MemoryBus`."""

    def __init__(self, network: MemoryNetwork, subject: str, queue: str, mailbox: Mailbox) -> None:
        self.subject = subject
        self.queue = queue
        self.mailbox = mailbox
        self._network = network

    @property
    def dropped(self) -> int:
        return self.mailbox.dropped

    async def unsubscribe(self) -> None:
        self._network.remove(self)
        await self.mailbox.close()


class MemoryNetwork:
    """What a server is to NATS: subscriptions, streams, KV buckets and objects shared by buses.

    :meth:`pause` makes every bus disconnected (publishes are dropped and counted, requests raise
    BusUnavailable, fetches stay empty) and :meth:`resume` brings them back with everything stored still
    there, as a server that was killed and restarted. ``ack_wait_s``: after which a delivery without an
    acknowledgement comes again.
    """

    def __init__(self, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        self.ack_wait_s = ack_wait_s
        self.up = True
        self.restarts = 0
        self.changed = Signal()
        self.streams: dict[str, Stream] = {}
        self.buckets: dict[str, Bucket] = {}
        self.objects: dict[tuple[str, str], bytes] = {}
        self._subscriptions: list[MemorySubscription] = []
        self._routes: dict[str, tuple[list[MemorySubscription], dict[str, list[MemorySubscription]]]] = {}
        self._turn = 0

    def pause(self) -> None:
        """Go away for all buses."""
        self.up = False

    def resume(self) -> None:
        """Come back with all that was stored."""
        if not self.up:
            self.up = True
            self.restarts += 1
            self.changed.notify()

    def add(self, subscription: MemorySubscription) -> None:
        self._subscriptions.append(subscription)
        self._routes.clear()

    def remove(self, subscription: MemorySubscription) -> None:
        if subscription in self._subscriptions:
            self._subscriptions.remove(subscription)
            self._routes.clear()

    def route(self, message: Message) -> None:
        """Hand to every plain subscription that matches and to one member of every queue group in turn."""
        route = self._routes.get(message.subject)
        if route is None:
            plain: list[MemorySubscription] = []
            groups: dict[str, list[MemorySubscription]] = {}
            for subscription in self._subscriptions:
                if matches(subscription.subject, message.subject):
                    members = groups.setdefault(subscription.queue, []) if subscription.queue else plain
                    members.append(subscription)
            route = self._routes[message.subject] = (plain, groups)
        for subscription in route[0]:
            subscription.mailbox.push(message)
        for members in route[1].values():
            self._turn += 1
            members[self._turn % len(members)].mailbox.push(message)

    def stream_of(self, subject: str) -> Stream | None:
        """The stream that stores a subject, if any."""
        return next((s for s in self.streams.values() if any(matches(p, subject) for p in s.subjects)), None)

    def bucket(self, name: str) -> Bucket:
        return self.buckets.setdefault(name, Bucket())


class MemoryBus:
    """A :class:`services.bus.api.Bus` on a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork) -> None:
        self._network = network
        self._restarts_before = network.restarts
        self._closed = False
        self._mailboxes: list[Mailbox] = []
        self._subscriptions: list[MemorySubscription] = []
        self._consumers: list[MemoryPullConsumer] = []
        self._publish_dropped = 0
        self._stream_failures = 0

    @property
    def connected(self) -> bool:
        return self._network.up and not self._closed

    def _require(self) -> MemoryNetwork:
        if not self.connected:
            raise BusUnavailable("the in-memory network is paused or this bus was drained")
        return self._network

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        if self.connected:
            self._network.route(Message(subject, data, headers))
        else:
            self._publish_dropped += 1

    async def subscribe(
        self,
        subject: str,
        on_batch: Callable[[list[Message]], Awaitable[None]],
        *,
        queue: str = "",
        pending_limit_messages: int = PENDING_LIMIT_MESSAGES,
    ) -> MemorySubscription:
        if self._closed:
            raise BusUnavailable("this bus was drained")
        mailbox = Mailbox(on_batch, limit_messages=pending_limit_messages)
        mailbox.start()
        subscription = MemorySubscription(self._network, subject, queue, mailbox)
        self._mailboxes.append(mailbox)
        self._subscriptions.append(subscription)
        self._network.add(subscription)
        return subscription

    async def ensure_stream(self, name: str, subjects: Sequence[str], *, max_age_s: float, max_bytes: int) -> None:
        network = self._require()
        stream = network.streams.setdefault(name, Stream())
        stream.limit(tuple(subjects), max_age_s, max_bytes)

    async def publish_stream(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        stream = self._network.stream_of(subject) if self.connected else None
        if stream is None:
            self._stream_failures += 1
            return
        sent = {**(headers or {}), "Nats-Msg-Id": message_id}
        self._network.route(Message(subject, data, sent))
        if stream.store(subject, data, sent, message_id):
            self._network.changed.notify()

    async def flush_stream(self, timeout_s: float) -> None:
        """Nothing is ever under way here: a stream stores while it is handed the message."""

    async def pull_consumer(self, stream: str, durable: str, *, start_sequence: int = 1) -> MemoryPullConsumer:
        network = self._require()
        if stream not in network.streams:
            raise BusUnavailable(f"no stream {stream}: ensure_stream must come first")
        consumer = MemoryPullConsumer(
            network.streams[stream],
            start_sequence,
            changed=network.changed,
            available=lambda: self.connected,
            restarts=lambda: network.restarts,
            ack_wait_s=network.ack_wait_s,
        )
        self._consumers.append(consumer)
        return consumer

    async def stream_read(
        self, stream: str, subject: str, *, start_sequence: int = 1, since_ns: int = 0, follow: bool = False
    ) -> AsyncIterator[Delivery]:
        network = self._require()
        if stream not in network.streams:
            raise BusUnavailable(f"no stream {stream}")
        held, place = network.streams[stream], start_sequence
        last = held.last_sequence
        while not self._closed:
            found = held.at_or_after(place)
            if found is None or (found.sequence > last and not follow):
                if not follow:
                    return
                await network.changed.wait()
                continue
            place = found.sequence + 1
            if matches(subject, found.subject) and found.stored_ns >= since_ns:
                yield Delivery(found.subject, found.data, found.headers, found.sequence, 1, found.stored_ns)

    async def stream_span(self, stream: str) -> tuple[int, int] | None:
        held = self._require().streams.get(stream)
        if held is None:
            return None
        return (held.messages[0].sequence if held.messages else held.last_sequence + 1), held.last_sequence

    async def kv_put(self, bucket: str, key: str, value: bytes, *, revision: int | None = None) -> int:
        network = self._require()
        held = network.bucket(bucket)
        if revision is not None and held.revision_of(key) != revision:
            raise Conflict(bucket, key, revision)
        new = held.put(key, value)
        network.changed.notify()
        return new

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        return self._require().bucket(bucket).last(key)

    async def kv_watch(self, bucket: str, key: str) -> AsyncIterator[KvEntry]:
        network = self._network
        seen: int | None = None
        while not self._closed:
            entry: KvEntry | None = None
            if network.up:
                held = network.bucket(bucket)
                entry = held.last(key) if seen is None and not is_pattern(key) else held.after(key, seen or 0)
                seen = seen or 0
            if entry is not None:
                seen = entry.revision
                yield entry
            else:
                await network.changed.wait()

    async def kv_history(self, bucket: str, key: str = ">") -> Sequence[KvEntry]:
        return self._require().bucket(bucket).history(key)

    async def object_put(self, bucket: str, name: str, data: bytes) -> None:
        self._require().objects[bucket, name] = bytes(data)

    async def object_get(self, bucket: str, name: str) -> bytes | None:
        return self._require().objects.get((bucket, name))

    def counters(self) -> Mapping[str, int]:
        values = (
            sum(mailbox.dropped for mailbox in self._mailboxes),
            self._publish_dropped,
            sum(mailbox.errors for mailbox in self._mailboxes),
            self._stream_failures,
            self._network.restarts - self._restarts_before,
            sum(consumer.rebinds for consumer in self._consumers),
        )
        return dict(zip(COUNTERS, values, strict=True))

    async def drain(self, timeout_s: float = 5.0) -> None:
        for subscription in self._subscriptions:
            self._network.remove(subscription)
        for mailbox in self._mailboxes:
            await mailbox.close(timeout_s)
        self._closed = True
        self._network.changed.notify()
