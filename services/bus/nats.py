"""The bus on NATS: nats-py behind a thin layer that never waits on the hot path and counts what is lost.

What is lost, and where it is counted: a message published while disconnected or while the socket takes no
more (``publish_dropped``); a message beyond a subscription's pending limit (``dropped``); a stream message
that was refused or lost its acknowledgement (``stream_failures``). What a dying server had accepted and not
yet delivered is lost without a count: core NATS promises at most once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription as ClientSubscription
from nats.js.api import StorageType, StreamConfig
from nats.js.errors import APIError

from services.bus.api import PENDING_LIMIT_MESSAGES, Delivery, KvEntry, Message
from services.bus.mailbox import Mailbox
from services.bus.nats_consumer import NatsPullConsumer
from services.bus.nats_publisher import StreamPublisher
from services.bus.nats_reader import read, span
from services.bus.nats_store import NatsStore
from services.bus.nats_wire import Wire
from services.errors import BusError, BusUnavailable, UserError

logger = logging.getLogger(__name__)

FIRST_CONNECT_LIMIT_S: Final = 10.0
RECONNECT_WAIT_S: Final = 0.1
PING_INTERVAL_S: Final = 5
"""Two pings without an answer make the connection stale, so a server that hangs is left after 10 to 15 s."""

SEND_LIMIT_BYTES: Final = 32 * 1024 * 1024
"""Bytes that wait for the socket; beyond it messages are dropped, since late ones are useless."""

YIELD_AT_BYTES: Final = 4 * 1024 * 1024
"""Bytes that wait for the socket from which a publisher lets the event loop turn, so that a burst larger than
the socket's buffer is sent and not dropped."""

ACK_WAIT_S: Final = 10.0
DUPLICATE_WINDOW_S: Final = 120.0
STREAM_NAME_IN_USE: Final = 10058


@contextmanager
def _translated(doing: str) -> Iterator[None]:
    """nats-py's errors as ours; a missing answer or connection is BusUnavailable."""
    try:
        yield
    except (TimeoutError, OSError, nats.errors.NoRespondersError) as error:
        reason = f" ({error})" if str(error) else ""  # a time that ran out says nothing of itself
        raise BusUnavailable(f"{doing}: no answer{reason}") from error
    except APIError as error:
        kind = BusUnavailable if error.code == 503 else BusError
        raise kind(f"{doing}: {error}") from error
    except nats.errors.Error as error:
        raise BusUnavailable(f"{doing}: {error}") from error


class NatsSubscription:
    """A subscription of a :class:`NatsBus`."""

    def __init__(self, mailbox: Mailbox, wire: Wire) -> None:
        self.mailbox = mailbox
        self._wire = wire
        self.client_subscription: ClientSubscription | None = None

    @property
    def dropped(self) -> int:
        return self.mailbox.dropped

    async def stop(self, timeout_s: float) -> None:
        """No more messages; the callback finishes what is held within ``timeout_s``."""
        subscription = self.client_subscription
        if subscription is not None:
            try:
                await (subscription.drain() if timeout_s > 0 else subscription.unsubscribe())  # type: ignore[no-untyped-call]
            except (nats.errors.Error, OSError) as error:
                logger.debug("leaving %s: %s", subscription.subject, error)
            self._wire.forget(subscription)
        await self.mailbox.close(timeout_s)

    async def unsubscribe(self) -> None:
        await self.stop(0.0)


class NatsBus:
    """A :class:`services.bus.api.Bus` on a connected nats-py client; made by :func:`connect`."""

    def __init__(self, client: Client, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        self._client = client
        self._wire = Wire(client)
        self._context = client.jetstream()
        self._publisher = StreamPublisher(client, self._wire)
        self._store = NatsStore(self._context, client)
        self._ack_wait_s = ack_wait_s
        self._subscriptions: list[NatsSubscription] = []
        self._consumers: list[NatsPullConsumer] = []
        self._publish_dropped = 0

    @property
    def client(self) -> Client:
        """The nats-py client, for its micro module."""
        return self._client

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    async def publish(self, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        client = self._client
        if not client.is_connected or client.is_draining or self._wire.waiting_bytes > SEND_LIMIT_BYTES:
            self._publish_dropped += 1
            return
        if len(data) > client.max_payload:
            raise BusError(f"{subject}: {len(data)} bytes, the server takes {client.max_payload}")
        self._wire.publish(subject, data, headers=headers)
        if self._wire.waiting_bytes > YIELD_AT_BYTES:
            await asyncio.sleep(0)

    async def subscribe(
        self,
        subject: str,
        on_batch: Callable[[list[Message]], Awaitable[None]],
        *,
        queue: str = "",
        pending_limit_messages: int = PENDING_LIMIT_MESSAGES,
    ) -> NatsSubscription:
        mailbox = Mailbox(
            on_batch,
            limit_messages=pending_limit_messages,
            after_batch=self._wire.flush,  # what a batch was answered with need not wait for the turn's end
        )
        push = mailbox.push

        def file(subject: str, data: bytes, _: str, headers: Mapping[str, str] | None) -> None:
            push(Message(subject, data, headers))

        subscription = NatsSubscription(mailbox, self._wire)
        with _translated(f"subscribing to {subject}"):
            subscription.client_subscription = await self._wire.subscribe(subject, file, queue)
        mailbox.start()
        self._subscriptions.append(subscription)
        if self._client.is_connected:
            try:  # so that what anybody publishes after this call comes
                await self._client.flush(2)
            except (nats.errors.Error, OSError) as error:
                logger.debug("subscribing to %s: %s; the next connection will", subject, error)
        return subscription

    async def ensure_stream(self, name: str, subjects: Sequence[str], *, max_age_s: float, max_bytes: int) -> None:
        config = StreamConfig(
            name=name,
            subjects=list(subjects),
            max_age=max_age_s,
            max_bytes=max_bytes or -1,
            storage=StorageType.FILE,
            duplicate_window=min(DUPLICATE_WINDOW_S, max_age_s or DUPLICATE_WINDOW_S),
        )
        with _translated(f"stream {name}"):
            try:
                await self._context.add_stream(config)
            except APIError as error:
                if error.err_code != STREAM_NAME_IN_USE:
                    raise
                await self._context.update_stream(config)

    async def publish_stream(
        self, subject: str, data: bytes, *, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        await self._publisher.publish(subject, data, message_id, headers)

    async def flush_stream(self, timeout_s: float) -> None:
        await self._publisher.flush(timeout_s)

    async def pull_consumer(self, stream: str, durable: str, *, start_sequence: int = 1) -> NatsPullConsumer:
        consumer = NatsPullConsumer(
            self._context, self._client, self._wire, stream, durable, ack_wait_s=self._ack_wait_s
        )
        with _translated(f"consumer {durable} of {stream}"):
            await consumer.open(start_sequence)
        self._consumers.append(consumer)
        return consumer

    async def stream_read(
        self, stream: str, subject: str, *, start_sequence: int = 1, since_ns: int = 0, follow: bool = False
    ) -> AsyncIterator[Delivery]:
        self._require()
        with _translated(f"reading {stream}"):
            async for one in read(
                self._context, stream, subject, start_sequence=start_sequence, since_ns=since_ns, follow=follow
            ):
                yield one

    async def stream_span(self, stream: str) -> tuple[int, int] | None:
        self._require()
        with _translated(f"stream {stream}"):
            return await span(self._context, stream)

    async def kv_put(self, bucket: str, key: str, value: bytes, *, revision: int | None = None) -> int:
        self._require()
        with _translated(f"put {bucket}/{key}"):
            return await self._store.put(bucket, key, value, revision)

    async def kv_get(self, bucket: str, key: str) -> KvEntry | None:
        self._require()
        with _translated(f"get {bucket}/{key}"):
            return await self._store.get(bucket, key)

    def kv_watch(self, bucket: str, key: str) -> AsyncIterator[KvEntry]:
        return self._store.watch(bucket, key)

    async def kv_history(self, bucket: str, key: str = ">") -> Sequence[KvEntry]:
        self._require()
        with _translated(f"history of {bucket}/{key}"):
            return await self._store.history(bucket, key)

    async def object_put(self, bucket: str, name: str, data: bytes) -> None:
        self._require()
        with _translated(f"put object {bucket}/{name}"):
            await self._store.object_put(bucket, name, data)

    async def object_get(self, bucket: str, name: str) -> bytes | None:
        self._require()
        with _translated(f"get object {bucket}/{name}"):
            return await self._store.object_get(bucket, name)

    def _require(self) -> None:
        """Fail at once while disconnected, where nats-py would queue and wait for its timeout."""
        if not self._client.is_connected:
            raise BusUnavailable("not connected to the NATS server")

    def counters(self) -> Mapping[str, int]:
        return {
            "dropped": sum(s.mailbox.dropped for s in self._subscriptions),
            "publish_dropped": self._publish_dropped,
            "callback_errors": sum(s.mailbox.errors for s in self._subscriptions),
            "stream_failures": self._publisher.failures,
            "reconnects": self._client.stats["reconnects"],
            "rebinds": sum(consumer.rebinds for consumer in self._consumers),
        }

    async def drain(self, timeout_s: float = 5.0) -> None:
        if self._client.is_closed:
            return
        for consumer in self._consumers:
            await consumer.stop()
        try:
            async with asyncio.timeout(timeout_s):
                if self._client.is_connected:
                    await asyncio.gather(*(s.stop(timeout_s) for s in self._subscriptions))
                    await self._publisher.flush(timeout_s)
                    await self._client.flush()
        except (TimeoutError, nats.errors.Error, OSError) as error:
            logger.warning("draining the bus: %s", error or f"not done in {timeout_s:g} s")
        for subscription in self._subscriptions:
            await subscription.mailbox.close()
        await self._client.close()
        self._store.wake()

    # What nats-py reports; wired by connect().

    async def on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            for subscription in self._subscriptions:
                if subscription.client_subscription is error.sub:
                    subscription.mailbox.dropped += 1
                    return
        logger.debug("nats: %s", error)

    async def on_disconnected(self) -> None:
        if not self._client.is_closed:
            logger.warning("the connection to the NATS server is lost; connecting again")
        self._publisher.connection_lost()
        self._store.connection_lost()

    async def on_reconnected(self) -> None:
        logger.warning("connected to the NATS server again")
        self._store.wake()

    async def on_closed(self) -> None:
        self._store.wake()

    async def start(self) -> None:
        """Subscribe to the acknowledgements of stream messages."""
        await self._publisher.start()


async def connect(
    url: str,
    *,
    user: str = "",
    password: str = "",
    token: str = "",
    name: str = "tidegate",
    first_connect_limit_s: float = FIRST_CONNECT_LIMIT_S,
    ack_wait_s: float = ACK_WAIT_S,
) -> NatsBus:
    """A connected bus. The first connection is tried for ``first_connect_limit_s``, later ones for ever.

    Raises UserError for refused credentials or a malformed URL, BusUnavailable when nobody answers in time."""
    client = Client()
    bus = NatsBus(client, ack_wait_s=ack_wait_s)
    refused: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    last: list[Exception] = []

    async def on_error(error: Exception) -> None:
        last[:] = [error]
        if "authorization" in str(error).lower() and not refused.done():
            refused.set_result(None)
        await bus.on_error(error)

    connecting = asyncio.ensure_future(
        client.connect(
            url,
            name=name,
            user=user or None,
            password=password or None,
            token=token or None,
            error_cb=on_error,
            disconnected_cb=bus.on_disconnected,
            reconnected_cb=bus.on_reconnected,
            closed_cb=bus.on_closed,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]  # annotated int, slept on
            max_reconnect_attempts=-1,
            ping_interval=PING_INTERVAL_S,
            # Larger than what publish() lets gather, so that nats-py never waits for the socket by itself.
            pending_size=2 * SEND_LIMIT_BYTES,
        )
    )
    await asyncio.wait({connecting, refused}, timeout=first_connect_limit_s, return_when=asyncio.FIRST_COMPLETED)
    if connecting.done() and not connecting.cancelled():
        failure = connecting.exception()
        if failure is None:
            await bus.start()
            return bus
        raise UserError(f"NATS URL {url!r}: {failure}") from failure
    connecting.cancel()
    await asyncio.wait([connecting])
    await client.close()
    if refused.done():
        raise UserError(f"the NATS server at {url} refused the credentials of user {user!r}")
    reason = str(last[0] if last else "") or "no answer"  # a time that ran out says nothing of itself
    raise BusUnavailable(f"no NATS server at {url} within {first_connect_limit_s:g} s ({reason})")
