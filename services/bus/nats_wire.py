"""The hot path of a nats-py client: messages in and out without a task and some coroutines for each.

nats-py reads a message through three regular expressions, a queue and a task per subscription, and sends one
through three coroutines and another task: 10 to 20 us a message, and two turns of the event loop more in a
node's step. Here a message that came is handed to its sink by the reader itself, and what is sent is written at
the end of the turn, or at once when it is much. Everything else (connecting, pings, requests, JetStream) stays
nats-py's business. This module alone knows its insides: the parser that it feeds, and the list of what is to be
sent. Protocol: https://docs.nats.io/reference/reference-protocols/nats-protocol
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Final

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.protocol.parser import Parser

logger = logging.getLogger(__name__)

Sink = Callable[[str, bytes, str, Mapping[str, str] | None], None]
"""Takes subject, data, reply subject (empty: none) and headers of a message; must only file it."""

WRITE_AT_BYTES: Final = 256 * 1024
"""So much is written at once, before the turn ends: the next service may begin with the first nodes of a step."""
SOCKET_LIMIT_BYTES: Final = 1024 * 1024
"""Bytes that the socket has not taken yet from which nats-py's own flusher waits for it."""
_CRLF: Final = b"\r\n"
_BLANK: Final = re.compile(r"[ \t\r\n]")
_HEADER_KEY: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_NEWLINES: Final = str.maketrans("\r\n", "  ")


class Wire:
    """Reads and writes for ``client``, which must not be connected yet."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._parser = SinkParser(client)
        client._ps = self._parser
        self._due = False

    async def subscribe(self, subject: str, sink: Sink, queue: str = "") -> Subscription:
        """Hand every message to ``sink``, in order. nats errors pass through."""

        async def on_message(message: Msg) -> None:  # those that came before the sink was in its place
            sink(message.subject, message.data, message.reply, message.headers)

        subscription = await self._client.subscribe(subject, queue, cb=on_message)
        self._parser.sinks[subscription._id] = sink
        return subscription

    def forget(self, subscription: Subscription) -> None:
        """Hand its messages to nobody any more."""
        self._parser.sinks.pop(subscription._id, None)

    @property
    def waiting_bytes(self) -> int:
        """What is to be sent and was not handed to the socket yet."""
        return self._client.pending_data_size

    def publish(self, subject: str, data: bytes, reply: str = "", headers: Mapping[str, str] | None = None) -> None:
        """Send a message soon, of a size that the server takes; only while connected. BadSubjectError and
        BadHeaderError as nats-py raises them."""
        target = _target(subject)
        if reply:
            target += b" " + reply.encode()
        if headers:
            block = header_block(headers)
            command = b"HPUB %b %d %d\r\n%b%b\r\n" % (target, len(block), len(block) + len(data), block, data)
        else:
            command = b"PUB %b %d\r\n%b\r\n" % (target, len(data), data)
        client = self._client
        client.stats["out_msgs"] += 1
        client.stats["out_bytes"] += len(data)
        client._pending.append(command)
        client._pending_data_size += len(command)
        if client._pending_data_size >= WRITE_AT_BYTES:
            self.flush()
        elif not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._flush_due)

    def flush(self) -> None:
        """Write what is to be sent, or leave it to nats-py's flusher while the socket takes no more."""
        client = self._client
        if not client._pending or not client.is_connected or client._transport is None:
            return
        if _unsent_bytes(client) > SOCKET_LIMIT_BYTES:
            queue = client._flush_queue
            if queue is not None and queue.empty():
                queue.put_nowait(asyncio.get_running_loop().create_future())
            return
        pending, client._pending = client._pending, []
        client._pending_data_size = 0
        client._transport.write(b"".join(pending))

    def _flush_due(self) -> None:
        self._due = False
        self.flush()


class SinkParser(Parser):
    """nats-py's parser with a short way for messages whose subscription has a sink."""

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self.sinks: dict[int, Sink] = {}

    def reset(self) -> None:
        super().reset()
        self._wanted_bytes = 0

    async def parse(self, data: bytes = b"") -> None:
        """Take what was read. ProtocolError for what no server sends."""
        if self.buf:
            self.buf += data
            if len(self.buf) < self._wanted_bytes:
                return
            data = bytes(self.buf)
            self.buf.clear()
        at = self._wanted_bytes = 0
        while (end := data.find(_CRLF, at)) >= 0:
            if not data.startswith((b"MSG ", b"HMSG "), at):
                self.buf += data[at : end + 2]
                await super().parse()
                at = end + 2
                continue
            words = data[at:end].split()
            headed = words[0] == b"HMSG"
            try:
                sid, size = int(words[2]), int(words[-1])
                head = int(words[-2]) if headed else 0
            except (IndexError, ValueError):
                size = head = -1
            if not (0 <= head <= size and 4 <= len(words) - headed <= 5):
                raise nats.errors.ProtocolError(f"malformed {data[at:end]!r}")
            begin = end + 2
            stop = begin + size
            if stop + 2 > len(data):
                self._wanted_bytes = stop + 2 - at
                break
            reply = words[3] if len(words) == 5 + headed else b""
            sink = self.sinks.get(sid)
            if sink is None:
                block = data[begin : begin + head] if headed else b""
                await self.nc._process_msg(sid, words[1], reply, data[begin + head : stop], block)
            else:
                headers = parse_headers(data[begin : begin + head]) if headed else None
                try:
                    sink(words[1].decode(), data[begin + head : stop], reply.decode(), headers)
                except Exception:
                    logger.exception("a message on %r could not be filed", words[1])
            at = stop + 2
        self.buf += data[at:]


def header_block(headers: Mapping[str, str]) -> bytes:
    """Headers as they travel; a line break in a value becomes a space."""
    lines = ["NATS/1.0"]
    for key, value in headers.items():
        lines.append(f"{_header_key(key)}: {value.translate(_NEWLINES).strip()}")
    return "\r\n".join([*lines, "", ""]).encode()


def parse_headers(block: bytes) -> dict[str, str]:
    """Headers that came, a status line as ``Status`` and ``Description``; lines that are none are passed over."""
    first, _, lines = block.partition(_CRLF)
    headers: dict[str, str] = {}
    status = first[len(b"NATS/1.0") :].strip().decode("utf-8", "replace")
    if status:
        headers["Status"], _, description = status.partition(" ")
        if description:
            headers["Description"] = description
    for line in lines.split(_CRLF):
        key, colon, value = line.partition(b":")
        if colon:
            headers[key.strip().decode("utf-8", "replace")] = value.strip().decode("utf-8", "replace")
    return headers


@functools.lru_cache(maxsize=1 << 18)
def _target(subject: str) -> bytes:
    """The subject as it travels, checked once: a blank in it would end the command."""
    if not subject or _BLANK.search(subject):
        raise nats.errors.BadSubjectError
    return subject.encode()


@functools.lru_cache(maxsize=1024)
def _header_key(key: str) -> str:
    if not _HEADER_KEY.fullmatch(key):
        raise nats.errors.BadHeaderError(key)
    return key


def _unsent_bytes(client: Client) -> int:
    """What the socket has not taken; 0 where the transport does not tell (a web socket)."""
    writer = getattr(client._transport, "_io_writer", None)
    return 0 if writer is None else int(writer.transport.get_write_buffer_size())
