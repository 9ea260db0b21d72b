"""What the wire makes of a server's bytes, in whatever pieces they come, and what it sends."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client as NatsClient
from nats.errors import BadHeaderError, BadSubjectError, ProtocolError

from services.bus.nats_wire import SinkParser, Wire, header_block, parse_headers

LARGE = bytes(range(256)) * 300
STREAM = (
    b"PING\r\n"
    b"MSG a.b 1 5\r\nhello\r\n"
    b"MSG a.c 1 _INBOX.x 0\r\n\r\n"
    b"+OK\r\n"
    b"HMSG a.d 1 reply.to 24 26\r\nNATS/1.0\r\nkey: value\r\n\r\n\r\n\r\n"
    b"MSG other 2 2\r\nMS\r\n"
    b"HMSG s 1 16 16\r\nNATS/1.0 100\r\n\r\n\r\n"
    b"PONG\r\n" + b"MSG big 1 %d\r\n%b\r\n" % (len(LARGE), LARGE)
)


class Client:
    """What a parser asks of a nats-py client."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    async def _process_ping(self) -> None:
        self.seen.append(("ping",))

    async def _process_pong(self) -> None:
        self.seen.append(("pong",))

    async def _process_msg(self, sid, subject, reply, data, headers) -> None:
        self.seen.append(("nats-py", sid, subject, reply, data, headers))


def parser() -> tuple[SinkParser, Client]:
    client = Client()
    made = SinkParser(client)
    made.sinks[1] = lambda *message: client.seen.append(message)
    return made, client


EXPECTED = [
    ("ping",),
    ("a.b", b"hello", "", None),
    ("a.c", b"", "_INBOX.x", None),
    ("a.d", b"\r\n", "reply.to", {"key": "value"}),
    ("nats-py", 2, b"other", b"", b"MS", b""),
    ("s", b"", "", {"Status": "100"}),
    ("pong",),
    ("big", LARGE, "", None),
]


@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_messages_come_whole_and_in_order_however_the_stream_is_cut(cuts):
    made, client = parser()

    async def feed() -> None:
        for start, stop in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
            await made.parse(STREAM[start:stop])

    asyncio.run(feed())
    assert client.seen == EXPECTED
    assert not made.buf


@pytest.mark.parametrize("line", [b"MSG a 1\r\n", b"MSG a one 5\r\n", b"HMSG a 1 x 5\r\n", b"HMSG a 1 6 5\r\n"])
async def test_what_no_server_sends_is_a_protocol_error(line):
    made, _ = parser()
    with pytest.raises(ProtocolError):
        await made.parse(line)


async def test_a_sink_that_fails_loses_its_message_and_no_other(caplog):
    made, client = parser()
    made.sinks[2] = lambda *_: 1 / 0
    await made.parse(STREAM)
    assert client.seen == [one for one in EXPECTED if one[0] != "nats-py"]
    assert "could not be filed" in caplog.text


async def test_a_new_connection_begins_with_an_empty_buffer():
    made, client = parser()
    await made.parse(b"MSG a 1 1000\r\nhalf")
    made.reset()
    await made.parse(b"MSG b 1 1\r\nx\r\n")
    assert client.seen == [("b", b"x", "", None)]


@given(st.dictionaries(st.sampled_from(["traceparent", "Nats-Msg-Id", "x"]), st.text(max_size=20)))
def test_headers_come_back_without_line_breaks(headers):
    expected = {key: value.replace("\r", " ").replace("\n", " ").strip() for key, value in headers.items()}
    found = parse_headers(header_block(headers))
    assert {key: value.strip() for key, value in found.items()} == {k: v.strip() for k, v in expected.items()}


def test_a_status_line_is_told_apart_from_headers():
    assert parse_headers(b"NATS/1.0 409 Consumer Deleted\r\n\r\n") == {
        "Status": "409",
        "Description": "Consumer Deleted",
    }


def test_a_name_that_would_end_the_command_is_refused():
    wire = Wire(NatsClient())
    for subject in ("", "a b", "a\r\nPUB x 0"):
        with pytest.raises(BadSubjectError):
            wire.publish(subject, b"")
    with pytest.raises(BadHeaderError):
        wire.publish("a", b"", headers={"bad key": "x"})
    assert wire.waiting_bytes == 0
