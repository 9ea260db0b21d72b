"""Keeps every step's commands and outcomes on a stream, beside the control path and never in it."""

from __future__ import annotations

import asyncio
from collections import deque

from schemas.identity import SCHEMA_VERSION
from schemas.outcomes import AUDIT_RECORD, AuditRecord, OutcomeBatch
from schemas.subjects import STREAM_AUDIT, STREAM_SUBJECTS, subject
from services.bus.api import Bus
from services.errors import BusError

BURST = 64
"""Records handed over between two looks at other work."""

GATHER_S = 0.05
"""How long records gather before they are handed over: those of a step's first nodes must not delay its last."""

RETRY_S = 1.0
"""Wait before the stream is asked for again."""


class AuditTrail:
    """A bounded backlog and the task that empties it into TG_AUDIT.

    What does not fit or cannot be handed over is a gap: counted in all, and per node in the next record.
    """

    def __init__(self, bus: Bus, *, backlog: int, max_age_s: float, max_bytes: int) -> None:
        self._bus = bus
        self._limit = backlog
        self._max_age_s = max_age_s
        self._max_bytes = max_bytes
        self._held: deque[tuple[OutcomeBatch, bytes, bytes]] = deque()
        self._gaps: dict[str, int] = {}
        self._subjects: dict[str, str] = {}
        self._wake = asyncio.Event()
        self.stored = 0

    @property
    def gaps(self) -> int:
        """Records lost since the start."""
        return sum(self._gaps.values())

    @property
    def backlog(self) -> int:
        return len(self._held)

    def add(self, outcomes: OutcomeBatch, actions_data: bytes, outcomes_data: bytes) -> None:
        """Take a step's two encoded messages; at once and without waiting."""
        if len(self._held) >= self._limit:
            self._lose(outcomes.node)
            return
        self._held.append((outcomes, actions_data, outcomes_data))
        self._wake.set()

    async def run(self) -> None:
        """Empty the backlog until cancelled."""
        await self._ensure_stream()
        while True:
            await self._wake.wait()
            await asyncio.sleep(GATHER_S)
            self._wake.clear()
            while self._held:
                for _ in range(min(BURST, len(self._held))):
                    await self._store(*self._held.popleft())
                await asyncio.sleep(0)

    async def flush(self, timeout_s: float) -> None:
        """Hand over what is left and wait for the acknowledgements; the rest is counted as gaps."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._held:
                    await self._store(*self._held.popleft())
                await self._bus.flush_stream(timeout_s)
        except (TimeoutError, BusError):
            while self._held:
                self._lose(self._held.popleft()[0].node)

    async def _ensure_stream(self) -> None:
        while True:
            try:
                await self._bus.ensure_stream(
                    STREAM_AUDIT, STREAM_SUBJECTS[STREAM_AUDIT], max_age_s=self._max_age_s, max_bytes=self._max_bytes
                )
            except BusError:
                await asyncio.sleep(RETRY_S)
            else:
                return

    async def _store(self, outcomes: OutcomeBatch, actions_data: bytes, outcomes_data: bytes) -> None:
        node = outcomes.node
        record = AuditRecord(
            node, outcomes.boot_id, outcomes.step, SCHEMA_VERSION, outcomes.t_ns, actions_data, outcomes_data,
            self._gaps.get(node, 0),
        )  # fmt: skip
        try:
            await self._bus.publish_stream(
                self._subject(node),
                AUDIT_RECORD.encode(record),
                message_id=f"audit.{node}.{outcomes.boot_id}.{outcomes.step}",
            )
        except BusError:
            self._lose(node)
        else:
            self.stored += 1

    def _subject(self, node: str) -> str:
        made = self._subjects.get(node)
        if made is None:
            made = self._subjects[node] = subject("audit", node)
        return made

    def _lose(self, node: str) -> None:
        self._gaps[node] = self._gaps.get(node, 0) + 1
