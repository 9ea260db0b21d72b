"""Tracing with the OpenTelemetry SDK: where spans go, which traces are sampled, and a recorded span.

Imported only when tracing is on. Nothing global is set: no tracer provider, no propagator, no exit hook.
The standard OTEL_* variables are honoured; every decision is parent-based, whatever the sampler's name,
because half a trace is worth nothing.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import Token
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from services.errors import SettingsError
from services.settings import CommonSettings, nearest
from services.spans import (
    Attribute,
    Kind,
    NullSpan,
    Span,
    TraceContext,
    current_trace_id,
    format_context,
    parse_context,
)
from services.tracefile import TraceFile, TraceFileExporter

QUEUE_SPANS = 8192
"""Ended spans waiting for export in one process; beyond it the oldest go, and the SDK logs that once."""
DELAY_MS = 1000.0
"""Longest wait of an ended span for its export."""

_KINDS = {"internal": SpanKind.INTERNAL, "producer": SpanKind.PRODUCER, "consumer": SpanKind.CONSUMER}
_OPERATIONS = {"producer": ("send", "publish"), "consumer": ("process", "process")}
_SAMPLERS = ("always_on", "always_off", "traceidratio")

log = logging.getLogger(__name__)


def destinations(settings: CommonSettings, environ: Mapping[str, str], *, otlp: bool) -> list[SpanExporter]:
    """The exporters that the settings name. OTLP ones read their own details (headers, certificates, timeout,
    compression) from the standard variables. Raises SettingsError, UserError."""
    exporters: list[SpanExporter] = []
    protocol = _protocol(environ) if otlp else ""
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        exporters.append(GrpcExporter())
    elif protocol:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        exporters.append(HttpExporter())
    if settings.trace_file:
        exporters.append(TraceFileExporter(TraceFile.open(Path(settings.trace_file))))
    return exporters


def root_ratio(settings: CommonSettings, environ: Mapping[str, str]) -> float:
    """Share of new traces to sample: the setting, else OTEL_TRACES_SAMPLER, else all of them (its default)."""
    if settings.trace_ratio is not None:
        return settings.trace_ratio
    variable = "environment variable OTEL_TRACES_SAMPLER"
    sampler = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    name = sampler.removeprefix("parentbased_")
    if name not in _SAMPLERS:
        known = {prefix + one for prefix in ("", "parentbased_") for one in _SAMPLERS}
        raise SettingsError(variable, "sampler", repr(sampler), nearest(sampler, known))
    if name != "traceidratio":
        return 1.0 if name == "always_on" else 0.0
    text = environ.get("OTEL_TRACES_SAMPLER_ARG", "").strip() or "1.0"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise SettingsError(f"{variable}_ARG", "ratio", repr(text), "a number from 0 to 1")
    return ratio


class Tracer:
    """Begins spans of one process and hands the ended ones to its exporters.

    Starts one export thread per exporter. ``rng`` decides which new traces are sampled.
    """

    def __init__(
        self,
        exporters: Sequence[SpanExporter],
        *,
        service: str,
        instance: str,
        ratio: float,
        environ: Mapping[str, str],
        rng: random.Random,
    ) -> None:
        self._ratio = ratio
        self._rng = rng
        self._processors = [
            BatchSpanProcessor(exporter, max_queue_size=QUEUE_SPANS, schedule_delay_millis=DELAY_MS)
            for exporter in exporters
        ]
        # The sampling is decided before the SDK is asked, so that an unsampled span never reaches it.
        provider = TracerProvider(
            sampler=ALWAYS_ON, resource=_resource(service, instance, environ), shutdown_on_exit=False
        )
        for processor in self._processors:
            provider.add_span_processor(processor)
        self._tracer = provider.get_tracer("tidegate")
        # Receivers must learn that the trace is not sampled, or each would decide anew and make fragments.
        unsampled = TraceContext(f"{rng.getrandbits(128) | 1:032x}", f"{rng.getrandbits(64) | 1:016x}", False, "")
        self._unsampled_root = NullSpan(format_context(unsampled))

    def span(
        self,
        name: str,
        kind: Kind,
        parent: Mapping[str, str] | None,
        links: Sequence[Mapping[str, str] | None],
        attributes: Mapping[str, Attribute] | None,
        subject: str,
    ) -> Span:
        """See ``Observe.span``."""
        context = parse_context(parent)
        if context is not None and not context.sampled:
            return NullSpan(parent)
        linked = [one for one in map(parse_context, links) if one is not None]
        if context is None:
            sampled = any(one.sampled for one in linked) or (not linked and self._rng.random() < self._ratio)
            if not sampled:
                return self._unsampled_root
        told: dict[str, Attribute] = dict(attributes or {})
        if kind != "internal":
            told["messaging.system"] = "nats"
            told["messaging.operation.type"], told["messaging.operation.name"] = _OPERATIONS[kind]
            if subject:
                told["messaging.destination.name"] = subject
            if links:
                told["messaging.batch.message_count"] = len(links)
        begun = self._tracer.start_span(
            name,
            context=Context() if context is None else _parent_context(context),
            kind=_KINDS[kind],
            attributes=told,
            links=[trace.Link(_sdk_context(one)) for one in linked],
        )
        return RecordedSpan(begun, self._tracer)

    def shutdown(self, timeout_s: float) -> bool:
        """Export what is queued; False if not done in ``timeout_s`` (a collector that does not answer)."""
        deadline = time.monotonic() + timeout_s
        # In threads of their own, since the SDK's own limit is 30 s and exporters may sleep between retries.
        threads = [threading.Thread(target=processor.shutdown, daemon=True) for processor in self._processors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in threads)
        if not done:
            log.warning("spans given up: not exported in time", extra={"fields": {"timeout_s": timeout_s}})
        return done


class RecordedSpan:
    """A sampled span of the SDK."""

    __slots__ = ("_span", "_token", "_tracer")

    recording = True

    def __init__(self, span: trace.Span, tracer: trace.Tracer) -> None:
        self._span = span
        self._tracer = tracer
        self._token: Token[str] | None = None

    def headers(self) -> dict[str, str] | None:
        context = self._span.get_span_context()
        return format_context(
            TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", True, context.trace_state.to_header())
        )

    def set(self, key: str, value: Attribute) -> None:
        self._span.set_attribute(key, value)

    def child(self, name: str, attributes: Mapping[str, Attribute] | None = None) -> RecordedSpan:
        context = trace.set_span_in_context(self._span, Context())
        return RecordedSpan(self._tracer.start_span(name, context=context, attributes=attributes), self._tracer)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()

    def __enter__(self) -> RecordedSpan:
        self._token = current_trace_id.set(f"{self._span.get_span_context().trace_id:032x}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._span.is_recording():
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, f"{type(error).__name__}: {error}"))
        if self._token is not None:
            current_trace_id.reset(self._token)
            self._token = None
        self.end()


def _sdk_context(context: TraceContext) -> SpanContext:
    return SpanContext(
        int(context.trace_id, 16),
        int(context.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if context.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([context.state]) if context.state else TraceState(),
    )


def _parent_context(context: TraceContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(_sdk_context(context)), Context())


def _resource(service: str, instance: str, environ: Mapping[str, str]) -> Resource:
    attributes = {"service.namespace": "tidegate", "service.instance.id": instance}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = service
    return Resource.create(attributes)


def _protocol(environ: Mapping[str, str]) -> str:
    """``grpc`` or ``http/protobuf``. Unset: by the port, since 4317 means gRPC everywhere and 4318 HTTP."""
    for variable in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(variable, "").strip()
        if protocol:
            if protocol not in ("grpc", "http/protobuf"):
                raise SettingsError(
                    f"environment variable {variable}", "protocol", repr(protocol), "grpc or http/protobuf"
                )
            return protocol
    endpoint = environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or ""
    try:
        port = urlsplit(endpoint).port
    except ValueError as error:
        raise SettingsError(
            "environment variable OTEL_EXPORTER_OTLP_ENDPOINT", "port", repr(endpoint), str(error)
        ) from error
    return "grpc" if port == 4317 else "http/protobuf"
