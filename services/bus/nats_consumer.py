"""Pull consumers of JetStream that live through the server's restart.

nats-py's pull subscription can go silent after a restart (nats.py issue 504) and makes a task per message;
this one speaks the pull protocol itself, asks for heartbeats and binds anew when they stay away.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import NotFoundError

from services.bus.api import Delivery
from services.bus.nats_wire import Wire
from services.bus.waiting import Signal

logger = logging.getLogger(__name__)

PULL_EXPIRES_S: Final = 5.0
PULL_HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 3.0
"""An open pull with neither message, heartbeat nor status for so long is bound anew."""

FILL_S: Final = 0.05
"""How long a fetch that has something waits for the rest of its batch: a full one costs little more than one of a
single message."""

MAX_ACK_PENDING: Final = 65_536


class NatsPullConsumer:
    """A durable pull consumer with one open pull at a time, read by a callback that only files messages.

    Handled once: within the life of this object a message that was acknowledged never comes again, even when
    the server lost the acknowledgement in a crash (it is acknowledged anew, silently). A message handed out
    and not acknowledged within the ack wait comes again with a greater ``delivered``. Across processes the
    caller's own position decides (``start_sequence``).
    """

    def __init__(
        self, context: JetStreamContext, client: Client, wire: Wire, stream: str, durable: str, *, ack_wait_s: float
    ) -> None:
        self.rebinds = 0
        self._context = context
        self._client = client
        self._wire = wire
        self._stream = stream
        self._durable = durable
        self._ack_wait_s = ack_wait_s
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"
        self._subscription: Subscription | None = None
        self._news = Signal()
        self._held: dict[int, Delivery] = {}  # arrived, not fetched yet
        self._replies: dict[int, str] = {}  # arrived, not acknowledged yet: where the acknowledgement goes
        self._acked: dict[int, None] = {}  # the last acknowledged, oldest first
        self._resume_at = 1
        self._open = 0  # messages that the open pull may still bring
        self._wanted = 1  # messages that the fetch under way asked for
        self._alive_s = 0.0
        self._lost = False
        self._bound_at_reconnects = 0
        self._stopped = False

    async def open(self, start_sequence: int) -> None:
        """Make the consumer stand at ``start_sequence`` and listen to it; nats errors pass through."""
        start_sequence = await self._within(start_sequence)
        try:
            info = await self._context.consumer_info(self._stream, self._durable)
        except NotFoundError:
            await self._create(start_sequence)
        else:
            floor, sent = info.ack_floor, info.delivered
            at = (floor.stream_seq if floor else 0) + 1
            if at != start_sequence or (sent and sent.stream_seq >= start_sequence):
                await self._context.delete_consumer(self._stream, self._durable)
                await self._create(start_sequence)
        self._resume_at = start_sequence
        await self._listen()

    async def _within(self, sequence: int) -> int:
        """The sequence, or 1 when it lies beyond the stream's end: then it belongs to another stream, and
        what is there comes twice rather than never."""
        last = (await self._context.stream_info(self._stream)).state.last_seq
        if sequence <= last + 1:
            return max(sequence, 1)
        logger.warning("%s ends at %d, before the asked position %d: from its start", self._stream, last, sequence)
        self._acked.clear()
        return 1

    async def _create(self, start_sequence: int) -> None:
        config = ConsumerConfig(
            name=self._durable,
            durable_name=self._durable,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start_sequence,
            ack_policy=AckPolicy.EXPLICIT,
            ack_wait=self._ack_wait_s,
            max_ack_pending=MAX_ACK_PENDING,
        )
        await self._context.add_consumer(self._stream, config)

    async def _listen(self) -> None:
        if self._subscription is not None:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error as error:
                logger.debug("the former inbox of %s: %s", self._durable, error)
            self._wire.forget(self._subscription)
        self._open, self._lost = 0, False
        self._bound_at_reconnects = self._client.stats["reconnects"]
        self._subscription = await self._wire.subscribe(self._client.new_inbox(), self._on_message)

    def _on_message(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        self._alive_s = time.monotonic()
        if not reply.startswith("$JS.ACK."):
            self._on_status((headers or {}).get("Status", ""))
            return
        tokens = reply.split(".")
        if len(tokens) > 9:  # a domain and an account stand before, a random token behind
            tokens = tokens[:2] + tokens[4:11]
        delivered, sequence = int(tokens[4]), int(tokens[5])
        self._open -= 1
        if sequence in self._acked:
            self._wire.publish(reply, b"+ACK")
        else:
            self._replies[sequence] = reply
            self._held[sequence] = Delivery(subject, data, headers, sequence, delivered)
        if len(self._held) == 1 or len(self._held) >= self._wanted or self._open <= 0:
            self._news.notify()

    def _on_status(self, status: str) -> None:
        if status == "100":  # a heartbeat
            return
        # 404 and 408 end a pull in the ordinary way; 409 and 503 say that the consumer went or is not back yet.
        self._open = 0
        self._lost = self._lost or status not in ("404", "408")
        self._news.notify()

    async def fetch(self, batch: int, timeout_s: float) -> Sequence[Delivery]:
        end_s = time.monotonic() + timeout_s
        self._wanted = batch
        fill_end_s: float | None = None
        while not self._stopped:
            now_s = time.monotonic()
            if self._held:
                fill_end_s = fill_end_s or min(now_s + FILL_S, end_s)
                if len(self._held) >= batch or self._open <= 0 or now_s >= fill_end_s:
                    return [self._held.pop(sequence) for sequence in list(self._held)[:batch]]
                await self._news.wait(fill_end_s - now_s)
                continue
            if now_s >= end_s:
                break
            if not self._client.is_connected:
                await self._news.wait(min(end_s - now_s, 0.05))
                continue
            try:
                await self._keep_open(batch, now_s)
            except (nats.errors.Error, OSError) as error:
                logger.debug("%s on %s: %s", self._durable, self._stream, error)
                await self._news.wait(min(end_s - now_s, 0.1))
                continue
            await self._news.wait(min(end_s - now_s, SILENCE_S / 4))
        return []

    async def _keep_open(self, batch: int, now_s: float) -> None:
        """Bind anew when the connection was lost, the consumer is gone or silent; open a pull if none is."""
        silent = self._open > 0 and now_s - self._alive_s > SILENCE_S
        if silent:  # what this process was too busy to read does not count as silence
            await self._client.flush(1)
            await asyncio.sleep(0)
            silent = time.monotonic() - self._alive_s > SILENCE_S
        if silent or self._lost or self._client.stats["reconnects"] != self._bound_at_reconnects:
            await self._rebind()
        if self._open == 0:
            self._open = batch
            self._alive_s = time.monotonic()
            pull = {
                "batch": batch,
                "expires": int(PULL_EXPIRES_S * 1e9),
                "idle_heartbeat": int(PULL_HEARTBEAT_S * 1e9),
            }
            assert self._subscription is not None, "open() comes before fetch()"
            self._wire.publish(self._next_subject, msgspec.json.encode(pull), self._subscription.subject)

    async def _rebind(self) -> None:
        self.rebinds += 1
        try:
            await self._context.consumer_info(self._stream, self._durable)
        except NotFoundError:
            resume_at = min(self._replies, default=self._resume_at)
            await self._create(await self._within(resume_at))
        await self._listen()

    async def ack(self, deliveries: Sequence[Delivery]) -> None:
        for delivery in deliveries:
            sequence = delivery.stream_sequence
            reply = self._replies.pop(sequence, None)
            self._acked[sequence] = None
            self._resume_at = max(self._resume_at, sequence + 1)
            if reply is not None and self._client.is_connected:
                self._wire.publish(reply, b"+ACK")
        while len(self._acked) > MAX_ACK_PENDING:
            del self._acked[next(iter(self._acked))]

    async def stop(self) -> None:
        """Stop fetching; the durable consumer stays on the server."""
        self._stopped = True
        self._news.notify()
        if self._subscription is not None and not self._client.is_closed:
            try:
                await self._subscription.unsubscribe()
            except nats.errors.Error as error:
                logger.debug("stopping %s: %s", self._durable, error)
            self._wire.forget(self._subscription)
