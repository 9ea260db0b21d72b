"""Three bare NATS hops: what the loop could cost at best on this machine.

As in the loop, four processes stand in a row: this one sends a burst of messages as large as samples, a relay
passes each on as large as a state, the next one as large as an action, and the end notes when it came. They use
nats-py and nothing of Tidegate, and encode, decode and keep nothing.

``python -m loadgen.bench.hops relay FROM TO BYTES`` and ``... end FROM`` are the processes behind the first; the
server's address and credentials come in the variables of the services.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from numpy.typing import NDArray

from loadgen.demo.processes import Processes
from services.bus.embedded import EmbeddedServer
from services.errors import TidegateError
from services.lifetime import die_with_parent

START_LIMIT_S: Final = 30.0
_STAMP_BYTES: Final = 8
_REPORT: Final = "bench.report"


class BareHops:
    """The hops' processes and the connection that feeds them. ``payload_bytes``: of the three messages in a row."""

    def __init__(self, server: EmbeddedServer, processes: Processes, payload_bytes: tuple[int, int, int]) -> None:
        self._server = server
        self._processes = processes
        self._payload_bytes = payload_bytes
        self._client = Client()
        self._sent = 0

    async def start(self) -> None:
        """Start the processes and wait until a message went all the way. TidegateError when none does."""
        server = self._server
        environment = {
            "TIDEGATE_COMMON_NATS_URL": server.url,
            "TIDEGATE_COMMON_NATS_USER": server.user,
            "TIDEGATE_COMMON_NATS_PASSWORD": server.password,
            "TIDEGATE_COMMON_PARENT_PID": str(os.getpid()),
        }
        _, second, third = self._payload_bytes
        for name, arguments in (
            ("hop-1", ["relay", "bench.a", "bench.b", str(second)]),
            ("hop-2", ["relay", "bench.b", "bench.c", str(third)]),
            ("hop-3", ["end", "bench.c"]),
        ):
            await self._processes.start(name, ["-m", "loadgen.bench.hops", *arguments], environment)
        await self._client.connect(server.url, user=server.user, password=server.password)
        deadline_s = time.monotonic() + START_LIMIT_S
        while not len(await self._arrived()):
            self._processes.check()
            if time.monotonic() > deadline_s:
                raise TidegateError(f"bare hops: no message arrived within {START_LIMIT_S:g} s")
            await self.burst(1)
            await asyncio.sleep(0.1)

    async def burst(self, messages: int) -> None:
        """Send ``messages`` at once, each with the moment at which it was sent."""
        filler = bytes(max(self._payload_bytes[0] - _STAMP_BYTES, 0))
        for _ in range(messages):
            await self._client.publish("bench.a", _stamp() + filler)
        self._sent += messages

    async def latencies_ms(self) -> NDArray[np.float64]:
        """Of all messages sent so far, float64 [messages] in order of arrival."""
        latencies = await self._arrived()
        for _ in range(100):
            if len(latencies) >= self._sent:
                break
            await asyncio.sleep(0.1)
            latencies = await self._arrived()
        return latencies

    async def stop(self) -> None:
        """Close the connection; the processes end with the others."""
        await self._client.close()

    async def _arrived(self) -> NDArray[np.float64]:
        try:
            answer = await self._client.request(_REPORT, timeout=1.0)
        except Exception:  # noqa: BLE001  # nobody there yet, or not in time: asked again by the caller
            return np.empty(0)
        return np.frombuffer(answer.data, "<f8")


def _stamp() -> bytes:
    return time.monotonic_ns().to_bytes(_STAMP_BYTES, "little")


async def _connect() -> Client:
    client = Client()
    environ = os.environ
    await client.connect(
        environ["TIDEGATE_COMMON_NATS_URL"],
        user=environ["TIDEGATE_COMMON_NATS_USER"],
        password=environ["TIDEGATE_COMMON_NATS_PASSWORD"],
    )
    return client


async def _relay(source: str, target: str, payload_bytes: int) -> None:
    """Pass messages on, each with its stamp, until the process is stopped."""
    client = await _connect()
    filler = bytes(max(payload_bytes - _STAMP_BYTES, 0))

    async def pass_on(message: Msg) -> None:
        await client.publish(target, message.data[:_STAMP_BYTES] + filler)

    await client.subscribe(source, cb=pass_on)
    await client.flush()
    await asyncio.Event().wait()


async def _end(source: str) -> None:
    """Note how long each message took; answer with all of them."""
    client = await _connect()
    latencies: list[float] = []

    async def arrive(message: Msg) -> None:
        sent_ns = int.from_bytes(message.data[:_STAMP_BYTES], "little")
        latencies.append((time.monotonic_ns() - sent_ns) * 1e-6)

    async def report(message: Msg) -> None:
        await message.respond(np.array(latencies, "<f8").tobytes())

    await client.subscribe(source, cb=arrive)
    await client.subscribe(_REPORT, cb=report)
    await client.flush()
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    """Be one of the processes behind the first."""
    die_with_parent(int(os.environ["TIDEGATE_COMMON_PARENT_PID"]))
    role, *arguments = argv
    work = _end(arguments[0]) if role == "end" else _relay(arguments[0], arguments[1], int(arguments[2]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
