"""One connected trace per node and step, as a real OTLP receiver got it from the five processes."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.e2e.loop import RunningLoop
from tests.services.otlp_receiver import GrpcReceiver

pytestmark = pytest.mark.asyncio(loop_scope="package")

TREE = {
    "telemetry sample": ("telemetry", "", Span.SPAN_KIND_PRODUCER),
    "featurize": ("featurizer", "telemetry sample", Span.SPAN_KIND_CONSUMER),
    "decide": ("decision", "featurize", Span.SPAN_KIND_CONSUMER),
    "actuate": ("actuator", "decide", Span.SPAN_KIND_CONSUMER),
    "transition": ("featurizer", "actuate", Span.SPAN_KIND_PRODUCER),
}
"""Name: service, name of the parent, kind."""

Trace = dict[str, list[tuple[str, Span]]]


def traces_of(receiver: GrpcReceiver) -> dict[bytes, Trace]:
    traces: dict[bytes, Trace] = defaultdict(lambda: defaultdict(list))
    for service, span in receiver.received.spans():
        traces[span.trace_id][span.name].append((service, span))
    return traces


async def test_each_step_is_one_trace_through_all_processes(loop: RunningLoop, receiver: GrpcReceiver) -> None:
    newest = loop.witness.samples[-1]
    deadline_s = time.monotonic() + 20.0
    while True:
        traces = traces_of(receiver)
        whole = {
            trace_id: spans
            for trace_id, spans in traces.items()
            if spans.keys() >= TREE.keys() and _step(spans) > newest.step and _boot_is(spans)
        }
        learned = {
            link.span_id
            for spans in traces.values()
            for service, span in spans.get("learn", [])
            for link in span.links
            if service == "learner"
        }
        judged = [spans["transition"][0][1].span_id in learned for spans in whole.values()]
        if sum(judged) >= 5:
            break
        assert time.monotonic() < deadline_s, (
            f"{len(whole)} whole traces, {sum(judged)} of them linked by the learner, of {len(traces)} traces"
        )
        await loop.until_stepped(4, "the loop goes on")

    for spans in whole.values():
        for name, (service, parent, kind) in TREE.items():
            ((found, span),) = spans[name]
            assert found == service
            assert span.kind == kind, name
            expected = spans[parent][0][1].span_id if parent else b""
            assert span.parent_span_id == expected, f"{name} is a child of {parent or 'nobody'}"
            attributes = {one.key: one.value for one in span.attributes}
            assert attributes["messaging.system"].string_value == "nats", name
        quotas = [span for service, span in spans["quota"] if service == "actuator"]
        assert len(quotas) == 2, "a quota for each worker"
        actuate = spans["actuate"][0][1].span_id
        assert {span.parent_span_id for span in quotas} == {actuate}
        assert {span.kind for span in quotas} == {Span.SPAN_KIND_INTERNAL}

    learning = [span for spans in traces.values() for _, span in spans.get("learn", [])]
    assert all(span.kind == Span.SPAN_KIND_CONSUMER and not span.parent_span_id for span in learning), (
        "a batch has many causes: links, no parent"
    )


def _step(spans: Trace) -> int:
    attributes = {one.key: one.value.int_value for one in spans["telemetry sample"][0][1].attributes}
    return int(attributes["tidegate.step"])


def _boot_is(spans: Trace) -> bool:
    """Whether no process of this trace died in its middle: then each span is there once."""
    return all(len(spans[name]) == 1 for name in TREE)
