"""An engine on kvcached: its own adapter for everything, with the hard quota as kvcached's limit too.

``set_quota.hard_bytes`` moves the limit: a raise is written before the engine is told, so that it never admits what
cannot be mapped; a lowering after, so that it stops admitting first. A raise that cannot be written is clipped to the
limit in force, and the receipt says why: the lease goes on, and no quota is confirmed that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from schemas.engine import (
    Description,
    Evict,
    GrantPages,
    Prefetch,
    Prepare,
    Receipt,
    ReturnPages,
    SetQuota,
    SetWeights,
    Snapshot,
    SnapshotReply,
    Ticket,
)
from services.actuator.engines.kvcached.limits import Limits
from services.actuator.engines.kvcached.shrink import Shrunk, Terms, shrink
from services.actuator.engines.protocol import PLAIN, Engine
from services.clock import Clock
from services.errors import EngineRefused, EngineUnreachable, SegmentError

REMEMBERED: Final = 16
"""Lowerings whose effects can still be asked about."""


class KvcachedEngine:
    """Wraps an :class:`Engine`; ``limits`` is this worker's segment. ``on_error`` hears what the background met."""

    def __init__(
        self,
        inner: Engine,
        limits: Limits,
        clock: Clock,
        on_error: Callable[[str, Exception], None] = lambda _worker, _error: None,
    ) -> None:
        self._inner = inner
        self._limits = limits
        self._clock = clock
        self._on_error = on_error
        self._capabilities: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._shrinks: dict[str, Shrunk] = {}

    @property
    def worker(self) -> str:
        return self._inner.worker

    @property
    def waits(self) -> bool:
        return True

    @property
    def t_ns(self) -> int:
        return self._inner.t_ns

    @property
    def connection(self) -> int:
        return self._inner.connection

    async def describe(self) -> Description:
        said = await self._inner.describe()
        self._capabilities = said.capabilities
        mapped = self._mapped(said.mapped_bytes)
        return msgspec.structs.replace(said, engine=f"{said.engine}+kvcached", mapped_bytes=mapped)

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        said = await self._inner.snapshot(ask)
        mapped = self._mapped(said.mapped_bytes)
        self._limits.verify_growth(said.waiting)
        last = self._limits.last
        hard = said.quota_hard_bytes if last is None else min(said.quota_hard_bytes, last.limit_bytes)
        return msgspec.structs.replace(said, mapped_bytes=mapped, quota_hard_bytes=hard)

    async def set_quota(self, command: SetQuota) -> Receipt:
        """As the engine's, within what kvcached's limit really is."""
        words: list[str] = []
        allowed = self._raise(command, words)
        told = msgspec.structs.replace(command, hard_bytes=min(command.hard_bytes, allowed))
        said = await self._inner.set_quota(told)
        # What the engine confirmed, which is not always what it was told: a repeat leaves it as it was.
        self._lower(command, said.quota_hard_bytes, words)
        last = self._limits.last
        hard = said.quota_hard_bytes if last is None else min(said.quota_hard_bytes, last.limit_bytes)
        running = self._task is not None and not self._task.done()
        growth = self._limits.verify_growth(0)
        if growth == "pending":
            words.append("kvcached: the raise is written, not yet in use")
        detail = "; ".join(word for word in (said.detail, *words) if word)
        return msgspec.structs.replace(said, quota_hard_bytes=hard, done=said.done and not running, detail=detail)

    async def grant_pages(self, command: GrantPages) -> Receipt:
        return await self._inner.grant_pages(command)

    async def return_pages(self, command: ReturnPages) -> Receipt:
        return await self._inner.return_pages(command)

    async def prepare(self, command: Prepare) -> Ticket:
        return await self._inner.prepare(command)

    async def copy(self, ticket: int) -> Receipt:
        return await self._inner.copy(ticket)

    async def commit(self, ticket: int) -> Receipt:
        return await self._inner.commit(ticket)

    async def abort(self, ticket: int) -> Receipt:
        return await self._inner.abort(ticket)

    async def evict(self, command: Evict) -> Receipt:
        return await self._inner.evict(command)

    async def prefetch(self, command: Prefetch) -> Receipt:
        return await self._inner.prefetch(command)

    async def set_weights(self, command: SetWeights) -> Receipt:
        return await self._inner.set_weights(command)

    async def receipt(self, action_id: str) -> Receipt:
        """Of a lowering: what its completion has given back so far; of the engine's own effects as ever."""
        state = self._shrinks.get(action_id)
        if state is None:
            return await self._inner.receipt(action_id)
        snapshot = await self._inner.snapshot()
        running = self._task is not None and not self._task.done() and action_id == next(reversed(self._shrinks))
        return Receipt(
            action_id, not running, snapshot.generation, snapshot.rho, snapshot.quota_soft_bytes,
            min(snapshot.quota_hard_bytes, state.target_bytes), snapshot.max_running, self._mapped(state.used_bytes),
            compacted_bytes=state.compacted_bytes, evicted_bytes=state.evicted_bytes, detail=_words(state),
        )  # fmt: skip

    async def close(self) -> None:
        await self._stop()
        self._limits.end()
        await self._inner.close()

    def _mapped(self, told: int) -> int:
        """What kvcached says is mapped; the engine's own word where the segment is away."""
        try:
            return self._limits.observe().mapped_bytes
        except SegmentError as error:
            self._on_error(self.worker, error)
            return told

    def _raise(self, command: SetQuota, words: list[str]) -> int:
        """Write a higher limit; the limit that the engine may be told."""
        known = self._limits.last
        try:
            if not self._limits.owner.taken:
                self._limits.begin()
            usage = self._limits.observe()
            if command.hard_bytes <= usage.limit_bytes:
                return command.hard_bytes
            known = usage
            return self._limits.set(command.hard_bytes).usage.limit_bytes
        except SegmentError as error:
            self._on_error(self.worker, error)
            words.append(f"kvcached: {error}")
            # With the segment away nobody knows what may be mapped: no more than what was last in force.
            return known.limit_bytes if known is not None else command.hard_bytes

    def _lower(self, command: SetQuota, hard_bytes: int, words: list[str]) -> None:
        last = self._limits.last
        if last is None or hard_bytes <= 0:
            return
        try:
            usage = self._limits.set(hard_bytes).usage if hard_bytes < last.limit_bytes else last
        except SegmentError as error:
            self._on_error(self.worker, error)
            words.append(f"kvcached: {error}")
            usage = last  # the limit stands, but what is idle can leave all the same
        if usage.used_bytes > hard_bytes:
            words.append(f"kvcached: {usage.used_bytes - hard_bytes} bytes above the limit are being given back")
            self._complete(Terms(hard_bytes, command.lease_ns, command.lease_ns, command.action_id), usage.used_bytes)

    def _complete(self, terms: Terms, used_bytes: int) -> None:
        """Bring use down in the background; a newer command's target takes over."""
        if self._task is not None and not self._task.done():
            latest = next(reversed(self._shrinks))
            if self._shrinks[latest].target_bytes == terms.target_bytes:
                return
            self._task.cancel()
            self._shrinks[latest] = self._shrinks[latest]._replace(why="a newer target took over")
        self._shrinks.pop(terms.action_id, None)  # the latest one is the last
        self._shrinks[terms.action_id] = Shrunk(terms.target_bytes, used_bytes, used_bytes)
        while len(self._shrinks) > REMEMBERED:
            del self._shrinks[next(iter(self._shrinks))]
        self._task = asyncio.get_running_loop().create_task(self._run(terms))

    async def _run(self, terms: Terms) -> None:
        def tell(state: Shrunk) -> None:
            self._shrinks[terms.action_id] = state

        try:
            capabilities = self._capabilities or (await self._inner.describe()).capabilities
            await shrink(self._inner, self._limits.observe, capabilities, terms, self._clock, tell)
        except (SegmentError, EngineUnreachable, EngineRefused) as error:
            tell(self._shrinks[terms.action_id]._replace(why=str(error)))
            self._on_error(self.worker, error)

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _words(state: Shrunk) -> str:
    if state.done:
        return f"kvcached: use {state.before_bytes} to {state.used_bytes} bytes in {state.rounds} rounds"
    return f"kvcached: {state.used_bytes - state.target_bytes} bytes above the limit: {state.why or 'under way'}"
