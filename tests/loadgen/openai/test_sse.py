"""Server-sent events come out whole however the bytes were cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.openai import sse
from loadgen.openai.sse import EventParser, EventTooLarge

STREAM = (
    b'\xef\xbb\xbf: a comment\r\n\r\ndata: {"a": 1}\r\n\r\n'
    b"event: error\rdata:two\rdata: lines\r\rid: 7\nretry: 3\ndatabase: no\ndata\n\n"
    + "data: häß😀\n\n".encode()
    + b"data: [DONE]\n\n"
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"", "häß😀".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_do_not_depend_on_where_the_stream_is_cut(cuts: list[int]) -> None:
    parser, edges = EventParser(), sorted([0, *cuts, len(STREAM)])
    found = [one for a, b in itertools.pairwise(edges) for one in parser.feed(STREAM[a:b])]
    assert found == EVENTS, "line ends, comments, other fields, a byte order mark and cut characters all occur in it"
    assert parser.feed(b"\n\n") == [], "nothing is left over"


def test_byte_by_byte_gives_the_same() -> None:
    parser = EventParser()
    assert [one for at in range(len(STREAM)) for one in parser.feed(STREAM[at : at + 1])] == EVENTS


def test_an_event_without_its_empty_line_is_not_given() -> None:
    parser = EventParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.feed(b"\n") == [b"half"]


@pytest.mark.parametrize("chunk", [b"data: " + b"x" * 64, b"data: " + b"x" * 20 + b"\n"])
def test_an_event_without_end_is_refused(chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 50)
    parser = EventParser()
    with pytest.raises(EventTooLarge, match="more than 50 bytes"):
        [parser.feed(chunk) for _ in range(4)]
