"""What only the in-memory network offers: faults at will."""

from __future__ import annotations

import asyncio

import pytest

from services.bus.memory import MemoryBus, MemoryNetwork
from services.bus.memory_store import matches
from services.errors import BusUnavailable
from tests.services.bus.collect import Collector


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("*.b", "a.b", True),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        ("a.b.c", "a.b", False),
    ],
)
def test_subjects_match_as_in_nats(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


async def test_a_paused_network_drops_refuses_and_comes_back_with_what_was_stored() -> None:
    network = MemoryNetwork()
    bus = MemoryBus(network)
    collector = Collector()
    await bus.subscribe("s", collector.on_batch)
    await bus.ensure_stream("S", ["t.*"], max_age_s=60, max_bytes=1000)
    await bus.publish_stream("t.1", b"1", message_id="1")
    await bus.kv_put("b", "k", b"1")
    consumer = await bus.pull_consumer("S", "d")
    network.pause()
    assert not bus.connected
    await bus.publish("s", b"lost")
    await bus.publish_stream("t.1", b"lost", message_id="2")
    assert await consumer.fetch(1, 0.01) == []
    with pytest.raises(BusUnavailable):
        await bus.kv_get("b", "k")
    network.resume()
    await bus.publish("s", b"kept")
    await collector.until(1)
    assert collector.payloads == [b"kept"]
    assert [d.data for d in await consumer.fetch(10, 1)] == [b"1"]
    assert dict(bus.counters()) == {
        "dropped": 0,
        "publish_dropped": 1,
        "callback_errors": 0,
        "stream_failures": 1,
        "reconnects": 1,
        "rebinds": 1,
    }
    await bus.drain()


async def test_a_watch_sees_a_change_made_while_its_network_was_paused() -> None:
    network = MemoryNetwork()
    bus = MemoryBus(network)
    await bus.kv_put("b", "k", b"1")
    watch = bus.kv_watch("b", "k")
    assert (await anext(watch)).value == b"1"
    network.pause()
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    network.bucket("b").put("k", b"2")
    network.resume()
    assert (await asyncio.wait_for(waiting, 1)).value == b"2"
    await bus.drain()
