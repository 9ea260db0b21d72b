"""A service as small as one can be, run as a process by test_runtime: ``python -m tests.services.tiny``.

It answers ``tg.v1.tiny.<node>`` with ``tg.v1.tiny-out.<node>``, continuing the trace; the payload ``fail`` ends
a supervised task with an exception, ``hang`` makes it refuse to stop.
"""

from __future__ import annotations

import asyncio
import logging
import sys

import msgspec

from services.bus import Message
from services.runtime import Shell, main

log = logging.getLogger(__name__)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    node: str
    wire_when: str = ""
    """Subject to wait for before the service is wired; empty: none."""


class Tiny:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.hang = False

    async def start(self, shell: Shell) -> None:
        self.shell = shell
        self.failing = asyncio.Event()
        self.seen = shell.observe.counter("seen", "Messages seen.")
        shell.spawn(self.fail_when_told(), "fail_when_told")
        if self.settings.wire_when:
            wired = asyncio.Event()

            async def on_wire(_: list[Message]) -> None:
                wired.set()

            await shell.bus.subscribe(self.settings.wire_when, on_wire)
            await wired.wait()
        await shell.bus.subscribe(f"tg.v1.tiny.{self.settings.node}", self.on_batch)

    async def stop(self) -> None:
        if self.hang:
            await asyncio.Event().wait()
        await self.shell.bus.publish(f"tg.v1.tiny-out.{self.settings.node}", b"stopped")

    async def on_batch(self, batch: list[Message]) -> None:
        for message in batch:
            self.seen.inc()
            with self.shell.observe.span(
                "tiny", kind="consumer", parent=message.headers or {}, subject=message.subject
            ) as span:
                if message.data == b"fail":
                    self.failing.set()
                self.hang = message.data == b"hang"
                log.info("seen", extra={"fields": {"bytes": len(message.data)}})
                await self.shell.bus.publish(
                    f"tg.v1.tiny-out.{self.settings.node}", message.data, headers=span.headers()
                )

    async def fail_when_told(self) -> None:
        await self.failing.wait()
        raise RuntimeError("told to fail")


if __name__ == "__main__":
    sys.exit(main("tiny", Settings, Tiny, sys.argv[1:]))
