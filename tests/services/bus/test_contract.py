"""What every bus must do, run over both implementations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from services.bus.api import Bus, Delivery, KvEntry, Message, PullConsumer
from services.errors import BusError, Conflict
from tests.services.bus.collect import Collector
from tests.services.bus.conftest import MakeBus


async def make_stream(bus: Bus) -> None:
    await bus.ensure_stream("S", ["s.*"], max_age_s=600, max_bytes=1 << 20)


async def settle(bus: Bus) -> None:
    """Return when what this bus published before has reached the bus's own subscriptions."""
    mark = Collector()
    subscription = await bus.subscribe("settle.mark", mark.on_batch)
    await bus.publish("settle.mark", b"")
    await mark.until(1)
    await subscription.unsubscribe()


async def fetch_all(consumer: PullConsumer, count: int) -> list[Delivery]:
    """Fetch and acknowledge until ``count`` came, then look whether more would."""
    got: list[Delivery] = []
    async with asyncio.timeout(5):
        while len(got) < count:
            batch = await consumer.fetch(100, 1.0)
            await consumer.ack(batch)
            got.extend(batch)
    got.extend(await consumer.fetch(100, 0.05))
    return got


def bodies(deliveries: Sequence[Delivery]) -> list[bytes]:
    return [delivery.data for delivery in deliveries]


async def test_a_message_reaches_the_subscribers_of_its_subject_with_its_headers(make_bus: MakeBus) -> None:
    sender, receiver = await make_bus(), await make_bus()
    wild, other = Collector(), Collector()
    await receiver.subscribe("tg.v1.state.*", wild.on_batch)
    await receiver.subscribe("tg.v1.action.*", other.on_batch)
    await settle(receiver)
    await sender.publish("tg.v1.state.n0", b"\x00\xff", {"traceparent": "00-ab-cd-01"})
    await sender.publish("tg.v1.state.n0", b"")
    first, second = await wild.until(2)
    assert first.subject == "tg.v1.state.n0"
    assert first.data == b"\x00\xff"
    assert dict(first.headers or {}) == {"traceparent": "00-ab-cd-01"}
    assert second == Message("tg.v1.state.n0", b"", None)
    assert other.messages == [], "another family's subject must not match"


async def test_batches_keep_the_order_and_gather_what_came_while_the_callback_was_busy(bus: Bus) -> None:
    collector = Collector()
    release = asyncio.Event()
    entered = asyncio.Event()

    async def slow_first(batch: list[Message]) -> None:
        await collector.on_batch(batch)
        entered.set()
        await release.wait()

    await bus.subscribe("a.>", slow_first)
    await bus.publish("a.first", b"first")
    await asyncio.wait_for(entered.wait(), 5)
    for i in range(50):
        await bus.publish(f"a.{i % 3}", str(i).encode())
    await settle(bus)
    release.set()
    messages = await collector.until(51)
    assert [m.data for m in messages] == [b"first", *(str(i).encode() for i in range(50))]
    assert len(collector.batches) == 2, "what arrived during one callback comes as one batch"


async def test_a_queue_group_hands_each_message_to_one_member(make_bus: MakeBus) -> None:
    one, two = await make_bus(), await make_bus()
    members, watcher = [Collector(), Collector()], Collector()
    await one.subscribe("work", members[0].on_batch, queue="g")
    await two.subscribe("work", members[1].on_batch, queue="g")
    await two.subscribe("work", watcher.on_batch)
    await settle(one)
    await settle(two)
    for i in range(40):
        await one.publish("work", str(i).encode())
    await watcher.until(40)
    await settle(one)
    await settle(two)
    got = sorted(int(d) for m in members for d in m.payloads)
    assert got == list(range(40)), "each message goes to one member of the group"


async def test_beyond_the_pending_limit_messages_are_dropped_and_counted(bus: Bus) -> None:
    collector = Collector()
    release = asyncio.Event()
    entered = asyncio.Event()

    async def stuck(batch: list[Message]) -> None:
        entered.set()
        await release.wait()
        await collector.on_batch(batch)

    subscription = await bus.subscribe("flood", stuck, pending_limit_messages=10)
    await bus.publish("flood", b"0")
    await asyncio.wait_for(entered.wait(), 5)
    for i in range(1, 31):
        await bus.publish("flood", str(i).encode())
    await settle(bus)
    assert subscription.dropped == 20, "30 came while 10 may wait"
    assert bus.counters()["dropped"] == 20
    release.set()
    await collector.until(11)
    await bus.publish("flood", b"later")
    messages = await collector.until(12)
    assert messages[-1].data == b"later", "a subscription that dropped goes on"


async def test_an_exception_in_a_callback_is_counted_logged_and_survived(
    bus: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    collector = Collector()

    async def fails_on_bad(batch: list[Message]) -> None:
        await collector.on_batch(batch)
        if batch[0].data == b"bad":
            raise ValueError("as the test wants it")

    await bus.subscribe("s", fails_on_bad)
    with caplog.at_level(logging.ERROR):
        await bus.publish("s", b"bad")
        await collector.until(1)
    await bus.publish("s", b"good")
    await collector.until(2)
    assert bus.counters()["callback_errors"] == 1
    assert "as the test wants it" in caplog.text, "the trace is in the log"


async def test_an_unsubscribed_callback_gets_nothing_more(bus: Bus) -> None:
    collector = Collector()
    subscription = await bus.subscribe("s", collector.on_batch)
    await bus.publish("s", b"1")
    await collector.until(1)
    await subscription.unsubscribe()
    await bus.publish("s", b"2")
    await settle(bus)
    assert collector.payloads == [b"1"]


async def test_drain_finishes_the_callbacks_and_later_publishes_count_as_dropped(bus: Bus) -> None:
    collector = Collector()

    async def slow(batch: list[Message]) -> None:
        await asyncio.sleep(0.02)
        await collector.on_batch(batch)

    await bus.subscribe("s", slow)
    await bus.publish("s", b"1")
    await settle(bus)
    await bus.drain()
    assert collector.payloads == [b"1"], "a batch on its way is finished before the bus closes"
    assert not bus.connected
    await bus.publish("s", b"2")
    assert bus.counters()["publish_dropped"] == 1


async def test_a_stream_stores_a_message_id_once_and_in_order(bus: Bus) -> None:
    await make_stream(bus)
    for i in (0, 1, 1, 2, 0):
        await bus.publish_stream("s.n0", str(i).encode(), message_id=f"m{i}", headers={"h": "v"})
    await bus.flush_stream(5)
    got = await fetch_all(await bus.pull_consumer("S", "d"), 3)
    assert bodies(got) == [b"0", b"1", b"2"]
    assert [d.stream_sequence for d in got] == [1, 2, 3]
    assert [d.delivered for d in got] == [1, 1, 1]
    assert (got[0].headers or {})["h"] == "v"
    assert bus.counters()["stream_failures"] == 0


async def test_a_stream_message_that_nobody_stores_is_counted_as_a_failure(bus: Bus) -> None:
    await bus.publish_stream("no.stream", b"x", message_id="1")
    await bus.flush_stream(5)
    assert bus.counters()["stream_failures"] == 1


async def test_ensure_stream_brings_new_limits_to_an_old_stream(bus: Bus) -> None:
    await make_stream(bus)
    await bus.publish_stream("s.a", bytes(3000), message_id="1")
    await bus.flush_stream(5)
    await bus.ensure_stream("S", ["s.*", "t.*"], max_age_s=60, max_bytes=5000)
    await bus.publish_stream("t.a", bytes(3000), message_id="2")
    await bus.flush_stream(5)
    got = await fetch_all(await bus.pull_consumer("S", "d"), 1)
    assert [d.subject for d in got] == ["t.a"], "the oldest message made room"


async def test_a_fetch_waits_for_the_first_message_and_gives_up_in_time(bus: Bus) -> None:
    await make_stream(bus)
    consumer = await bus.pull_consumer("S", "d")
    assert await consumer.fetch(10, 0.05) == []
    waiting = asyncio.ensure_future(consumer.fetch(10, 5))
    await bus.publish_stream("s.a", b"x", message_id="1")
    assert bodies(await waiting) == [b"x"]


async def test_a_backlog_comes_in_full_batches(bus: Bus) -> None:
    await make_stream(bus)
    for i in range(250):
        await bus.publish_stream("s.a", str(i).encode(), message_id=str(i))
    await bus.flush_stream(5)
    consumer = await bus.pull_consumer("S", "d")
    sizes = []
    for _ in range(3):
        batch = await consumer.fetch(100, 2)
        await consumer.ack(batch)
        sizes.append(len(batch))
    assert sizes == [100, 100, 50]


async def test_what_was_not_acknowledged_comes_again_and_what_was_does_not(bus: Bus) -> None:
    await make_stream(bus)
    for i in range(3):
        await bus.publish_stream("s.a", str(i).encode(), message_id=str(i))
    await bus.flush_stream(5)
    consumer = await bus.pull_consumer("S", "d")
    first = await consumer.fetch(3, 5)
    await consumer.ack([first[0], first[2]])
    again = await consumer.fetch(3, 5)
    assert bodies(again) == [b"1"]
    assert again[0].delivered == 2
    await consumer.ack(again)


@pytest.mark.parametrize("start", [1, 4, 6])
async def test_a_consumer_starts_where_the_checkpoint_says_whatever_was_acknowledged(
    make_bus: MakeBus, start: int
) -> None:
    bus = await make_bus()
    await make_stream(bus)
    for i in range(1, 9):
        await bus.publish_stream("s.a", str(i).encode(), message_id=str(i))
    await bus.flush_stream(5)
    consumer = await bus.pull_consumer("S", "learner")
    await consumer.ack(await consumer.fetch(5, 5))
    await consumer.stop()
    later = await (await make_bus()).pull_consumer("S", "learner", start_sequence=start)
    got = await fetch_all(later, 9 - start)
    assert [d.stream_sequence for d in got] == list(range(start, 9))


async def test_a_position_beyond_the_end_belongs_to_another_stream_and_everything_comes(bus: Bus) -> None:
    await make_stream(bus)
    await bus.publish_stream("s.a", b"x", message_id="1")
    await bus.flush_stream(5)
    got = await fetch_all(await bus.pull_consumer("S", "d", start_sequence=500), 1)
    assert bodies(got) == [b"x"]


async def test_a_key_is_put_read_and_guarded_by_its_revision(bus: Bus) -> None:
    assert await bus.kv_get("b", "k") is None
    first = await bus.kv_put("b", "k", b"1", revision=0)
    second = await bus.kv_put("b", "k", b"2", revision=first)
    assert second > first
    assert await bus.kv_get("b", "k") == KvEntry("k", b"2", second)
    with pytest.raises(Conflict, match=f"b/k: revision {first} was expected"):
        await bus.kv_put("b", "k", b"3", revision=first)
    with pytest.raises(Conflict):
        await bus.kv_put("b", "k", b"3", revision=0)
    assert await bus.kv_put("b", "k", b"") > second
    empty = await bus.kv_get("b", "k")
    assert empty is not None
    assert empty.value == b"", "an empty value is not a deleted one"


async def test_a_watch_gives_the_entry_then_each_revision_once_and_in_order(make_bus: MakeBus) -> None:
    writer, reader = await make_bus(), await make_bus()
    await writer.kv_put("b", "k", b"old")
    await writer.kv_put("b", "k", b"now")
    seen: list[KvEntry] = []
    started, done = asyncio.Event(), asyncio.Event()

    async def watch() -> None:
        async for entry in reader.kv_watch("b", "k"):
            seen.append(entry)
            started.set()
            if len(seen) == 21:
                done.set()

    watching = asyncio.ensure_future(watch())
    await asyncio.wait_for(started.wait(), 5)
    for i in range(20):
        await writer.kv_put("b", "other", b"noise")
        await writer.kv_put("b", "k", str(i).encode())
    await asyncio.wait_for(done.wait(), 5)
    assert [e.value for e in seen] == [b"now", *(str(i).encode() for i in range(20))]
    revisions = [e.revision for e in seen]
    assert revisions == sorted(set(revisions))
    await reader.drain()
    await asyncio.wait_for(watching, 2)


async def test_a_watch_may_start_before_the_key_exists(make_bus: MakeBus) -> None:
    writer, reader = await make_bus(), await make_bus()
    watch = reader.kv_watch("b", "k")
    first = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.02)
    await writer.kv_put("b", "k", b"1")
    assert (await asyncio.wait_for(first, 3)).value == b"1"
    await reader.drain()


async def test_an_object_of_many_chunks_comes_back_whole(make_bus: MakeBus) -> None:
    writer, reader = await make_bus(), await make_bus()
    data = bytes(range(256)) * 2000
    assert await reader.object_get("w", "weights-1") is None
    await writer.object_put("w", "weights-1", data)
    await writer.object_put("w", "weights-2", b"other")
    assert await reader.object_get("w", "weights-1") == data
    await writer.object_put("w", "weights-1", b"replaced")
    assert await reader.object_get("w", "weights-1") == b"replaced"


async def test_a_watch_with_wildcards_gives_every_kept_revision_of_every_key(make_bus: MakeBus) -> None:
    writer, watcher = await make_bus(), await make_bus()
    await writer.kv_put("b", "mode", b"1")
    await writer.kv_put("b", "mode.worker.w_2f0", b"2")
    await writer.kv_put("b", "mode", b"3")
    assert [(e.key, e.value, e.revision) for e in await watcher.kv_history("b")] == [
        ("mode", b"1", 1),
        ("mode.worker.w_2f0", b"2", 2),
        ("mode", b"3", 3),
    ]
    assert [e.revision for e in await watcher.kv_history("b", "mode")] == [1, 3]
    assert await watcher.kv_history("b", "absent") == []
    async with asyncio.timeout(5):
        seen: list[KvEntry] = []
        async for entry in watcher.kv_watch("b", ">"):
            seen.append(entry)
            if len(seen) == 3:
                await writer.kv_put("b", "pause", b"4")
            if len(seen) == 4:
                break
    assert [(e.key, e.revision) for e in seen][2:] == [("mode", 3), ("pause", 4)]


async def test_a_stream_is_read_without_a_place_of_ones_own(bus: Bus) -> None:
    await make_stream(bus)
    assert await bus.stream_span("absent") is None
    assert [one async for one in bus.stream_read("S", "s.*")] == []
    for k in range(6):
        await bus.publish_stream(f"s.{k % 2}", bytes([k]), message_id=str(k))
    await bus.flush_stream(5)
    assert await bus.stream_span("S") == (1, 6)
    every = [one async for one in bus.stream_read("S", "s.*")]
    assert bodies(every) == [bytes([k]) for k in range(6)]
    assert [one.stream_sequence for one in every] == [1, 2, 3, 4, 5, 6]
    assert bodies([one async for one in bus.stream_read("S", "s.1", start_sequence=3)]) == [b"\x03", b"\x05"]
    assert [one async for one in bus.stream_read("S", "s.*", since_ns=every[-1].stored_ns + 10**9)] == []
    assert len([one async for one in bus.stream_read("S", "s.*", since_ns=every[0].stored_ns - 10**9)]) == 6
    followed: list[Delivery] = []
    async with asyncio.timeout(5):
        async for one in bus.stream_read("S", "s.*", start_sequence=6, follow=True):
            followed.append(one)
            if len(followed) == 1:
                await bus.publish_stream("s.0", b"new", message_id="new")
            else:
                break
    assert bodies(followed) == [b"\x05", b"new"]
    with pytest.raises(BusError):
        _ = [one async for one in bus.stream_read("absent", "s.*")]
