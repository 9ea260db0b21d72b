"""What a span is to its user, and the W3C trace context that carries it in message headers. No SDK in here:
this module is all that a service without tracing loads.

Parsing never raises: headers come from elsewhere, and a bad one means a new trace, never an error.
Source: W3C Trace Context, section 3 (https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import Literal, NamedTuple, Protocol

Kind = Literal["internal", "producer", "consumer"]
Attribute = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

current_trace_id: ContextVar[str] = ContextVar("tidegate_trace_id", default="")
"""Hex id of the sampled trace in whose span this task is, for the log lines; empty outside of one."""

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]{1,512}")


class TraceContext(NamedTuple):
    """A remote span: ids in hex, as they travel."""

    trace_id: str
    span_id: str
    sampled: bool
    state: str


def parse_context(headers: Mapping[str, str] | None) -> TraceContext | None:
    """The trace context of message headers; None when there is none or it is not well formed."""
    if not headers:
        return None
    text = headers.get(TRACEPARENT)
    match = _PARENT.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version ff is forbidden, 00 has no further parts, zeros are no ids; later versions only append.
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    state = headers.get(TRACESTATE, "")
    if not isinstance(state, str) or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), state)


def format_context(context: TraceContext) -> dict[str, str]:
    """Headers that carry ``context`` on."""
    headers = {TRACEPARENT: f"00-{context.trace_id}-{context.span_id}-{'01' if context.sampled else '00'}"}
    if context.state:
        headers[TRACESTATE] = context.state
    return headers


class Span(Protocol):
    """An operation being timed. A context manager: an exception that leaves it marks the span as failed."""

    @property
    def recording(self) -> bool:
        """False for the null span: skip work that only a recorded span would need."""
        ...

    def headers(self) -> dict[str, str] | None:
        """What a message sent by this operation carries, so that its receiver continues the trace."""
        ...

    def set(self, key: str, value: Attribute) -> None: ...

    def child(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> Span:
        """A part of this operation, in this process."""
        ...

    def end(self) -> None:
        """For a span that no ``with`` block holds; a second call does nothing."""
        ...

    def __enter__(self) -> Span: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NullSpan:
    """Records nothing, costs next to nothing, and hands on the trace context that it was given."""

    __slots__ = ("_parent",)

    recording = False

    def __init__(self, parent: Mapping[str, str] | None = None) -> None:
        self._parent = parent

    def headers(self) -> dict[str, str] | None:
        context = parse_context(self._parent)
        return None if context is None else format_context(context)

    def set(self, key: str, value: Attribute) -> None:
        pass

    def child(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> NullSpan:
        return self

    def end(self) -> None:
        pass

    def __enter__(self) -> NullSpan:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


NULL_SPAN = NullSpan()
"""The one for operations that no message began."""
