"""NATS when its server is killed, stopped, missing or too slow: a real server each time."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest

from services.bus.api import Bus, Delivery, KvEntry, Message, PullConsumer
from services.bus.embedded import EmbeddedServer
from services.bus.nats import NatsBus, connect
from services.errors import BusError, BusUnavailable, UserError
from tests.services.bus.collect import Collector, eventually
from tests.services.bus.conftest import connect_to


async def until_connected(bus: Bus, wanted: bool = True) -> None:
    await eventually(lambda: bus.connected is wanted)


async def restart(server: EmbeddedServer, *buses: Bus) -> None:
    """Kill -9, wait until everybody noticed, start on the same port and store, wait until all are back."""
    await server.kill()
    for bus in buses:
        await until_connected(bus, False)
    await server.start()
    for bus in buses:
        await until_connected(bus)


async def publish_ten(bus: Bus, first: int) -> None:
    for i in range(first, first + 10):
        await bus.publish_stream("s.n0", str(i).encode(), message_id=f"m{i}")
    await bus.flush_stream(5)


class Reader:
    """Fetches, handles and acknowledges in the background as the learner does."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.handled: list[Delivery] = []

    async def run(self, consumer: PullConsumer) -> None:
        self.consumer = consumer
        while True:
            batch = await self.consumer.fetch(100, 0.5)
            self.handled.extend(batch)
            await self.consumer.ack(batch)

    async def until(self, count: int) -> list[int]:
        await eventually(lambda: len(self.handled) >= count)
        return [int(d.data) for d in self.handled]


@pytest.fixture
async def reading(nats_bus: NatsBus, server: EmbeddedServer) -> AsyncIterator[Reader]:
    await nats_bus.ensure_stream("S", ["s.*"], max_age_s=600, max_bytes=1 << 20)
    reader = Reader(await connect_to(server))
    task = asyncio.ensure_future(reader.run(await reader.bus.pull_consumer("S", "learner")))
    yield reader
    task.cancel()
    await asyncio.wait([task])
    await reader.bus.drain(timeout_s=2)


async def test_publish_ten_kill_restart_publish_ten_each_is_handled_once(
    nats_bus: NatsBus, server: EmbeddedServer, reading: Reader
) -> None:
    await publish_ten(nats_bus, 0)
    assert await reading.until(10) == list(range(10))
    await restart(server, nats_bus, reading.bus)
    await publish_ten(nats_bus, 10)
    assert await reading.until(20) == list(range(20))
    await asyncio.sleep(1.3)  # longer than the ack wait: a lost acknowledgement would bring a message again
    assert [int(d.data) for d in reading.handled] == list(range(20)), "no message is handled twice"
    assert reading.consumer.rebinds == 1
    assert reading.bus.counters()["rebinds"] == 1
    assert nats_bus.counters()["stream_failures"] == 0


async def test_a_producer_that_repeats_its_last_ten_after_the_restart_stores_them_once(
    nats_bus: NatsBus, server: EmbeddedServer, reading: Reader
) -> None:
    await publish_ten(nats_bus, 0)
    await reading.until(10)  # what is under way at the kill comes again later, in no promised order
    await restart(server, nats_bus, reading.bus)
    await publish_ten(nats_bus, 0)
    await publish_ten(nats_bus, 10)
    assert await reading.until(20) == list(range(20)), "message ids live through the restart"


async def test_what_was_handed_out_before_the_kill_can_be_acknowledged_after_it(
    nats_bus: NatsBus, server: EmbeddedServer
) -> None:
    await nats_bus.ensure_stream("S", ["s.*"], max_age_s=600, max_bytes=1 << 20)
    await publish_ten(nats_bus, 0)
    consumer = await nats_bus.pull_consumer("S", "d")
    batch = await consumer.fetch(10, 5)
    await restart(server, nats_bus)
    await consumer.ack(batch)
    assert await consumer.fetch(10, 1.5) == [], "acknowledged by sequence, whatever the server remembers"


async def test_a_consumer_that_the_server_forgot_is_made_again_where_it_stood(
    nats_bus: NatsBus, reading: Reader
) -> None:
    await publish_ten(nats_bus, 0)
    await reading.until(10)
    await nats_bus.client.jetstream().delete_consumer("S", "learner")
    await publish_ten(nats_bus, 10)
    assert await reading.until(20) == list(range(20))
    assert reading.consumer.rebinds == 1


async def test_a_kv_change_is_seen_within_3_s_of_the_servers_return_each_revision_once(
    nats_bus: NatsBus, server: EmbeddedServer
) -> None:
    reader = await connect_to(server)
    first = await nats_bus.kv_put("tg_policy", "champion", b"v1")
    seen: list[KvEntry] = []
    came = asyncio.Event()

    async def watch() -> None:
        async for entry in reader.kv_watch("tg_policy", "champion"):
            seen.append(entry)
            came.set()

    watching = asyncio.ensure_future(watch())
    await asyncio.wait_for(came.wait(), 5)
    await restart(server, nats_bus)
    back_s = asyncio.get_running_loop().time()
    second = await nats_bus.kv_put("tg_policy", "champion", b"v2")
    third = await nats_bus.kv_put("tg_policy", "champion", b"v3")
    async with asyncio.timeout(10):
        while len(seen) < 3:
            came.clear()
            await came.wait()
    took_s = asyncio.get_running_loop().time() - back_s
    assert took_s < 3, f"seen {took_s:.2f} s after the return"
    assert [(e.value, e.revision) for e in seen] == [(b"v1", first), (b"v2", second), (b"v3", third)]
    await reader.drain()
    await asyncio.wait_for(watching, 2)


async def test_core_subscriptions_go_on_after_a_restart_and_publishes_meanwhile_are_dropped_and_counted(
    nats_bus: NatsBus, server: EmbeddedServer
) -> None:
    collector = Collector()
    await nats_bus.subscribe("tg.v1.state.*", collector.on_batch)
    await nats_bus.publish("tg.v1.state.n0", b"before")
    await collector.until(1)
    await server.kill()
    await until_connected(nats_bus, False)
    for _ in range(7):
        await nats_bus.publish("tg.v1.state.n0", b"meanwhile")
    with pytest.raises(BusUnavailable, match="not connected"):
        await nats_bus.kv_get("tg_config", "x")
    await nats_bus.publish_stream("s.n0", b"meanwhile", message_id="1")
    await server.start()
    await until_connected(nats_bus)
    await nats_bus.publish("tg.v1.state.n0", b"after")
    await collector.until(2)
    assert collector.payloads == [b"before", b"after"], "what was published while away is not queued"
    counters = nats_bus.counters()
    assert counters["publish_dropped"] == 7
    assert counters["stream_failures"] == 1
    assert counters["reconnects"] == 1


async def test_a_server_that_hangs_never_blocks_a_publisher(nats_bus: NatsBus, server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(5):
            for _ in range(60):
                await nats_bus.publish("tg.v1.state.n0", bytes(1 << 20))
                await asyncio.sleep(0)
        assert nats_bus.counters()["publish_dropped"] > 0, "beyond the send limit messages are dropped and counted"
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_stream_messages_in_flight_at_the_kill_are_counted_as_failed(
    nats_bus: NatsBus, server: EmbeddedServer
) -> None:
    await nats_bus.ensure_stream("S", ["s.*"], max_age_s=600, max_bytes=1 << 20)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    for i in range(5):
        await nats_bus.publish_stream("s.n0", b"x", message_id=str(i))
    await server.kill()
    await eventually(lambda: nats_bus.counters()["stream_failures"] == 5)


async def test_drops_inside_the_client_are_counted_for_their_subscription(nats_bus: NatsBus) -> None:
    collector = Collector()
    subscription = await nats_bus.subscribe("flood", collector.on_batch, pending_limit_messages=10)
    for i in range(500):
        await nats_bus.publish("flood", str(i).encode())
    await eventually(lambda: len(collector.messages) + subscription.dropped == 500)
    assert subscription.dropped > 0
    assert collector.payloads[:10] == [str(i).encode() for i in range(10)]


async def test_a_payload_beyond_the_servers_limit_is_an_error_that_names_both(nats_bus: NatsBus) -> None:
    with pytest.raises(BusError, match="9437184 bytes, the server takes 8388608"):
        await nats_bus.publish("s", bytes(9 << 20))
    assert nats_bus.connected


async def test_draining_while_disconnected_ends_in_time(server: EmbeddedServer) -> None:
    bus = await connect_to(server)
    finished = asyncio.Event()

    async def slow(_: list[Message]) -> None:
        await asyncio.sleep(0.05)
        finished.set()

    await bus.subscribe("s", slow)
    await server.kill()
    await until_connected(bus, False)
    async with asyncio.timeout(5):
        await bus.drain(timeout_s=1)
    assert not bus.connected


async def test_refused_credentials_are_the_users_mistake(server: EmbeddedServer) -> None:
    with pytest.raises(UserError, match="refused the credentials of user 'tidegate'"):
        await connect(server.url, user="tidegate", password="wrong")


async def test_a_malformed_url_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="NATS URL 'nats://:x'"):
        await connect("nats://:x")


async def test_nobody_at_the_address_is_said_in_time(server: EmbeddedServer) -> None:
    await server.stop()
    with pytest.raises(BusUnavailable, match=r"within 0\.4 s"):
        await connect(server.url, first_connect_limit_s=0.4)


async def test_a_server_that_is_frozen_is_said_not_to_answer(server: EmbeddedServer) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(BusUnavailable, match=r"\(no answer\)"):
            await connect(server.url, first_connect_limit_s=2.2)  # nats-py gives up a try after 2 s
    finally:
        os.kill(server.pid, signal.SIGCONT)


async def test_the_first_connection_waits_for_a_server_that_comes_late(server: EmbeddedServer) -> None:
    await server.stop()
    connecting = asyncio.ensure_future(connect_to(server))
    await asyncio.sleep(0.15)
    await server.start()
    bus = await asyncio.wait_for(connecting, 5)
    assert bus.connected
    await bus.drain()
