"""An inference server as attach meets one: a real HTTP server with a real vLLM's page, whose numbers move, and every
way in which such a server can go wrong."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

from aiohttp import web


class InferenceServer:
    """``fault``: empty, or one of ``500``, ``hang``, ``half``, ``empty``, ``html``, ``sglang``."""

    def __init__(self, page: str, version: str = "0.32.0") -> None:
        self.fault = ""
        self.version = version
        self.asleep: bool | None = None
        """What it says of its sleep; None: it has no sleep mode."""
        self.asked = 0
        self.gauges = {"num_requests_running": 12.0, "num_requests_waiting": 5.0, "kv_cache_usage_perc": 0.9}
        self.for_memory = 4.0
        self.rates = {"num_preemptions_total": 1.0, "generation_tokens_total": 100.0}
        """Growth of counters, a second."""
        self.url = ""
        self._page = page
        self._began_s = time.monotonic()
        self._released = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[InferenceServer]:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/version", self._version)
        app.router.add_get("/is_sleeping", self._is_sleeping)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            self._released.set()
            await runner.cleanup()

    def page(self) -> str:
        passed_s = time.monotonic() - self._began_s
        text = self._page
        for name, value in {**self.gauges, **{n: r * passed_s for n, r in self.rates.items()}}.items():
            text = re.sub(rf"^(vllm:{name}\{{[^}}]*\}}) .*$", rf"\g<1> {value}", text, flags=re.M)
        return re.sub(r'^(\S*by_reason\{[^}]*reason="capacity"\}) .*$', rf"\g<1> {self.for_memory}", text, flags=re.M)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        text = self.page()
        match self.fault:
            case "500":
                return web.Response(status=500, text="engine dead")
            case "hang":
                await self._released.wait()
            case "half":
                response = web.StreamResponse(headers={"Content-Length": str(len(text)), "Content-Type": "text/plain"})
                await response.prepare(request)
                await response.write(text[: len(text) // 2].encode())
                assert request.transport is not None
                request.transport.close()
                return response
            case "empty":
                text = ""
            case "html":
                return web.Response(text="<html>login</html>", content_type="text/html")
            case "sglang":
                text = text.replace("vllm:", "sglang:")
        return web.Response(text=text, content_type="text/plain")

    async def _is_sleeping(self, request: web.Request) -> web.StreamResponse:
        if self.asleep is None:
            raise web.HTTPNotFound
        return web.json_response({"is_sleeping": self.asleep})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": self.version})


def sample_page(shared: Path) -> str:
    """A real vLLM 0.32's /metrics."""
    return (shared / "samples" / "vllm-0.32-metrics.txt").read_text()
