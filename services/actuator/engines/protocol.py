"""The engine protocol: what an adapter can do, and the client of a worker's Unix socket."""

from __future__ import annotations

import asyncio
import socket as sockets
import struct
from pathlib import Path
from typing import Final, Protocol, TypeVar, cast

import msgspec

from schemas.engine import (
    REPLY,
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Evict,
    Failure,
    GrantPages,
    Prefetch,
    Prepare,
    Receipt,
    ReplyBody,
    Request,
    RequestBody,
    ReturnPages,
    SetQuota,
    SetWeights,
    Snapshot,
    SnapshotReply,
    Ticket,
    frame,
)
from services.actuator.engines.framing import Frames
from services.errors import EngineRefused, EngineUnreachable, ProtocolError

R = TypeVar("R", bound=ReplyBody)
PLAIN: Final = Snapshot()
"""Asks for no sessions."""
_CREDENTIALS: Final = struct.Struct("=3i")
"""Linux's struct ucred: pid, uid, gid."""


class Engine(Protocol):
    """One worker's engine. Commands are absolute; every method raises EngineUnreachable when the engine
    does not answer in time and EngineRefused when it says no, and then nothing changed."""

    @property
    def worker(self) -> str: ...

    @property
    def waits(self) -> bool:
        """Whether calls really wait; False lets the caller go on without a task per worker."""
        ...

    @property
    def t_ns(self) -> int:
        """The engine's clock in its latest answer: the node clock."""
        ...

    @property
    def connection(self) -> int:
        """Grows with every new connection: what was described before it may not hold any more."""
        ...

    async def describe(self) -> Description: ...
    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply: ...
    async def set_quota(self, command: SetQuota) -> Receipt: ...
    async def grant_pages(self, command: GrantPages) -> Receipt: ...
    async def return_pages(self, command: ReturnPages) -> Receipt: ...
    async def prepare(self, command: Prepare) -> Ticket: ...
    async def copy(self, ticket: int) -> Receipt: ...
    async def commit(self, ticket: int) -> Receipt: ...
    async def abort(self, ticket: int) -> Receipt: ...
    async def evict(self, command: Evict) -> Receipt: ...
    async def prefetch(self, command: Prefetch) -> Receipt: ...
    async def set_weights(self, command: SetWeights) -> Receipt: ...
    async def receipt(self, action_id: str) -> Receipt: ...
    async def close(self) -> None: ...


class EngineSocket(asyncio.Protocol):
    """One connection: requests go out at once, replies come back in order and find their request by ``seq``."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._frames = Frames()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[ReplyBody]] = {}
        self._seq = 0
        self.lost = False
        self.t_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def send(self, body: RequestBody) -> tuple[int, asyncio.Future[ReplyBody]]:
        """Send now; the future ends with the reply or with EngineUnreachable."""
        future: asyncio.Future[ReplyBody] = asyncio.get_running_loop().create_future()
        self._seq += 1
        if self.lost or self._transport is None:
            future.set_exception(EngineUnreachable(self._worker, "connection closed"))
        else:
            self._waiting[self._seq] = future
            self._transport.write(frame(Request(self._seq, body)))
        return self._seq, future

    def forget(self, seq: int) -> None:
        """The caller gave up; a late reply to it is ignored."""
        self._waiting.pop(seq, None)

    @property
    def peer_pid(self) -> int:
        """Process that listens at the other end, as this one's pid namespace numbers it; 0: not known."""
        own = None if self.lost or self._transport is None else self._transport.get_extra_info("socket")
        if own is None:
            return 0
        said = own.getsockopt(sockets.SOL_SOCKET, sockets.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(said)[0])

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                reply = REPLY.decode(body)
                self.t_ns = max(self.t_ns, reply.t_ns)
                future = self._waiting.pop(reply.seq, None)
                if future is not None and not future.done():
                    future.set_result(reply.body)
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._end(f"a reply that cannot be read: {error}")
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(str(error) if error else "connection closed")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
        self._end("connection closed")

    def _end(self, detail: str) -> None:
        self.lost = True
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(EngineUnreachable(self._worker, detail))


class EngineClient:
    """Requests to one engine over its socket, connecting when needed.

    A request whose connection breaks before the answer is repeated once on a new one: commands are absolute,
    so a repeat does nothing. ``timeout_s`` bounds each call, connecting and the repeat included.
    """

    def __init__(self, worker: str, path: Path, timeout_s: float) -> None:
        self.worker = worker
        self.path = path
        self.connection = 0
        self._timeout_s = timeout_s
        self._socket: EngineSocket | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._t_ns = 0

    @property
    def t_ns(self) -> int:
        """The engine's clock in its latest answer, 0 before the first."""
        return max(self._t_ns, self._socket.t_ns if self._socket is not None else 0)

    @property
    def peer_pid(self) -> int:
        """The engine's process; 0 without a connection."""
        return self._socket.peer_pid if self._socket is not None else 0

    async def request(self, body: RequestBody, expected: type[R]) -> R:
        """Send and wait. EngineRefused for a Failure; EngineUnreachable for silence, a lost connection or an
        answer of another kind."""
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await self._exchange(body)
        except TimeoutError as error:
            raise EngineUnreachable(self.worker, f"no answer within {self._timeout_s:g} s") from error
        if isinstance(reply, expected):
            return reply
        if isinstance(reply, Failure):
            raise EngineRefused(self.worker, reply.reason, dict(reply.numbers))
        raise EngineUnreachable(self.worker, f"answered {type(reply).__name__}, expected {expected.__name__}")

    async def close(self) -> None:
        if self._socket is not None:
            self._t_ns = self.t_ns
            self._socket.close()
            self._socket = None

    async def _exchange(self, body: RequestBody) -> ReplyBody:
        fresh = self._socket is None or self._socket.lost
        socket = await self._connected()
        try:
            return await self._answer(socket, body)
        except EngineUnreachable:
            if fresh:
                raise
            return await self._answer(await self._connected(), body)

    async def _answer(self, socket: EngineSocket, body: RequestBody) -> ReplyBody:
        seq, future = socket.send(body)
        try:
            return await future
        finally:
            socket.forget(seq)

    async def _connected(self) -> EngineSocket:
        async with self._connecting:
            if self._socket is not None and not self._socket.lost:
                return self._socket
            self._t_ns = self.t_ns
            try:
                _, self._socket = await asyncio.get_running_loop().create_unix_connection(
                    lambda: EngineSocket(self.worker), str(self.path)
                )
            except OSError as error:
                raise EngineUnreachable(self.worker, f"{self.path}: {error.strerror or error}") from error
            self.connection += 1
            return self._socket


class SocketEngine:
    """The protocol's verbs over an :class:`EngineClient`."""

    waits = True

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    @property
    def worker(self) -> str:
        return self._client.worker

    @property
    def t_ns(self) -> int:
        return self._client.t_ns

    @property
    def connection(self) -> int:
        return self._client.connection

    @property
    def peer_pid(self) -> int:
        """The engine's process; 0 without a connection."""
        return self._client.peer_pid

    async def describe(self) -> Description:
        return await self._client.request(Describe(), Description)

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        return await self._client.request(ask, SnapshotReply)

    async def set_quota(self, command: SetQuota) -> Receipt:
        return await self._client.request(command, Receipt)

    async def grant_pages(self, command: GrantPages) -> Receipt:
        return await self._client.request(command, Receipt)

    async def return_pages(self, command: ReturnPages) -> Receipt:
        return await self._client.request(command, Receipt)

    async def prepare(self, command: Prepare) -> Ticket:
        return await self._client.request(command, Ticket)

    async def copy(self, ticket: int) -> Receipt:
        return await self._client.request(Copy(ticket), Receipt)

    async def commit(self, ticket: int) -> Receipt:
        return await self._client.request(Commit(ticket), Receipt)

    async def abort(self, ticket: int) -> Receipt:
        return await self._client.request(Abort(ticket), Receipt)

    async def evict(self, command: Evict) -> Receipt:
        return await self._client.request(command, Receipt)

    async def prefetch(self, command: Prefetch) -> Receipt:
        return await self._client.request(command, Receipt)

    async def set_weights(self, command: SetWeights) -> Receipt:
        return await self._client.request(command, Receipt)

    async def receipt(self, action_id: str) -> Receipt:
        return await self._client.request(AskReceipt(action_id), Receipt)

    async def close(self) -> None:
        await self._client.close()
