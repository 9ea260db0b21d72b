"""Three bare NATS hops: what the loop could cost at best on this machine.

``python -m loadgen.bench.hops URL USER PASSWORD`` is a relay process: what comes on ``bench.a`` goes out on
``bench.b``, what comes on ``bench.c`` on ``bench.d``. The measuring process publishes on a, listens on b and passes
on to c, listens on d: three hops between two processes by way of the server, as a sample, a state and an action go.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence

import numpy as np
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from numpy.typing import NDArray


async def measure_hops(
    url: str, user: str, password: str, *, messages: int, payload_bytes: int, rounds: int, pause_s: float
) -> NDArray[np.float64]:
    """Latency of three hops in milliseconds, float64 [rounds x messages]: ``rounds`` bursts of ``messages``."""
    client = Client()
    await client.connect(url, user=user, password=password)
    latencies: list[float] = []
    done = asyncio.Event()
    expected = 0

    async def pass_on(message: Msg) -> None:
        await client.publish("bench.c", message.data)

    async def arrive(message: Msg) -> None:
        sent_ns = int.from_bytes(message.data[:8], "little")
        latencies.append((time.monotonic_ns() - sent_ns) * 1e-6)
        if len(latencies) >= expected:
            done.set()

    await client.subscribe("bench.b", cb=pass_on)
    await client.subscribe("bench.d", cb=arrive)
    await client.flush()
    filler = bytes(max(payload_bytes - 8, 0))
    async with asyncio.timeout(30):  # the relay may still be starting
        while not done.is_set():
            await client.publish("bench.a", time.monotonic_ns().to_bytes(8, "little") + filler)
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)
    latencies.clear()
    for _ in range(rounds):
        expected = len(latencies) + messages
        done.clear()
        for _ in range(messages):
            await client.publish("bench.a", time.monotonic_ns().to_bytes(8, "little") + filler)
        async with asyncio.timeout(30):
            await done.wait()
        await asyncio.sleep(pause_s)
    await client.close()
    return np.array(latencies)


async def relay(url: str, user: str, password: str) -> None:
    """Pass messages on until the process is stopped."""
    client = Client()
    await client.connect(url, user=user, password=password)

    async def a(message: Msg) -> None:
        await client.publish("bench.b", message.data)

    async def c(message: Msg) -> None:
        await client.publish("bench.d", message.data)

    await client.subscribe("bench.a", cb=a)
    await client.subscribe("bench.c", cb=c)
    await client.flush()
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> None:
    url, user, password = argv
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(relay(url, user, password))


if __name__ == "__main__":
    main(sys.argv[1:])
