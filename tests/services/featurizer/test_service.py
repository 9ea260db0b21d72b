"""The service on an in-memory bus: samples in, states and transitions out, garbage counted."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from schemas.actions import Hold
from schemas.codec import DecodeError
from schemas.outcomes import OUTCOME_BATCH
from schemas.states import STATE_BATCH, StateBatch, features_of
from schemas.subjects import STREAM_TRANSITIONS, subject, wildcard
from schemas.telemetry import NODE_SAMPLE
from schemas.transitions import TRANSITION_BATCH, TransitionBatch, columns_of
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.featurizer.service import Featurizer, Settings
from services.observe import Observe
from services.settings import CommonSettings
from services.shell import Shell

from .samples import counting, outcome, row, sample

TRACE = "00-0af7651916cd43dd8448eb211c80319c-{:016x}-01"


class Bench:
    """A featurizer between a telemetry and an actuator that the test plays."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.bus = MemoryBus(network)
        self.states: asyncio.Queue[tuple[StateBatch, Message]] = asyncio.Queue()
        self.services: list[tuple[Featurizer, Shell]] = []

    async def start(self, observe: Observe | None = None, **settings: Any) -> Shell:
        observe = observe or Observe("featurizer")
        shell = Shell("featurizer", "f", bus=MemoryBus(self.network), observe=observe, clock=ManualClock())
        service = Featurizer(Settings(window_steps=1, **settings))
        await service.start(shell)
        self.services.append((service, shell))
        return shell

    async def listen(self) -> None:
        async def heard(messages: list[Message]) -> None:
            for message in messages:
                self.states.put_nowait((STATE_BATCH.decode(message.data), message))

        await self.bus.subscribe(wildcard("state"), heard)

    async def sample(self, step: int, *, boot_id: int = 1, headers: dict[str, str] | None = None) -> StateBatch:
        now = counting(step, output_tokens=500)
        made = sample(step, [now, now], boot_id=boot_id)
        await self.bus.publish(subject("telemetry", "n0"), NODE_SAMPLE.encode(made), headers)
        async with asyncio.timeout(5):
            state, self.last = await self.states.get()
        return state

    async def outcome(self, step: int, *, boot_id: int = 1, headers: dict[str, str] | None = None) -> None:
        data = OUTCOME_BATCH.encode(outcome(step, boot_id=boot_id))
        await self.bus.publish(subject("outcome", "n0"), data, headers)
        # Outcomes have no answer of their own: two turns of the loop drain the batch.
        for _ in range(4):
            await asyncio.sleep(0)

    async def transitions(self) -> list[tuple[TransitionBatch, dict[str, str]]]:
        consumer = await self.bus.pull_consumer(STREAM_TRANSITIONS, "test")
        found = await consumer.fetch(100, 0.05)
        await consumer.stop()
        return [(TRANSITION_BATCH.decode(d.data), dict(d.headers or {})) for d in found]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench(MemoryNetwork())
    await made.listen()
    yield made
    for service, shell in made.services:
        await service.stop()
        await shell.bus.drain()
    await made.bus.drain()


def metric(shell: Shell, name: str, **labels: str) -> float:
    return shell.observe.registry.get_sample_value(f"tidegate_featurizer_{name}", labels) or 0.0


async def test_a_sample_becomes_a_state_of_the_same_step(bench: Bench) -> None:
    shell = await bench.start()
    state = await bench.sample(4)
    assert (state.node, state.boot_id, state.step) == ("n0", 1, 4)
    assert state.t_ns == 8_000_000_000, "the node's clock, echoed"
    assert state.workers == ("n0/0/w0", "n0/0/w1")
    assert state.holds == (Hold.WINDOW_FILLING, Hold.WINDOW_FILLING)
    assert state.generations == (3, 3), "what a command must be based on"
    assert features_of(state).shape[0] == 2
    assert metric(shell, "samples_total") == 1
    assert metric(shell, "held", reason="window_filling") == 2
    assert metric(shell, "workers") == 2


async def test_transitions_go_to_their_stream_once_and_in_the_trace_of_their_action(bench: Bench) -> None:
    await bench.start()
    for step in range(4):
        await bench.sample(step)
        await bench.outcome(step, headers={"traceparent": TRACE.format(step + 1)})
    found = await bench.transitions()
    assert [batch.step for batch, _ in found] == [1, 2]
    assert [headers["Nats-Msg-Id"] for _, headers in found] == ["n0:1:1", "n0:1:2"]
    assert [headers["traceparent"] for _, headers in found] == [TRACE.format(2), TRACE.format(3)], (
        "the outcome of the step that the transition judges, not of the one that completed it"
    )
    assert columns_of(found[0][0]).actions.tolist() == [1, 1]


async def test_the_trace_goes_on_from_sample_to_state(bench: Bench) -> None:
    await bench.start()
    await bench.sample(0, headers={"traceparent": TRACE.format(9)})
    assert bench.last.headers == {"traceparent": TRACE.format(9)}
    await bench.sample(1, headers={"traceparent": "nonsense"})
    assert not bench.last.headers, "a bad header begins a new trace, never an error"


@pytest.mark.parametrize("family", ["telemetry", "outcome"])
@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\xff" * 100])
async def test_what_does_not_decode_is_counted_and_dropped(bench: Bench, family: str, data: bytes) -> None:
    shell = await bench.start()
    await bench.bus.publish(f"tg.v1.{family}.n0", data)
    await bench.sample(0)
    assert metric(shell, "rejected_total", family=family, reason="malformed") == 1, "and the next one is taken"


async def test_an_unknown_version_and_a_foreign_subject_are_counted_and_dropped(bench: Bench) -> None:
    shell = await bench.start()
    newer = NODE_SAMPLE.encode(sample(0, [row()])).replace(b"\x01", b"\x02", 2)
    with pytest.raises(DecodeError):
        NODE_SAMPLE.decode(newer)
    await bench.bus.publish(subject("telemetry", "n0"), newer)
    await bench.bus.publish(subject("telemetry", "other"), NODE_SAMPLE.encode(sample(7, [row()])))
    await bench.sample(0)
    assert metric(shell, "rejected_total", family="telemetry", reason="unknown_version") == 1
    assert metric(shell, "rejected_total", family="telemetry", reason="wrong_subject") == 1


async def test_an_outcome_of_a_node_that_was_never_sampled_is_counted(bench: Bench) -> None:
    shell = await bench.start()
    await bench.outcome(3)
    await bench.sample(4)
    assert metric(shell, "pairing_total", reason="unknown_node") == 1


async def test_a_featurizer_killed_and_started_again_holds_until_its_windows_are_full(bench: Bench) -> None:
    await bench.start()
    for step in range(3):
        state = await bench.sample(step)
        await bench.outcome(step)
    assert state.holds == (0, 0)
    service, shell = bench.services.pop()
    await service.stop()
    await shell.bus.drain()
    await bench.start()
    state = await bench.sample(3)
    assert state.holds == (Hold.WINDOW_FILLING, Hold.WINDOW_FILLING), "it knows nothing of the past"
    await bench.outcome(3)
    assert (await bench.sample(4)).holds == (0, 0)
    await bench.outcome(4)
    await bench.sample(5)
    await bench.outcome(5)
    assert [batch.step for batch, _ in await bench.transitions()] == [1, 4], "no transition across the gap"


async def test_without_transitions_the_steps_since_each_action_still_count(bench: Bench) -> None:
    await bench.start(transitions=False)
    await bench.sample(0)
    await bench.outcome(0)
    state = await bench.sample(1)
    assert 1.0 in features_of(state)[0, 36:41].tolist(), "since_widen"


async def test_spans_hang_in_the_trace_of_the_step_they_belong_to(bench: Bench, tmp_path: Path) -> None:
    observe = Observe("featurizer")
    path = tmp_path / "spans.jsonl"
    observe.start(CommonSettings(trace_file=str(path)), {}, instance="f", rng=random.Random(1))
    await bench.start(observe)
    for step in range(4):
        await bench.sample(step, headers={"traceparent": TRACE.format(100 + step)})
        assert (bench.last.headers or {})["traceparent"] != TRACE.format(100 + step), "decision is a child of featurize"
        await bench.outcome(step, headers={"traceparent": TRACE.format(200 + step)})
    sent = [headers["traceparent"] for _, headers in await bench.transitions()]
    assert observe.stop(5.0)
    spans = [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    parents: dict[str, list[str]] = {"featurize": [], "transition": []}
    for span in spans:
        parents[span["name"]].append(span["parentSpanId"].lower())
    assert parents["featurize"] == [f"{100 + step:016x}" for step in range(4)]
    assert parents["transition"] == [f"{200 + step:016x}" for step in (1, 2)], "of the step they judge"
    own = {span["spanId"].lower() for span in spans if span["name"] == "transition"}
    assert {header.split("-")[2] for header in sent} == own, "the learner links to these"
