"""A client of the sockets that answer ``Sample``: a node's, or an engine's own."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Final

import msgspec

from schemas.engine import HEADER_BYTES, REPLY, Failure, Reply, Request, Sample, SampleReply, frame, frame_length
from services.errors import EngineRefused, EngineUnreachable

_GRACE_S: Final = 5.0
"""How much longer than its own time limit a poll may take before the node counts as silent."""


class NodeClient:
    """One connection to a node's socket; requests one after another."""

    def __init__(self, node: str, path: Path) -> None:
        self._node = node
        self._path = path
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._seq = 0

    @property
    def connected(self) -> bool:
        return self._writer is not None

    async def sample(self, request: Sample) -> tuple[int, SampleReply]:
        """The node's clock and the reply, connecting first when needed.

        EngineUnreachable when the node is away, silent or answers something else, after which the connection
        is closed; EngineRefused for a Failure.
        """
        try:
            async with asyncio.timeout(request.timeout_s + _GRACE_S):
                reply = await self._exchange(request)
        except TimeoutError as error:
            self.close()
            raise EngineUnreachable(self._node, f"no sample within {request.timeout_s + _GRACE_S:g} s") from error
        except (OSError, EOFError, ValueError, msgspec.MsgspecError, RecursionError) as error:
            self.close()
            raise EngineUnreachable(self._node, f"{self._path}: {error or type(error).__name__}") from error
        except BaseException:
            # A cancelled exchange leaves its answer in the pipe: it must not meet the next request.
            self.close()
            raise
        if isinstance(reply.body, Failure):
            raise EngineRefused(self._node, reply.body.reason, dict(reply.body.numbers))
        if not isinstance(reply.body, SampleReply):
            self.close()
            raise EngineUnreachable(self._node, f"answered {type(reply.body).__name__}, expected SampleReply")
        return reply.t_ns, reply.body

    def close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._writer.close()
        self._reader = self._writer = None

    async def _exchange(self, request: Sample) -> Reply:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_unix_connection(str(self._path))
        self._seq += 1
        self._writer.write(frame(Request(self._seq, request)))
        await self._writer.drain()
        while True:
            header = await self._reader.readexactly(HEADER_BYTES)
            reply = REPLY.decode(await self._reader.readexactly(frame_length(header)))
            if reply.seq == self._seq:
                return reply
