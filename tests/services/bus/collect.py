"""Awaiting what a test expects: a callback that collects, and a condition of the outside world."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.bus.api import Message


class Collector:
    """``on_batch`` for tests: ``messages`` in order, ``batches`` as they came."""

    def __init__(self) -> None:
        self.batches: list[list[Message]] = []
        self._came = asyncio.Event()

    @property
    def messages(self) -> list[Message]:
        return [message for batch in self.batches for message in batch]

    @property
    def payloads(self) -> list[bytes]:
        return [message.data for message in self.messages]

    async def on_batch(self, batch: list[Message]) -> None:
        self.batches.append(batch)
        self._came.set()

    async def until(self, count: int, timeout_s: float = 5.0) -> list[Message]:
        """All messages once there are at least ``count``."""
        async with asyncio.timeout(timeout_s):
            while len(self.messages) < count:
                self._came.clear()
                await self._came.wait()
        return self.messages


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return once ``condition`` holds, for what gives no event: another process, a connection's state."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # there is nothing to wait on
            await asyncio.sleep(0.01)
