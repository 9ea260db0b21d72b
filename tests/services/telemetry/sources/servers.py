"""A real HTTP server that plays an engine, with every fault a real one may have."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

Raw = bytes


class PlayedEngine:
    """Answers /metrics with ``page`` and /v1/models with ``models``; ``fault`` spoils the former."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.models = '{"data": []}'
        self.fault = ""
        self.asked = 0
        self.hung = asyncio.Event()
        self.url = ""

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = self.page.encode()
        if self.fault == "hang":
            await self.hung.wait()
        if self.fault == "empty":
            return web.Response(body=b"", content_type="text/plain")
        if self.fault == "html":
            return web.Response(text="<html>\n", content_type="text/html")
        if self.fault == "500":
            return web.Response(status=500, text=self.page)
        if self.fault == "401":
            return web.Response(status=401)
        if self.fault == "moved":
            return web.Response(status=302, headers={"Location": "/elsewhere"})
        if self.fault == "not utf-8":
            return web.Response(body=b"\xff\xfe\n", content_type="text/plain")
        if self.fault in ("half", "drip"):
            response = web.StreamResponse(headers={"Content-Type": "text/plain", "Content-Length": str(len(body))})
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            if self.fault == "drip":
                await self.hung.wait()
            assert request.transport is not None
            request.transport.abort()
            return response
        return web.Response(body=body, content_type="text/plain")

    async def listed(self, request: web.Request) -> web.Response:
        return web.Response(text=self.models, content_type="application/json")


@asynccontextmanager
async def served(page: str) -> AsyncIterator[PlayedEngine]:
    """An engine on a free port of this host."""
    engine = PlayedEngine(page)
    app = web.Application()
    app.router.add_get("/metrics", engine.metrics)
    app.router.add_get("/v1/models", engine.listed)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        engine.hung.set()
        await runner.cleanup()
