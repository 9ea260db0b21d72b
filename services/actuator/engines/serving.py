"""Unix sockets for the engine protocol: framing, order of answers, and nothing a caller sends is fatal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec

from schemas.engine import REQUEST, Reply, ReplyBody, Request, RequestBody, frame
from services.actuator.engines.framing import Frames
from services.errors import ProtocolError, UserError

log = logging.getLogger(__name__)

Answer = Callable[[RequestBody], ReplyBody | Awaitable[ReplyBody]]
PATH_LIMIT_BYTES = 107
"""A Unix socket's address holds no more."""

QUEUE_LIMIT = 1024
"""Requests a connection may have unanswered."""


class Connection(asyncio.Protocol):
    """One caller. Requests are answered in order, also when an answer has to be waited for; bytes that are
    no request end this connection and no other."""

    def __init__(self, answer: Answer, clock_ns: Callable[[], int], connections: set[Connection]) -> None:
        self._answer = answer
        self._clock_ns = clock_ns
        self._connections = connections
        self._frames = Frames()
        self._queue: deque[Request] = deque()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._frames.feed(data):
                self._queue.append(REQUEST.decode(body))
            if len(self._queue) > QUEUE_LIMIT:
                raise ProtocolError(f"{len(self._queue)} unanswered requests: at most {QUEUE_LIMIT} expected")
        except (ProtocolError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            log.warning("connection closed", extra={"fields": {"reason": str(error)}})
            self._queue.clear()
            self.abort()
            return
        if self._waiting is None:
            self._work()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._queue.clear()
        if self._waiting is not None:
            self._waiting.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _work(self) -> None:
        while self._queue:
            request = self._queue.popleft()
            body = self._answer(request.body)
            if isinstance(body, Awaitable):
                self._waiting = asyncio.ensure_future(self._wait(request.seq, body))
                return
            self._reply(request.seq, body)

    async def _wait(self, seq: int, body: Awaitable[ReplyBody]) -> None:
        self._reply(seq, await body)
        self._waiting = None
        self._work()

    def _reply(self, seq: int, body: ReplyBody) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(Reply(seq, self._clock_ns(), body)))


class Sockets:
    """The sockets of a node's folder, made by :meth:`serve` and gone after :meth:`close`."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._servers: list[tuple[asyncio.AbstractServer, Path]] = []
        self._connections: set[Connection] = set()

    async def serve(self, path: Path, answer: Answer) -> None:
        """Listen at ``path``, for this user only. UserError when somebody else does, or the path cannot be one."""
        if len(os.fsencode(path)) > PATH_LIMIT_BYTES:
            raise UserError(f"socket {path}: {len(os.fsencode(path))} bytes, expected at most {PATH_LIMIT_BYTES}")
        _remove_stale(path)
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            before = os.umask(0o177)  # the file must never be open to others, not even between bind and chmod
            try:
                listening.bind(str(path))
            finally:
                os.umask(before)
            server = await asyncio.get_running_loop().create_unix_server(
                lambda: Connection(answer, self._clock_ns, self._connections), sock=listening
            )
        except OSError as error:
            listening.close()
            raise UserError(f"socket {path}: found {error.strerror or error}, expected a writable folder") from error
        self._servers.append((server, path))

    async def close(self) -> None:
        """Stop listening, drop the callers, remove the files."""
        for server, path in self._servers:
            server.close()
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        for connection in list(self._connections):
            connection.abort()
        self._servers.clear()


def _remove_stale(path: Path) -> None:
    """Take away what a killed node left; UserError when it is alive or no socket."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UserError(f"socket {path}: found another kind of file, expected nothing or a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
        else:
            raise UserError(f"socket {path}: found a process that serves it, expected none")
