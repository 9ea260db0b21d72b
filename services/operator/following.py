"""What is stored and changed from now on, across losses of the connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Final

from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY, STREAM_AUDIT
from services.bus import Bus
from services.errors import BusUnavailable
from services.operator.entries import POINTERS, Entry, change_of, entries_of
from services.operator.session import warn

LOOK_S: Final = 0.5
"""Between looks at the connection, and for a stream that nobody made yet."""


async def coming(
    bus: Bus, where: str | None, next_sequence: int, known: set[tuple[str, str, int]]
) -> AsyncIterator[Entry]:
    """Until cancelled: records of the subjects that match ``where`` (None: none) from ``next_sequence`` on, and changes
    but for the ``known`` ones. BusError when the stream cannot be read for another reason than the connection."""
    queue: asyncio.Queue[Entry] = asyncio.Queue(10_000)

    async def changes(bucket: str) -> None:
        async for entry in bus.kv_watch(bucket, ">"):
            if (bucket, entry.key, entry.revision) not in known and (bucket != BUCKET_POLICY or entry.key in POINTERS):
                await queue.put(change_of(bucket, entry))

    tasks = [asyncio.create_task(changes(bucket)) for bucket in (BUCKET_CONFIG, BUCKET_POLICY)]
    if where is not None:
        tasks.append(asyncio.create_task(_records(bus, where, next_sequence, queue)))
    try:
        while True:
            getting = asyncio.ensure_future(queue.get())
            done, _ = await asyncio.wait([getting, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if getting not in done:
                getting.cancel()
                for task in done:
                    task.result()
                return
            yield getting.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _records(bus: Bus, where: str, next_sequence: int, queue: asyncio.Queue[Entry]) -> None:
    """A server that was away has forgotten who read: whoever goes on waiting waits for ever, and sees nothing. So a
    lost connection ends the reading, and another one begins after the last record that was seen."""

    async def read() -> None:
        nonlocal next_sequence
        while await bus.stream_span(STREAM_AUDIT) is None:  # noqa: ASYNC110 - the server tells nobody of a new stream
            await asyncio.sleep(LOOK_S)
        async for one in bus.stream_read(STREAM_AUDIT, where, start_sequence=next_sequence, follow=True):
            for entry in entries_of(one):
                await queue.put(entry)
            next_sequence = one.stream_sequence + 1

    while True:
        reading = asyncio.create_task(read())
        before = bus.counters()["reconnects"]
        try:
            while not reading.done() and bus.connected and bus.counters()["reconnects"] == before:
                await asyncio.wait([reading], timeout=LOOK_S)
            if reading.done():
                with contextlib.suppress(BusUnavailable):
                    reading.result()
                    return
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        warn("warning: the connection to the NATS server is lost; what was stored meanwhile comes when it is back")
        await asyncio.sleep(LOOK_S)
        while not bus.connected:  # noqa: ASYNC110 - a bus tells nobody of its connection
            await asyncio.sleep(LOOK_S)
