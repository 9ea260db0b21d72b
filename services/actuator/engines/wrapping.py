"""An adapter around another: it hands every verb on, and whoever wraps an engine changes those that it is about."""

from __future__ import annotations

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
from services.actuator.engines.protocol import PLAIN, Engine


class WrappedEngine:
    """An :class:`Engine` that is the inner one in everything. Its calls wait, whatever the inner one's do."""

    waits = True

    def __init__(self, inner: Engine) -> None:
        self._inner = inner

    @property
    def worker(self) -> str:
        return self._inner.worker

    @property
    def t_ns(self) -> int:
        return self._inner.t_ns

    @property
    def connection(self) -> int:
        return self._inner.connection

    async def describe(self) -> Description:
        return await self._inner.describe()

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        return await self._inner.snapshot(ask)

    async def set_quota(self, command: SetQuota) -> Receipt:
        return await self._inner.set_quota(command)

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
        return await self._inner.receipt(action_id)

    async def close(self) -> None:
        await self._inner.close()
