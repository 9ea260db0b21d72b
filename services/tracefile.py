"""Spans as OTLP-JSON lines in a file: tracing without a collector.

Each line is one ExportTraceServiceRequest in OTLP's JSON form (ids in hex, enums and 32-bit numbers as
numbers, 64-bit ones as text), the format that the collector's ``otlpjsonfile`` receiver reads. Several
processes append to one file: each line goes out in a single write with O_APPEND, so lines never mix.
Source: OTLP specification, section "JSON Protobuf Encoding".
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from services.errors import UserError

_KINDS = {
    SpanKind.INTERNAL: 1,
    SpanKind.SERVER: 2,
    SpanKind.CLIENT: 3,
    SpanKind.PRODUCER: 4,
    SpanKind.CONSUMER: 5,
}
_STATUSES = {StatusCode.UNSET: 0, StatusCode.OK: 1, StatusCode.ERROR: 2}


class TraceFile:
    """An open file that takes whole lines. ``open`` does the I/O; several processes may append to one path."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> TraceFile:
        """Raises UserError when the file cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            return cls(os.open(path, flags, 0o644))
        except OSError as error:
            raise UserError(f"trace_file {path}: found {error.strerror}, expected a file to write to") from error

    def append(self, line: bytes) -> None:
        """One write, so that lines of several processes never mix. Raises OSError when not all was taken."""
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"{written} of {len(line)} bytes written")

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class TraceFileExporter(SpanExporter):
    """The end of a span pipeline that writes to a TraceFile."""

    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._file.append(encode_line(spans))
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def encode_line(spans: Sequence[ReadableSpan]) -> bytes:
    """Spans of one process as a line of OTLP-JSON; they share the first one's resource."""
    resource = spans[0].resource if spans else Resource.get_empty()
    scope = spans[0].instrumentation_scope if spans else None
    scope_spans: dict[str, Any] = {"spans": [_span(span) for span in spans]}
    if scope is not None:
        scope_spans["scope"] = {"name": scope.name, "version": scope.version or ""}
    request = {
        "resourceSpans": [
            {"resource": {"attributes": _attributes(resource.attributes)}, "scopeSpans": [scope_spans]},
        ]
    }
    return json.dumps(request, separators=(",", ":")).encode() + b"\n"


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.context
    assert context is not None, "a span that has ended has a context"
    status: dict[str, Any] = {"code": _STATUSES[span.status.status_code]}
    if span.status.description:
        status["message"] = span.status.description
    told: dict[str, Any] = {
        **_ids(context),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time or 0),
        "endTimeUnixNano": str(span.end_time or 0),
        "attributes": _attributes(span.attributes),
        "events": [
            {"timeUnixNano": str(event.timestamp), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
        "links": [{**_ids(link.context), "attributes": _attributes(link.attributes)} for link in span.links],
        "status": status,
        "flags": int(context.trace_flags),
    }
    if span.parent is not None:
        told["parentSpanId"] = f"{span.parent.span_id:016x}"
    return told


def _ids(context: SpanContext) -> dict[str, str]:
    ids = {"traceId": f"{context.trace_id:032x}", "spanId": f"{context.span_id:016x}"}
    if context.trace_state:
        ids["traceState"] = context.trace_state.to_header()
    return ids


def _attributes(attributes: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in (attributes or {}).items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):  # before int, which it also is
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        # JSON has no NaN and no infinities; protobuf's JSON form spells them as text.
        return {"doubleValue": value if abs(value) < float("inf") else _spelled(value)}
    if isinstance(value, (list, tuple)):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"stringValue": str(value)}


def _spelled(value: float) -> str:
    return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
