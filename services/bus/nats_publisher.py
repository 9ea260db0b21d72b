"""Publishing to JetStream with acknowledgements that nobody waits for.

nats-py's ``publish_async`` costs a timer per message and waits without an end for an acknowledgement that
was lost with the connection; here a message costs a dictionary entry, and a lost one is counted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from nats.aio.client import Client

from services.bus.nats_wire import Wire
from services.bus.waiting import Signal

logger = logging.getLogger(__name__)

MAX_IN_FLIGHT: Final = 4096
"""Stream messages without an acknowledgement yet; the next one waits for room."""

ACK_LIMIT_S: Final = 5.0
"""A stream message not acknowledged by then counts as failed (the server may still have stored it)."""


class StreamPublisher:
    """Hands messages to streams; what is not acknowledged in time, or refused, is counted in ``failures``."""

    def __init__(self, client: Client, wire: Wire) -> None:
        self.failures = 0
        self._client = client
        self._wire = wire
        self._in_flight: dict[str, float] = {}  # token -> when it was sent, oldest first
        self._last_token = 0
        self._prefix = ""
        self._acknowledged = Signal()

    async def start(self) -> None:
        """Subscribe to the acknowledgements."""
        self._prefix = self._client.new_inbox() + "."
        await self._wire.subscribe(self._prefix + "*", self._on_acknowledgement)

    async def publish(
        self, subject: str, data: bytes, message_id: str, headers: Mapping[str, str] | None = None
    ) -> None:
        if not self._client.is_connected or len(data) > self._client.max_payload:
            self.failures += 1
            return
        now_s = time.monotonic()
        self._expire(now_s)
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            await self._acknowledged.wait(ACK_LIMIT_S)
            now_s = time.monotonic()
            self._expire(now_s)
        self._last_token += 1
        token = str(self._last_token)
        self._in_flight[token] = now_s
        sent = {**(headers or {}), "Nats-Msg-Id": message_id}
        self._wire.publish(subject, data, self._prefix + token, sent)

    def _on_acknowledgement(self, subject: str, data: bytes, _: str, headers: Mapping[str, str] | None) -> None:
        token = subject[len(self._prefix) :]
        refused = b'"error"' in data or bool(headers and headers.get("Status"))
        if refused:
            self._fail(token, data.decode(errors="replace") or "no stream takes this subject")
        else:
            self._in_flight.pop(token, None)
        self._acknowledged.notify()

    def _fail(self, token: str, reason: str) -> None:
        if self._in_flight.pop(token, None) is not None:
            self.failures += 1
            logger.warning("a stream message failed: %s", reason)

    def _expire(self, now_s: float) -> None:
        while self._in_flight:
            token, sent_s = next(iter(self._in_flight.items()))
            if now_s - sent_s < ACK_LIMIT_S:
                return
            self._fail(token, f"no acknowledgement in {ACK_LIMIT_S:g} s")

    def connection_lost(self) -> None:
        """Acknowledgements under way will not come any more: count them as failed."""
        if self._in_flight:
            logger.warning("%d stream messages lost their acknowledgement", len(self._in_flight))
        self.failures += len(self._in_flight)
        self._in_flight.clear()
        self._acknowledged.notify()

    async def flush(self, timeout_s: float) -> None:
        """Wait for the acknowledgements; those missing after ``timeout_s`` count as failed."""
        end_s = time.monotonic() + timeout_s
        while self._in_flight and (left_s := end_s - time.monotonic()) > 0:
            await self._acknowledged.wait(left_s)
        self.connection_lost()
