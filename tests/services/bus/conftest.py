"""A fresh bus for every test: in memory, or NATS with a server of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from services.bus.api import Bus
from services.bus.embedded import EmbeddedServer
from services.bus.memory import MemoryBus, MemoryNetwork
from services.bus.nats import NatsBus, connect

ACK_WAIT_S = 1.0

MakeBus = Callable[[], Awaitable[Bus]]


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    """A NATS server on a free port."""
    own = EmbeddedServer(tmp_path / "nats")
    await own.start()
    yield own
    await own.stop()


async def connect_to(server: EmbeddedServer) -> NatsBus:
    return await connect(server.url, user=server.user, password=server.password, ack_wait_s=ACK_WAIT_S)


@pytest.fixture
async def nats_bus(server: EmbeddedServer) -> AsyncIterator[NatsBus]:
    bus = await connect_to(server)
    yield bus
    await bus.drain(timeout_s=2)


@pytest.fixture(params=["memory", "nats"])
async def make_bus(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[MakeBus]:
    """Makes buses that see each other, of either implementation."""
    made: list[Bus] = []
    network = MemoryNetwork(ack_wait_s=ACK_WAIT_S)
    server = EmbeddedServer(tmp_path / "nats")
    if request.param == "nats":
        await server.start()

    async def make() -> Bus:
        bus: Bus = MemoryBus(network) if request.param == "memory" else await connect_to(server)
        made.append(bus)
        return bus

    yield make
    for bus in made:
        await bus.drain(timeout_s=2)
    await server.stop()


@pytest.fixture
async def bus(make_bus: MakeBus) -> Bus:
    return await make_bus()
