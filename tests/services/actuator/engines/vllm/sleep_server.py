"""A server that plays vLLM's sleep mode: its endpoints, the memory of its device, and the faults of both."""

from __future__ import annotations

import asyncio

from aiohttp import web

GB = 10**9
WEIGHTS = 16 * GB
KV = 30 * GB


class Server:
    """vLLM 0.32 as far as sleep mode goes; ``fault`` of a path: ``hang``, ``die``, ``frees_nothing``, a status."""

    def __init__(self) -> None:
        self.asleep = False
        self.used_bytes = WEIGHTS + KV
        self.faults: dict[str, str | int] = {}
        self.asked: list[str] = []
        self.stuck_bytes = 0
        """What a waking that failed mapped before."""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/sleep", self._sleep)
        app.router.add_post("/wake_up", self._wake_up)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        return app

    async def _sleep(self, request: web.Request) -> web.Response:
        await self._asked(request)
        if not self.asleep and self.faults.get("/sleep") != "frees_nothing":
            self.used_bytes -= WEIGHTS + KV
        self.asleep = True
        return web.json_response({"status": "sleeping", "level": 1})

    async def _wake_up(self, request: web.Request) -> web.Response:
        if self.faults.get("/wake_up") == 500:
            self.used_bytes += self.stuck_bytes
        await self._asked(request)
        if self.asleep and self.used_bytes < WEIGHTS:
            self.used_bytes = WEIGHTS + KV
        self.asleep = False
        return web.json_response({"status": "awake", "tags": None})

    async def _is_sleeping(self, request: web.Request) -> web.Response:
        await self._asked(request)
        return web.json_response({"is_sleeping": self.asleep})

    async def _asked(self, request: web.Request) -> None:
        self.asked.append(request.path_qs)
        fault = self.faults.get(request.path)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "die" and request.transport is not None:
            request.transport.abort()
            await asyncio.Event().wait()
        if isinstance(fault, int):
            raise _status(fault)


def _status(status: int) -> web.HTTPException:
    return {404: web.HTTPNotFound, 500: web.HTTPInternalServerError}[status](text="CUDA out of memory")
