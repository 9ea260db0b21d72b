"""How a service answers those who ask after it: HTTP /live, /ready and /metrics, and $SRV on NATS.

Live means that the event loop turns. Ready means wired and connected: before that, and again while draining
or while the bus is away, /ready answers 503 and says why.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from services.errors import UserError
from services.settings import CommonSettings

if TYPE_CHECKING:
    from aiohttp import web
    from nats.aio.client import Client
    from nats.micro.request import Request
    from nats.micro.service import Service as MicroService

log = logging.getLogger(__name__)
STARTING, READY, DRAINING = "starting", "ready", "draining"


class Health:
    """The state that probes see. ``connected`` tells whether the bus is there; before one is, it is not."""

    def __init__(self, service: str, instance: str) -> None:
        self.service = service
        self.instance = instance
        self.state = STARTING
        self.connected: Callable[[], bool] = lambda: False
        self.counters: Callable[[], Mapping[str, int]] = dict

    @property
    def ready(self) -> bool:
        return self.state == READY and self.connected()

    def report(self) -> dict[str, object]:
        """What is answered, on HTTP and on NATS alike."""
        return {
            "service": self.service,
            "instance": self.instance,
            "ready": self.ready,
            "state": self.state,
            "connected": self.connected(),
            "counters": dict(self.counters()),
        }


class HealthServer:
    """HTTP on one address. ``start`` listens, ``stop`` closes; ``render_metrics`` gives Prometheus' text."""

    def __init__(self, health: Health, render_metrics: Callable[[], bytes]) -> None:
        self._health = health
        self._render_metrics = render_metrics
        self._runner: web.AppRunner | None = None
        self.port = -1
        """Where it listens; -1 before it does."""

    async def start(self, settings: CommonSettings) -> None:
        """Listen where the settings say, if anywhere, and write the port where they want it.

        Raises UserError when the address is taken or not ours, or when the port file cannot be written.
        """
        if settings.http_port == -1:
            return
        from aiohttp import web  # 8 MB that a process without HTTP need not load

        application = web.Application()
        application.add_routes(
            [
                web.get("/live", self._live),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, settings.http_host, settings.http_port)
        try:
            await site.start()
        except OSError as error:
            await self.stop()
            where = f"{settings.http_host}:{settings.http_port}"
            raise UserError(f"http_host, http_port: found {where} ({error.strerror}), expected a free port") from error
        self.port = int(self._runner.addresses[0][1])
        if settings.http_port_file:
            write_port_file(Path(settings.http_port_file), self.port)
        log.info("listening", extra={"fields": {"http_host": settings.http_host, "http_port": self.port}})

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _live(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response({"live": True})

    async def _ready(self, _: web.Request) -> web.Response:
        from aiohttp import web

        return web.json_response(self._health.report(), status=200 if self._health.ready else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        from aiohttp import web

        content_type = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._render_metrics(), headers=content_type)


def write_port_file(path: Path, port: int) -> None:
    """The whole number or nothing: a reader never sees half a port. Raises UserError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(f"{port}\n", encoding="ascii")
        beside.replace(path)
    except OSError as error:
        raise UserError(f"http_port_file {path}: found {error.strerror}, expected a file to write to") from error


async def answer_on_nats(client: Client, health: Health, *, version: str, metadata: Mapping[str, str]) -> MicroService:
    """Register with NATS' service convention: $SRV.PING, $SRV.INFO and $SRV.STATS answer from here.

    Its one endpoint, ``tg.v1.health.<service>``, gives each instance's report, and STATS carries the bus
    counters with it. The caller stops what this returns before the bus drains.
    """
    from nats.micro import add_service

    async def respond(request: Request) -> None:
        await request.respond(json.dumps(health.report()).encode())

    service = await add_service(
        client,
        name=f"tidegate-{health.service}",
        version=version,
        description=f"Tidegate {health.service}",
        metadata={"instance": health.instance, **metadata},
        stats_handler=lambda _: dict(health.counters()),
    )
    # A queue group of its own: a question to a service is answered by every instance of it.
    await service.add_endpoint(
        name="health", subject=f"tg.v1.health.{health.service}", queue_group=health.instance, handler=respond
    )
    return service
