"""Messages between the moment they arrive and the moment a callback takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from services.bus.api import PENDING_LIMIT_BYTES, PENDING_LIMIT_MESSAGES, Message

logger = logging.getLogger(__name__)


class Mailbox:
    """Holds what arrived since the last event-loop turn and hands it to ``on_batch``, one batch at a time.

    :meth:`push` appends and, for the first message of a batch, wakes the one task of the subscription: no
    timer and no task per message stand in the path. While ``on_batch`` awaits something, the next batch
    gathers; beyond the limits new messages are dropped and counted in ``dropped``, so that a slow callback
    loses messages visibly instead of growing without bound. An exception of ``on_batch`` is logged with its
    trace and counted in ``errors``; the mailbox lives on. ``after_batch`` is called after each batch.
    """

    def __init__(
        self,
        on_batch: Callable[[list[Message]], Awaitable[None]],
        *,
        limit_messages: int = PENDING_LIMIT_MESSAGES,
        limit_bytes: int = PENDING_LIMIT_BYTES,
        after_batch: Callable[[], None] = lambda: None,
    ) -> None:
        if limit_messages < 1 or limit_bytes < 1:
            raise ValueError(f"pending limits {limit_messages} messages, {limit_bytes} bytes: expected at least 1")
        self.dropped = 0
        self.errors = 0
        self._on_batch = on_batch
        self._after_batch = after_batch
        self._limit_messages = limit_messages
        self._limit_bytes = limit_bytes
        self._held: list[Message] = []
        self._held_bytes = 0
        self._closing = False
        self._waiter: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task that hands batches over; needs a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._pump())

    def push(self, message: Message) -> None:
        """Take one message, or drop and count it when the limits are reached or the mailbox closes."""
        size_bytes = len(message.data)
        if (
            len(self._held) >= self._limit_messages
            or self._held_bytes + size_bytes > self._limit_bytes
            or self._closing
        ):
            self.dropped += 1
            return
        self._held.append(message)
        self._held_bytes += size_bytes
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _pump(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._held:
                if self._closing:
                    return
                self._waiter = loop.create_future()
                await self._waiter
                continue
            batch, self._held, self._held_bytes = self._held, [], 0
            try:
                await self._on_batch(batch)
            except Exception:
                self.errors += 1
                logger.exception("a subscription's callback failed on a batch of %d messages", len(batch))
            self._after_batch()

    async def close(self, timeout_s: float = 0.0) -> None:
        """Refuse new messages and let the callback finish what is held within ``timeout_s``, else cancel it.

        A callback may close its own mailbox: it then ends by itself after the current batch."""
        self._closing = True
        task = self._task
        if task is None or task is asyncio.current_task():
            return
        self._wake()
        if timeout_s > 0 and not task.done():
            await asyncio.wait([task], timeout=timeout_s)
        if not task.done():
            self.dropped += len(self._held)
            task.cancel()
            await asyncio.wait([task])
