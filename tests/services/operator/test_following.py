"""`tidegate audit --follow` beside a server that goes away and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.subjects import BUCKET_CONFIG, STREAM_AUDIT, subject, wildcard
from services.bus import Delivery, nats
from services.bus.embedded import EmbeddedServer
from services.operator import following
from services.operator.entries import Entry


async def test_what_is_stored_after_the_servers_return_is_shown_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(one: Delivery) -> Iterator[Entry]:
        yield {"kind": "record", "text": one.data.decode()}

    monkeypatch.setattr(following, "entries_of", told)
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    bus = await nats.connect(server.url, user=server.user, password=server.password)
    seen: list[str] = []

    async def follow() -> None:
        async for entry in following.coming(bus, wildcard("audit"), 1, set()):
            seen.append(entry.get("text") or entry["what"])

    async def until(count: int) -> None:
        async with asyncio.timeout(20):
            while len(seen) < count:  # noqa: ASYNC110 - whoever follows is told nothing else
                await asyncio.sleep(0.05)

    async def store(text: str) -> None:
        await bus.publish_stream(subject("audit", "n0"), text.encode(), message_id=text)
        await bus.flush_stream(5.0)

    task = asyncio.create_task(follow())
    try:
        await bus.ensure_stream(STREAM_AUDIT, [wildcard("audit")], max_age_s=1e5, max_bytes=1 << 20)
        await store("before")
        await until(1)
        await server.stop()
        await server.start()
        async with asyncio.timeout(20):
            while not bus.connected:  # noqa: ASYNC110 - a bus tells nobody of its connection
                await asyncio.sleep(0.05)
        await store("after")
        await until(2)
        await bus.kv_put(BUCKET_CONFIG, "pause", b"rubbish")
        await until(3)
        assert seen == ["before", "after", "unreadable: b'rubbish'"]
        assert "connection to the NATS server is lost" in capsys.readouterr().err
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await bus.drain(1.0)
        await server.stop()
