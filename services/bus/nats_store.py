"""KV buckets and objects on JetStream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError
from nats.js.kv import KeyValue
from nats.js.object_store import ObjectStore

from services.bus.api import KvEntry
from services.bus.memory_store import is_pattern
from services.bus.nats_reader import read
from services.bus.waiting import Signal
from services.errors import BusUnavailable, Conflict

logger = logging.getLogger(__name__)

KV_HISTORY: Final = 64
"""Revisions a bucket keeps per key (the server's most), so that a watcher that fell behind sees each of them."""

POLL_S: Final = 1.0
"""The slow poll beside a watch."""

EAGER_S: Final = (0.002, 0.01, 0.05)
"""Pauses before looking again after a hint: the hint may overtake what it announces."""

OBJECT_LIMIT_S: Final = 30.0


class NatsStore:
    """Buckets are made at their first use; nats errors pass through."""

    def __init__(self, context: JetStreamContext, client: Client) -> None:
        self._context = context
        self._client = client
        self._poll_context: JetStreamContext = client.jetstream(timeout=POLL_S)
        self._watches: set[Signal] = set()
        self._looks: set[asyncio.Future[KvEntry | None]] = set()
        self._buckets: dict[str, KeyValue] = {}
        self._objects: dict[str, ObjectStore] = {}

    async def _bucket(self, name: str) -> KeyValue:
        if name not in self._buckets:
            try:
                self._buckets[name] = await self._context.key_value(name)
            except NotFoundError:
                self._buckets[name] = await self._context.create_key_value(bucket=name, history=KV_HISTORY)
        return self._buckets[name]

    async def put(self, bucket: str, key: str, value: bytes, revision: int | None) -> int:
        store = await self._bucket(bucket)
        try:
            if revision is None:
                return await store.put(key, value)
            if revision == 0:
                return await store.create(key, value)
            return await store.update(key, value, last=revision)
        except KeyWrongLastSequenceError:
            raise Conflict(bucket, key, revision or 0) from None

    async def get(self, bucket: str, key: str) -> KvEntry | None:
        store = await self._bucket(bucket)
        try:
            entry = await store.get(key)
        except KeyNotFoundError as error:
            deleted = error.entry
            return None if deleted is None else KvEntry(key, None, deleted.revision)
        return KvEntry(key, entry.value or b"", entry.revision or 0)

    async def _stored(self, bucket: str, key: str, after: int | None) -> KvEntry | None:
        """The last revision of a key (or of those that match its wildcards), or with ``after`` the first above it."""
        subject = f"$KV.{bucket}.{key}"
        try:
            if after is None:
                raw = await self._poll_context.get_msg(f"KV_{bucket}", subject=subject)
            else:
                raw = await self._poll_context.get_msg(f"KV_{bucket}", seq=after + 1, subject=subject, next=True)
        except NotFoundError:
            return None
        deleted = bool(raw.headers and raw.headers.get("KV-Operation"))
        name = (raw.subject or subject).removeprefix(f"$KV.{bucket}.")
        return KvEntry(name, None if deleted else raw.data or b"", raw.seq or 0)

    async def watch(self, bucket: str, key: str) -> AsyncIterator[KvEntry]:
        """The entry, then each revision once and in order, until the client closes.

        A core subscription on the key's subject only hints that there is something to read: unlike the
        consumer behind nats-py's watch it lives through a server's restart, and a hint that was lost is made
        up by the poll and by a look after every reconnect. The values are read by sequence from the stream."""
        news = Signal()

        async def on_hint(_: Msg) -> None:
            news.notify()

        hint = await self._client.subscribe(f"$KV.{bucket}.{key}", cb=on_hint)
        self._watches.add(news)
        seen: int | None = 0 if is_pattern(key) else None  # with wildcards, from the oldest revision kept
        pauses: Iterator[float] = iter(())
        reconnects = self._client.stats["reconnects"]
        try:
            while not self._client.is_closed:
                mark = news.count
                answered, entry = await self._look(bucket, key, seen)
                if entry is not None:
                    seen = entry.revision
                    yield entry
                    continue
                if answered:
                    seen = seen or 0
                    if reconnects != (now := self._client.stats["reconnects"]):
                        # A server that came back with an empty store counts revisions from the start.
                        _, last = await self._look(bucket, key, None)
                        seen, reconnects = (0 if last and last.revision < seen else seen), now
                if news.count != mark:
                    pauses = iter(EAGER_S)
                elif (pause_s := next(pauses, None)) is not None:
                    await asyncio.sleep(pause_s)
                else:
                    await news.wait(POLL_S)
                    pauses = iter(EAGER_S if news.count != mark else ())
        finally:
            self._watches.discard(news)
            if not self._client.is_closed:
                try:
                    await hint.unsubscribe()
                except nats.errors.Error as error:
                    logger.debug("ending the watch of %s/%s: %s", bucket, key, error)

    async def history(self, bucket: str, key: str) -> list[KvEntry]:
        """The kept revisions of the keys that match, in order."""
        await self._bucket(bucket)
        entries = []
        async for one in read(self._context, f"KV_{bucket}", f"$KV.{bucket}.{key}"):
            deleted = bool(one.headers and one.headers.get("KV-Operation"))
            name = one.subject.removeprefix(f"$KV.{bucket}.")
            entries.append(KvEntry(name, None if deleted else one.data, one.stream_sequence, one.stored_ns))
        return entries

    async def _look(self, bucket: str, key: str, seen: int | None) -> tuple[bool, KvEntry | None]:
        """Whether the server answered, and the next entry to hand on if there is one."""
        if not self._client.is_connected:
            return False, None
        look = asyncio.ensure_future(self._ask(bucket, key, seen))
        self._looks.add(look)
        try:
            await asyncio.wait([look])
            return (False, None) if look.cancelled() else (True, look.result())
        except (nats.errors.Error, OSError) as error:
            logger.debug("watching %s/%s: %s", bucket, key, error)
            return False, None
        finally:
            self._looks.discard(look)
            look.cancel()

    async def _ask(self, bucket: str, key: str, seen: int | None) -> KvEntry | None:
        if not seen:
            await self._bucket(bucket)
        return await self._stored(bucket, key, seen)

    def connection_lost(self) -> None:
        """Give up what will not be answered any more, so that the watches can look again at once."""
        for look in self._looks:
            look.cancel()

    def wake(self) -> None:
        """Let the watches look now: the connection came back, or closed for good."""
        for news in self._watches:
            news.notify()

    async def _object_store(self, bucket: str) -> ObjectStore:
        if bucket not in self._objects:
            try:
                self._objects[bucket] = await self._context.object_store(bucket)
            except NotFoundError:
                self._objects[bucket] = await self._context.create_object_store(bucket)
        return self._objects[bucket]

    async def object_put(self, bucket: str, name: str, data: bytes) -> None:
        store = await self._object_store(bucket)
        await asyncio.wait_for(store.put(name, data), OBJECT_LIMIT_S)

    async def object_get(self, bucket: str, name: str) -> bytes | None:
        store = await self._object_store(bucket)
        try:
            found = await asyncio.wait_for(store.get(name), OBJECT_LIMIT_S)
        except NotFoundError:
            return None
        if found.info.size and not found.data:
            raise BusUnavailable(f"object {bucket}/{name} came without its {found.info.size} bytes")
        return bytes(found.data or b"")
