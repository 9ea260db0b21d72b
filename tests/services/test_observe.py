"""Traces continue across processes, cost nothing where they are not wanted, and never fail on bad headers."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from services.errors import SettingsError, UserError
from services.observe import Observe
from services.settings import CommonSettings
from services.spans import NULL_SPAN, NullSpan, TraceContext, current_trace_id, format_context, parse_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}


class Traced:
    """An Observe that writes to a file, and what the file holds after it stopped."""

    def __init__(self, path: Path, ratio: float | None = 1.0, environ: dict[str, str] | None = None) -> None:
        self.path = path
        self.observe = Observe("featurizer")
        settings = CommonSettings(trace_file=str(path), trace_ratio=ratio)
        self.observe.start(settings, environ or {}, instance="n0-1", rng=random.Random(7))

    def spans(self) -> list[dict[str, Any]]:
        assert self.observe.stop(5.0), "a file takes spans at once"
        requests = [json.loads(line) for line in self.path.read_text().splitlines()]
        return [
            span
            for request in requests
            for resource in request["resourceSpans"]
            for scope in resource["scopeSpans"]
            for span in scope["spans"]
        ]


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Traced]:
    traced = Traced(tmp_path / "spans.jsonl")
    yield traced
    traced.observe.stop(5.0)


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def test_without_tracing_the_null_span_hands_the_context_on() -> None:
    observe = Observe("telemetry")
    assert not observe.tracing
    assert observe.span("sample") is NULL_SPAN
    assert NULL_SPAN.headers() is None
    span = observe.span("featurize", parent={**SAMPLED, "Nats-Msg-Id": "1"})
    assert isinstance(span, NullSpan)
    assert span.headers() == SAMPLED, "only the trace context goes on, not the message's other headers"
    assert observe.span("featurize", parent={"traceparent": "rubbish"}).headers() is None


def test_a_sampled_trace_continues(traced: Traced) -> None:
    with traced.observe.span("decide", kind="consumer", parent=SAMPLED, subject="tg.v1.state.n0") as span:
        headers = span.headers()
        assert headers is not None
        with span.child("compact", {"moves": 3}) as child:
            child.set("ratio", 0.5)
    decide, compact = sorted(traced.spans(), key=lambda one: one["name"], reverse=True)
    assert (decide["traceId"], decide["parentSpanId"]) == (TRACE, SPAN)
    assert headers == {"traceparent": f"00-{TRACE}-{decide['spanId']}-01"}
    assert decide["kind"] == 5, "CONSUMER"
    assert attributes(decide) == {
        "messaging.system": "nats",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "tg.v1.state.n0",
    }
    assert (compact["traceId"], compact["parentSpanId"], compact["kind"]) == (TRACE, decide["spanId"], 1)
    assert attributes(compact) == {"moves": "3", "ratio": 0.5}, "OTLP-JSON writes 64-bit integers as text"


def test_an_unsampled_trace_costs_a_null_span_and_stays_unsampled(traced: Traced) -> None:
    span = traced.observe.span("decide", parent=UNSAMPLED, links=[SAMPLED])
    assert isinstance(span, NullSpan)
    assert span.headers() == UNSAMPLED
    assert span.child("compact") is span
    assert traced.spans() == []


def test_a_new_trace_that_is_not_sampled_tells_its_receivers_so(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "spans.jsonl", ratio=0.0)
    span = traced.observe.span("sample", kind="producer")
    assert isinstance(span, NullSpan)
    context = parse_context(span.headers())
    assert context is not None, "without headers every receiver would decide anew and make fragments"
    assert not context.sampled
    assert traced.spans() == []


@pytest.mark.parametrize("ratio", [0.25, 0.75])
def test_new_traces_are_sampled_by_ratio(ratio: float, tmp_path: Path) -> None:
    traced = Traced(tmp_path / "spans.jsonl", ratio=ratio)
    recorded = 0
    for _ in range(1000):
        span = traced.observe.span("sample")
        recorded += span.recording
        span.end()
    traced.observe.stop(5.0)
    assert abs(recorded / 1000 - ratio) < 0.05, "the seed is fixed, so this is one answer, not luck"


def test_a_batch_links_its_messages_and_is_sampled_when_one_of_them_was(tmp_path: Path) -> None:
    traced = Traced(tmp_path / "spans.jsonl", ratio=0.0)
    assert not traced.observe.span("update", links=[UNSAMPLED, None]).recording
    with traced.observe.span("update", kind="consumer", links=[UNSAMPLED, None, SAMPLED]):
        pass
    (span,) = traced.spans()
    assert [link["spanId"] for link in span["links"]] == [SPAN, SPAN]
    assert "parentSpanId" not in span
    assert attributes(span)["messaging.batch.message_count"] == "3"


def test_an_exception_marks_the_span_and_goes_on(traced: Traced) -> None:
    def decide() -> None:
        with traced.observe.span("decide", parent=SAMPLED):
            assert current_trace_id.get() == TRACE, "log lines inside name the trace"
            raise ZeroDivisionError("division by zero")

    with pytest.raises(ZeroDivisionError):
        decide()
    assert current_trace_id.get() == ""
    (span,) = traced.spans()
    assert span["status"] == {"code": 2, "message": "ZeroDivisionError: division by zero"}
    assert span["events"][0]["name"] == "exception"


def test_several_processes_append_whole_lines_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    first, second = Traced(path), Traced(path)
    for traced in (first, second):
        traced.observe.span("sample").end()
    assert len(first.spans()) == 1
    assert len(second.spans()) == 2
    resource = json.loads(path.read_text().splitlines()[0])["resourceSpans"][0]["resource"]
    told = attributes(resource)
    assert (told["service.name"], told["service.instance.id"]) == ("featurizer", "n0-1")


def test_the_lines_are_otlp(traced: Traced) -> None:
    """Read by the protocol's own message after hex ids became base64, the one difference to protobuf's JSON."""
    from base64 import b64encode

    from google.protobuf import json_format  # type: ignore[import-untyped]
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    with traced.observe.span("decide", parent=SAMPLED, links=[SAMPLED], attributes={"q": float("nan")}) as span:
        span.set("names", ["a", "b"])
        span.set("ok", True)
    traced.spans()

    def as_protobuf(value: Any) -> Any:
        if isinstance(value, list):
            return [as_protobuf(one) for one in value]
        if not isinstance(value, dict):
            return value
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: b64encode(bytes.fromhex(one)).decode() if key in ids else as_protobuf(one)
            for key, one in value.items()
        }

    (line,) = traced.path.read_text().splitlines()
    request = json_format.ParseDict(as_protobuf(json.loads(line)), ExportTraceServiceRequest())
    (parsed,) = request.resource_spans[0].scope_spans[0].spans
    assert parsed.trace_id.hex() == TRACE
    assert parsed.parent_span_id.hex() == SPAN
    assert {one.key for one in parsed.attributes} == {"q", "names", "ok"}
    assert 0 < parsed.start_time_unix_nano <= parsed.end_time_unix_nano


def hexadecimal(shortest: int, longest: int) -> st.SearchStrategy[str]:
    return st.text("0123456789abcdef", min_size=shortest, max_size=longest)


garbage = st.one_of(
    st.none(),
    st.text(),
    st.integers(),
    st.binary(),
    st.lists(st.text()),
    st.builds("-".join, st.tuples(hexadecimal(2, 2), hexadecimal(30, 34), hexadecimal(14, 18), hexadecimal(1, 3))),
    st.builds("{}{}".format, st.just(SAMPLED["traceparent"]), st.text(max_size=5)),
    st.sampled_from(
        [
            f"ff-{TRACE}-{SPAN}-01",
            f"00-{TRACE}-{SPAN}-01-more",
            f"00-{'0' * 32}-{SPAN}-01",
            f"00-{TRACE}-{'0' * 16}-01",
            f"00-{TRACE.upper()}-{SPAN}-01",
            f"00-{TRACE}-{SPAN}-01\r\nEvil: yes",
        ]
    ),
)


@given(headers=st.dictionaries(st.sampled_from(["traceparent", "tracestate", "other"]), garbage))
def test_any_headers_make_a_span_and_only_good_ones_continue(headers: dict[str, Any]) -> None:
    context = parse_context(headers)
    if context is not None:
        assert parse_context(format_context(context)) == context
        assert len(context.trace_id) == 32
        assert "\n" not in "".join(format_context(context).values()), "no header may smuggle in another"
    NullSpan(headers).headers()


def test_garbage_starts_a_new_trace(traced: Traced) -> None:
    bad: list[Any] = [{"traceparent": value} for value in ("", "x", 5, f"ff-{TRACE}-{SPAN}-01")] + [{}, None]
    for headers in bad:
        with traced.observe.span("decide", parent=headers):
            pass
    spans = traced.spans()
    assert len({span["traceId"] for span in spans}) == len(bad), "each begins its own"
    assert all("parentSpanId" not in span for span in spans)


def test_the_state_of_other_vendors_travels_along(traced: Traced) -> None:
    with traced.observe.span("decide", parent={**SAMPLED, "tracestate": "vendor=1"}) as span:
        headers = span.headers()
    assert headers is not None
    assert headers["tracestate"] == "vendor=1"
    context = parse_context({**SAMPLED, "tracestate": "bad\nstate"})
    assert context == TraceContext(TRACE, SPAN, True, "")


@pytest.mark.parametrize(
    ("environ", "recorded"),
    [
        ({}, True),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, False),
        ({"OTEL_TRACES_SAMPLER": "parentbased_always_on"}, True),
    ],
)
def test_the_standard_variables_choose_the_sampler(environ: dict[str, str], recorded: bool, tmp_path: Path) -> None:
    traced = Traced(tmp_path / "spans.jsonl", ratio=None, environ=environ)
    traced.observe.span("sample").end()
    assert len(traced.spans()) == recorded


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"OTEL_TRACES_SAMPLER": "allways_on"}, "the known key 'always_on'"),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "2"}, "from 0 to 1"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "smoke"},
            "grpc or http/protobuf",
        ),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:x"}, "port"),
    ],
)
def test_a_standard_variable_that_cannot_be_used_is_named(environ: dict[str, str], told: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=told):
        Traced(tmp_path / "spans.jsonl", ratio=None, environ=environ)


def test_a_trace_file_that_cannot_be_written_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        Traced(tmp_path / "nowhere" / "spans.jsonl")


def test_metric_names_carry_the_service() -> None:
    observe = Observe("decision")
    observe.counter("rejected", "Samples left out, by reason.", ["reason"]).labels("stale").inc(2)
    observe.gauge("tidegate_decision_workers", "Workers decided for.").set(8)
    observe.counters_from("bus", lambda: {"dropped": 3})
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(observe.render().decode())
        for sample in family.samples
    }
    assert values["tidegate_decision_rejected_total"] == 2
    assert values["tidegate_decision_workers"] == 8
    assert values["tidegate_decision_bus_dropped_total"] == 3
    for name in ("tidegate_learner_steps", "Steps", "a-b"):
        with pytest.raises(ValueError, match="expected lower case words after 'tidegate_decision_'"):
            observe.counter(name, "not ours")
