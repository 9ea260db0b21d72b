"""Spans reach a real OTLP receiver over both protocols, by the standard variables alone."""

from __future__ import annotations

import random

import pytest
from opentelemetry import trace

from services.observe import Observe
from services.settings import CommonSettings
from tests.services.otlp_receiver import GrpcReceiver, HttpReceiver

PARENT = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.mark.parametrize(("receiver_type", "protocol"), [(GrpcReceiver, "grpc"), (HttpReceiver, "http/protobuf")])
def test_spans_reach_a_receiver(
    receiver_type: type[GrpcReceiver] | type[HttpReceiver], protocol: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = trace.get_tracer_provider()
    with receiver_type() as receiver:
        environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
        for name, value in environ.items():  # the exporters read the process's own environment
            monkeypatch.setenv(name, value)
        observe = Observe("decision")
        observe.start(CommonSettings(), environ, instance="n0-1", rng=random.Random(1))
        with observe.span("decide", kind="consumer", parent=PARENT, subject="tg.v1.state.n0"):
            pass
        assert observe.stop(5.0)
        ((service, span),) = receiver.received.spans()
    assert service == "decision"
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert trace.get_tracer_provider() is before, "nothing global is set, so tests cannot disturb one another"


@pytest.mark.parametrize("variable", ["OTEL_SDK_DISABLED=true", "OTEL_TRACES_EXPORTER=none", "OTHER=1"])
def test_tracing_can_be_left_off(variable: str) -> None:
    name, _, value = variable.partition("=")
    environ = {name: value}
    if name != "OTHER":
        environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    observe = Observe("decision")
    observe.start(CommonSettings(), environ, instance="n0-1", rng=random.Random(1))
    assert not observe.tracing
    assert observe.stop(0.1), "nothing to send is soon sent"
