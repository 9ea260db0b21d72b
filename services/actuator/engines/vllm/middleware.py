"""The class for ``--middleware``: serves the engine protocol beside vLLM's API and labels requests.

It runs in the API server's process, which asks the engine's between two steps (vLLM's utility calls), so a command
waits for the step under way and works on an idle engine too. A caller that dies or sends nonsense ends its own
connection; the API goes on without Tidegate whatever happens here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

import msgspec

from schemas.engine import Failure, ReplyBody, RequestBody
from services.actuator.engines.serving import Sockets
from services.actuator.engines.vllm import labels, settings
from services.errors import UserError

log = logging.getLogger("vllm.tidegate")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]

CALLS_MOST: Final = 10_000
"""Calls that one command may take; each does at least one block."""
REPLY: Final[msgspec.msgpack.Decoder[ReplyBody]] = msgspec.msgpack.Decoder(ReplyBody)


class TidegateMiddleware:
    """An ASGI application around vLLM's."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self._sockets: Sockets | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._serve(scope["app"].state)
            try:
                await self._app(scope, receive, send)
            finally:
                if self._sockets is not None:
                    await self._sockets.close()
            return
        if scope["type"] == "http":
            scope["headers"] = labels.labelled(scope["headers"])
        await self._app(scope, receive, send)

    async def _serve(self, state: Any) -> None:
        """Listen, where this process is told to; a socket that cannot be made is logged, and vLLM serves all the
        same: without commands its quota is rho 1.0."""
        told = settings.from_environ(os.environ)
        if told is None:
            return
        client = EngineCalls(state)
        sockets = Sockets(time.monotonic_ns)
        try:
            told.socket.parent.mkdir(parents=True, exist_ok=True)
            await sockets.serve(told.socket, client.answer)
        except (UserError, OSError) as error:
            log.error("Tidegate is not served: %s", error)
            return
        self._sockets = sockets
        log.info("Tidegate: engine protocol of %s at %s", told.worker, told.socket)


class EngineCalls:
    """From the API server's process into the engine's."""

    def __init__(self, state: Any) -> None:
        self._state = state

    async def answer(self, body: RequestBody) -> ReplyBody:
        """The engine's reply; Failure ``failed`` when the call itself failed."""
        frame = msgspec.msgpack.encode(body)
        try:
            core = self._state.engine_client.engine_core
            for _ in range(CALLS_MOST):
                data: bytes = await core.call_utility_async("tidegate", frame)
                if data:
                    return REPLY.decode(data)
                await asyncio.sleep(0)
        except Exception as error:  # noqa: BLE001  # vLLM raises what it likes; the caller is told, the API lives on
            return Failure("failed", f"{type(error).__name__}: {error}"[:500])
        return Failure("failed", f"not done after {CALLS_MOST} calls")
