"""Telemetry against a node that the test plays on a real Unix socket, over an in-memory bus."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.engine import HEADER_BYTES, REQUEST, Failure, Reply, ReplyBody, Sample, SampleReply, frame, frame_length
from schemas.metrics import METRICS
from schemas.subjects import wildcard
from schemas.telemetry import NODE_SAMPLE, NodeSample
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import MonotonicClock
from services.errors import SettingsError
from services.observe import Observe
from services.settings import CommonSettings
from services.shell import Shell
from services.spans import parse_context
from services.telemetry.service import Settings, Telemetry, build

WORKERS = ("n0/0/w0", "n0/0/w1")


class PlayedNode:
    """Answers the long poll with whatever step the test says the node is at."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "node.sock"
        self.step = -1
        self.asked: list[Sample] = []
        self.moved = asyncio.Condition()
        self.answer: ReplyBody | bytes | None = None
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None
        self.path.unlink(missing_ok=True)

    async def move(self, step: int) -> None:
        async with self.moved:
            self.step = step
            self.moved.notify_all()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            while True:
                length = frame_length(await reader.readexactly(HEADER_BYTES))
                request = REQUEST.decode(await reader.readexactly(length))
                assert isinstance(request.body, Sample), "telemetry asks nothing else"
                self.asked.append(request.body)
                if isinstance(self.answer, bytes):
                    writer.write(self.answer)
                    continue
                body = self.answer or await self._sample(request.body)
                writer.write(frame(Reply(request.seq, self.step * 2_000_000_000, body)))
        except (EOFError, ConnectionError):
            writer.close()

    async def _sample(self, asked: Sample) -> SampleReply:
        async with self.moved:
            if asked.after_step >= 0:
                try:
                    async with asyncio.timeout(asked.timeout_s):
                        await self.moved.wait_for(lambda: self.step > asked.after_step)
                except TimeoutError:
                    return SampleReply(asked.after_step, (), (), (), b"")
            metrics = np.full((2, len(METRICS)), float(self.step)).tobytes()
            return SampleReply(self.step, WORKERS, (0, 0), (0, 0), metrics)


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork()
        self.node = PlayedNode(folder)
        self.bus = MemoryBus(self.network)
        self.samples: asyncio.Queue[NodeSample] = asyncio.Queue()
        self.headers: Mapping[str, str] | None = None
        self.shell: Shell | None = None

    async def listen(self) -> None:
        async def heard(messages: list[Message]) -> None:
            for message in messages:
                self.headers = message.headers
                self.samples.put_nowait(NODE_SAMPLE.decode(message.data))

        await self.bus.subscribe(wildcard("telemetry"), heard)

    async def start(self, wall_ns: int = 1000, observe: Observe | None = None, **settings: Any) -> Shell:
        made = Settings(
            node="n0", sockets=str(self.folder), boot_file=str(self.folder / "boot"), retry_s=0.01, **settings
        )
        bus = MemoryBus(self.network)
        self.shell = Shell("telemetry", "t", bus=bus, observe=observe or Observe("telemetry"), clock=MonotonicClock())
        await Telemetry(made, lambda: wall_ns).start(self.shell)
        return self.shell

    async def end(self) -> None:
        if self.shell is not None:
            await self.shell.cancel_tasks()
            await self.shell.bus.drain()
            self.shell = None

    async def next(self) -> NodeSample:
        async with asyncio.timeout(5):
            return await self.samples.get()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    made = Bench(tmp_path)
    await made.listen()
    yield made
    await made.end()
    await made.node.stop()
    await made.bus.drain()


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until something has been counted; counters have no event to wait for."""
    async with asyncio.timeout(5):
        for _ in iter(condition, True):
            await asyncio.sleep(0.002)


def metric(shell: Shell, name: str, **labels: str) -> float:
    return shell.observe.registry.get_sample_value(f"tidegate_telemetry_{name}", labels) or 0.0


async def test_each_step_of_the_node_is_published_once_with_the_nodes_own_step_and_clock(bench: Bench) -> None:
    await bench.node.start()
    await bench.node.move(0)
    shell = await bench.start()
    for step in range(4):
        await bench.node.move(step)
        sample = await bench.next()
        assert (sample.node, sample.boot_id, sample.step, sample.t_ns) == ("n0", 1000, step, step * 2_000_000_000)
        assert sample.workers == WORKERS
    assert bench.samples.empty()
    assert metric(shell, "samples_total") == 4
    assert {asked.boot_id for asked in bench.node.asked} == {1000}, "the node knows whose commands count"


async def test_a_node_that_is_not_there_yet_is_tried_until_it_is(bench: Bench) -> None:
    shell = await bench.start()
    await until(lambda: metric(shell, "source_errors_total", kind="EngineUnreachable") >= 3)
    await bench.node.start()
    await bench.node.move(7)
    assert (await bench.next()).step == 7


async def test_a_lost_connection_repeats_no_step(bench: Bench) -> None:
    await bench.node.start()
    await bench.node.move(0)
    await bench.start()
    assert (await bench.next()).step == 0
    await bench.node.stop()
    await bench.node.start()
    asked = len(bench.node.asked)
    await until(lambda: len(bench.node.asked) >= asked + 2)
    await bench.node.move(1)
    assert (await bench.next()).step == 1, "step 0 came once"


async def test_a_node_that_begins_anew_is_a_new_boot(bench: Bench) -> None:
    await bench.node.start()
    await bench.node.move(9)
    await bench.start()
    first = await bench.next()
    await bench.node.stop()
    bench.node.step = 0
    await bench.node.start()
    second = await bench.next()
    assert second.step == 0
    assert second.boot_id > first.boot_id


async def test_telemetry_started_again_is_a_greater_boot_and_tells_the_node(bench: Bench) -> None:
    await bench.node.start()
    await bench.node.move(5)
    await bench.start(wall_ns=1000)
    first = await bench.next()
    await bench.end()
    await bench.start(wall_ns=900)
    second = await bench.next()
    assert (second.step, second.boot_id) == (5, first.boot_id + 1), "the same step again, for the new life"
    assert bench.node.asked[-1].boot_id == second.boot_id


@pytest.mark.parametrize(
    "answer",
    [
        Failure("unsupported"),
        SampleReply(3, WORKERS, (0,), (0, 0), b""),
        SampleReply(3, WORKERS, (0, 0), (0, 0), b"abc"),
        b"\x00\x00\x00\x02\xff\xff",
        b"\xff\xff\xff\xff",
    ],
)
async def test_an_answer_that_cannot_be_is_counted_and_asked_again(bench: Bench, answer: ReplyBody | bytes) -> None:
    bench.node.answer = answer
    await bench.node.start()
    shell = await bench.start()
    kind = "EngineRefused" if isinstance(answer, Failure) else "EngineUnreachable"
    await until(lambda: metric(shell, "source_errors_total", kind=kind) >= 2)
    bench.node.answer = None
    await bench.node.move(1)
    assert (await bench.next()).step == 1


async def test_no_new_step_publishes_nothing(bench: Bench) -> None:
    await bench.node.start()
    await bench.node.move(0)
    await bench.start(poll_s=0.01)
    await bench.next()
    asked = len(bench.node.asked)
    await until(lambda: len(bench.node.asked) >= asked + 3)
    assert bench.samples.empty(), "a wait that timed out is no sample"


async def test_made_up_nodes_need_no_socket(bench: Bench, tmp_path: Path) -> None:
    await bench.start(source="synthetic", nodes=("x",), synthetic_nodes=2, synthetic_workers=2, step_s=0.05)
    names = {(await bench.next()).node for _ in range(4)}
    assert names == {"n0", "x", "n1"}


def test_settings_without_a_node_are_the_users_mistake() -> None:
    with pytest.raises(SettingsError, match="--node"):
        build(Settings())
    with pytest.raises(SettingsError, match="without '/'"):
        build(Settings(node="a/b"))


async def test_a_sample_is_the_root_of_its_steps_trace(bench: Bench, tmp_path: Path) -> None:
    observe = Observe("telemetry")
    observe.start(CommonSettings(trace_file=str(tmp_path / "spans")), {}, instance="t", rng=random.Random(1))
    await bench.node.start()
    await bench.start(observe=observe)
    contexts = []
    for step in range(2):
        await bench.node.move(step)
        await bench.next()
        contexts.append(parse_context(bench.headers))
    assert observe.stop(5.0)
    assert contexts[0] is not None
    assert contexts[1] is not None
    assert contexts[0].trace_id != contexts[1].trace_id, "one trace a node and step"
    assert (tmp_path / "spans").read_text().count('"telemetry sample"') == 2
