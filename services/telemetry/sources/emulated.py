"""The emulated node: a long poll on its Unix socket ``node.sock``, verb ``sample`` of the engine protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

from schemas.engine import Sample, SampleReply
from schemas.identity import STEP_S
from schemas.metrics import METRICS
from services.clock import Clock
from services.errors import EngineRefused, EngineUnreachable
from services.telemetry.sources.node_client import NodeClient
from services.telemetry.sources.reading import Reading

NODE_SOCKET: Final = "node.sock"
NEWEST: Final = -1
"""``after_step`` that asks for the newest sample now."""
_ROW_BYTES: Final = 8 * len(METRICS)


class EmulatedSource:
    """Readings of one emulated node; reconnects for ever.

    ``position``: boot id and last step given out for the node, as its reader knows them: each request tells
    the node whose commands count. ``on_error`` hears every failure.
    """

    name = "emulated"

    def __init__(
        self,
        node: str,
        folder: Path,
        position: Callable[[], tuple[int, int]],
        on_error: Callable[[str, Exception], None],
        clock: Clock,
        *,
        poll_s: float = 2 * STEP_S,
        retry_s: float = 0.1,
    ) -> None:
        self._node = node
        self._client = NodeClient(node, folder / NODE_SOCKET)
        self._position = position
        self._on_error = on_error
        self._clock = clock
        self._poll_s = poll_s
        self._retry_s = retry_s

    async def readings(self) -> AsyncIterator[Reading]:
        """A reading for each new step. After a new connection the newest one comes first, whatever its step:
        the node may have begun anew."""
        try:
            while True:
                boot_id, last = self._position()
                after = last if self._client.connected else NEWEST
                asked_ns = self._clock.now_ns()
                try:
                    t_ns, reply = await self._client.sample(Sample(after, boot_id, self._poll_s))
                    reading = self._read(t_ns, reply, (self._clock.now_ns() - asked_ns) / 1e9)
                except (EngineUnreachable, EngineRefused) as error:
                    self._on_error(self._node, error)
                    await asyncio.sleep(self._retry_s)
                    continue
                fresh = reading.step >= 0 and reading.step != (after if after != NEWEST else last)
                if fresh:
                    yield reading
                if reply.finished or (not fresh and after == NEWEST and last == NEWEST):
                    # Over, or not begun: nothing to wait for in the node.
                    await asyncio.sleep(self._retry_s)
        finally:
            self._client.close()

    def _read(self, t_ns: int, reply: SampleReply, waited_s: float) -> Reading:
        rows = len(reply.workers)
        sizes = (len(reply.cards), len(reply.classes), len(reply.metrics))
        if sizes != (rows, rows, rows * _ROW_BYTES) and (rows or reply.metrics):
            self._client.close()
            raise EngineUnreachable(
                self._node,
                f"a sample of {rows} workers, {sizes[0]} cards, {sizes[1]} classes and {sizes[2]} bytes, "
                f"expected {_ROW_BYTES} bytes a worker",
            )
        return Reading(self._node, reply.step, t_ns, reply.workers, reply.cards, reply.classes, reply.metrics, waited_s)
