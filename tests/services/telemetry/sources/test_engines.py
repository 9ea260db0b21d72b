"""The engines of a node, side by side: real HTTP servers, a real socket, the service and the featurizer's tracker."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from schemas.actions import Hold
from schemas.engine import HEADER_BYTES, REQUEST, Reply, Sample, SampleReply, frame, frame_length
from schemas.metrics import COLUMN, METRICS
from schemas.subjects import subject
from schemas.telemetry import NODE_SAMPLE, NodeSample, metrics_of, pack_metrics
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock, MonotonicClock
from services.featurizer.tracker import Tracker, TrackerSettings
from services.kvsegment import LAYOUT
from services.observe import Observe
from services.shell import Shell
from services.telemetry.sampler import Sampler
from services.telemetry.service import Settings, Telemetry
from services.telemetry.settings import Engine
from services.telemetry.sources.card import CardMemory
from services.telemetry.sources.engines import EnginesSource
from services.telemetry.sources.reading import Reading
from services.telemetry.sources.track import empty_row
from tests.services.telemetry.sources.pages import sglang_page, sglang_totals, triton_page, vllm_page
from tests.services.telemetry.sources.servers import served

STEP_NS = 2_000_000_000


class Node:
    """A source read step by step, on a clock that the test moves."""

    def __init__(self, folder: Path, session: aiohttp.ClientSession, *engines: Engine, **changes: Any) -> None:
        self.clock = ManualClock(100 * STEP_NS)
        self.errors: list[tuple[str, Exception]] = []
        self.wall_s = 1e9
        settings: dict[str, Any] = {"step_s": 2.0, "timeout_s": 1.0, "max_age_s": 4.0, **changes}
        self.source = EnginesSource(
            "n0", engines, folder, lambda: (7, -1), lambda who, error: self.errors.append((who, error)), self.clock,
            wall_s=lambda: self.wall_s, **settings,
        )  # fmt: skip
        self._session = session
        self._step = 100

    async def step(self) -> Reading:
        self._step += 1
        self.clock.advance_to(self._step * STEP_NS)
        return await self.source.read(self._session, self._step)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


def said(reading: Reading, row: int, name: str) -> float:
    table = np.frombuffer(reading.metrics, "<f8").reshape(-1, len(METRICS))
    return float(table[row, COLUMN[name]])


def missing_required(reading: Reading, row: int) -> list[str]:
    return [metric.name for metric in METRICS if metric.required and math.isnan(said(reading, row, metric.name))]


async def test_engines_of_three_kinds_are_read_side_by_side(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with (
        served(vllm_page()) as one,
        served(sglang_page() + sglang_totals()) as two,
        served(triton_page()) as three,
    ):
        node = Node(
            tmp_path,
            session,
            Engine(kind="vllm", url=one.url),
            Engine(kind="sglang", url=two.url, gpu=1, service_class="agent"),
            Engine(kind="triton", url=three.url, gpu=2, name="trt", service_class="batch"),
        )
        reading = await node.step()
    assert reading.workers == ("n0/0/w0", "n0/1/w0", "n0/2/trt")
    assert reading.cards == (0, 1, 2)
    assert reading.classes == (0, 1, 2)
    assert [missing_required(reading, row) for row in range(3)] == [[], [], []], "stock pages suffice"
    assert reading.ages_s == (0.0, 0.0, 0.0), "the test's clock stands still while they answer"
    assert said(reading, 2, "hbm_bytes") == 80e9, "Triton tells its card's"
    assert (2, "card_free_bytes") in {(row, name) for row, name, _ in reading.flags}, "60 GB in use, 0.8 claimed"
    assert node.errors == []


@pytest.mark.parametrize("fault", ["empty", "html", "500", "half", "hang"])
async def test_one_engines_fault_is_its_own(session: aiohttp.ClientSession, tmp_path: Path, fault: str) -> None:
    async with served(vllm_page()) as good, served(vllm_page()) as bad:
        node = Node(
            tmp_path,
            session,
            Engine(kind="vllm", url=good.url),
            Engine(kind="vllm", url=bad.url, name="w1"),
            timeout_s=1.0 if fault == "hang" else 5.0,
        )
        first = await node.step()
        bad.fault = fault
        second = await node.step()
        bad.fault = ""
        third = await node.step()
    assert second.workers == first.workers == third.workers
    assert missing_required(second, 0) == missing_required(third, 1) == []
    assert np.isnan(np.frombuffer(second.metrics, "<f8").reshape(2, -1)[1]).all()
    assert math.isnan(second.ages_s[1])
    assert [row for row, name, _ in second.flags if name == ""] == [1]
    assert [who for who, _ in node.errors] == ["n0/0/w1"]
    assert said(second, 0, "card_kv_capacity_bytes") == 200e6, "the other's pool is still on the card"


async def test_the_featurizer_holds_the_dead_engine_and_goes_on_with_the_other(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    tracker = Tracker(TrackerSettings(window_steps=3))
    sampler = Sampler(lambda: 1, "engines")
    sampler.begin()
    async with served(vllm_page()) as good, served(vllm_page()) as bad:
        node = Node(tmp_path, session, Engine(kind="vllm", url=good.url), Engine(kind="vllm", url=bad.url, name="w1"))
        holds = []
        for step in range(12):
            bad.fault = "500" if step >= 6 else ""
            good.page = bad.page = vllm_page(output_tokens=1000 + 100 * step, kv_use=0.2 + 0.01 * step)
            sample = sampler.take(await node.step())
            assert sample is not None
            states = tracker.observe(sample)
            assert states is not None
            holds.append(states.holds.tolist())
    assert holds[5] == [Hold.NONE, Hold.NONE], "a stock vLLM page is enough for a state"
    assert holds[-1] == [Hold.NONE, Hold.SAMPLE_REJECTED]


async def test_a_restarted_engine_goes_on_with_its_counters(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    async with served(vllm_page(output_tokens=5000)) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        await node.step()
        engine.fault = "500"
        await node.step()
        engine.fault, engine.page = "", vllm_page(output_tokens=10, started=9000.0)
        reading = await node.step()
    assert said(reading, 0, "output_tokens") == 5010


async def test_numbers_with_old_time_stamps_are_not_used(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    text = 'vllm:num_requests_running{engine="0",model_name="m"} 1 1000000000000\n'
    async with served(text) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        node.wall_s = 1e9 + 3
        fresh = await node.step()
        node.wall_s = 1e9 + 30
        old = await node.step()
    assert fresh.ages_s == (3.0,)
    assert said(fresh, 0, "running") == 1
    assert math.isnan(said(old, 0, "running"))
    assert "numbers of 30.0 s ago" in old.flags[0][2]


async def test_engines_behind_one_page_are_workers_that_stay_listed(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    both = vllm_page(engine="0") + vllm_page(engine="1", running=5).split("\n", 1)[1]
    async with served(both) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url, gpu=2))
        first = await node.step()
        engine.page = vllm_page(engine="0")
        second = await node.step()
    assert first.workers == second.workers == ("n0/2/w0", "n0/3/w0-1")
    assert first.cards == (2, 3), "under data parallelism each engine has a card of its own"
    assert said(first, 1, "running") == 5
    assert math.isnan(said(second, 1, "running"))
    assert (1, "", "no longer on the page") in second.flags


async def test_several_models_behind_one_page_keep_their_names_and_one_can_be_chosen(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    both = vllm_page(model="b", running=1) + vllm_page(model="org/c", running=2).split("\n", 1)[1]
    async with served(both) as engine:
        all_of_them = await Node(tmp_path, session, Engine(kind="vllm", url=engine.url)).step()
        one = await Node(tmp_path, session, Engine(kind="vllm", url=engine.url, model="org/c")).step()
        none = await Node(tmp_path, session, Engine(kind="vllm", url=engine.url, model="d")).step()
    assert all_of_them.workers == ("n0/0/w0", "n0/0/w0-org-c")
    assert one.workers == ("n0/0/w0",)
    assert said(one, 0, "running") == 2
    assert "no engine of model 'd'" in none.flags[0][2]


@asynccontextmanager
async def own_socket(path: Path, row: np.ndarray) -> AsyncIterator[list[Sample]]:
    """An engine's own socket: answers Sample with one row."""
    asked: list[Sample] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                request = REQUEST.decode(await reader.readexactly(frame_length(await reader.readexactly(HEADER_BYTES))))
                assert isinstance(request.body, Sample)
                asked.append(request.body)
                reply = SampleReply(1, ("n0/0/w0",), (0,), (0,), pack_metrics(row[None, :]))
                writer.write(frame(Reply(request.seq, 101 * STEP_NS, reply)))
        writer.close()

    server = await asyncio.start_unix_server(answer, str(path))
    try:
        yield asked
    finally:
        server.close()


async def test_what_the_engine_says_over_its_socket_wins_over_its_page(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    row = empty_row()
    row[[COLUMN["rho"], COLUMN["generation"], COLUMN["kv_idle_bytes"]]] = 1.2, 9.0, 1e6
    async with served(vllm_page()) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        without = await node.step()
        async with own_socket(tmp_path / "0-w0.sock", row) as asked:
            reading = await node.step()
            node.clock.advance_to(node.clock.now_ns() + STEP_NS)
            later = await node.step()
            node.source._endpoints[0].close()
    assert said(without, 0, "rho") == 1.0
    assert (said(reading, 0, "rho"), said(reading, 0, "generation")) == (1.2, 9.0)
    assert said(reading, 0, "kv_idle_bytes") == 1e6
    assert said(reading, 0, "running") == 2, "what it does not know itself is the page's"
    assert asked[0].boot_id == 7
    assert reading.ages_s[0] == pytest.approx(2.0), "the socket's answer was taken a step ago by its clock"
    assert later.ages_s[0] == pytest.approx(4.0)


async def test_a_socket_that_talks_nonsense_holds_the_worker(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """Its page alone would show a stock server, with a quota that is not in force."""
    async with served(vllm_page()) as engine, own_socket(tmp_path / "0-w0.sock", np.zeros(3)):
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        reading = await node.step()
        node.source._endpoints[0].close()
    assert "rho" in missing_required(reading, 0)
    assert reading.flags, "nobody is told why"


async def test_a_socket_that_nobody_serves_any_more_is_as_none(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    """A killed engine leaves its file behind; a stock server may have come in its place."""
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(tmp_path / "0-w0.sock"))
    left.close()
    async with served(vllm_page()) as engine:
        reading = await Node(tmp_path, session, Engine(kind="vllm", url=engine.url)).step()
    assert missing_required(reading, 0) == []
    assert said(reading, 0, "rho") == 1.0


async def test_a_kvcached_segment_says_what_is_mapped_and_the_limit(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    segment = tmp_path / "segment"
    segment.write_bytes(LAYOUT.pack(50_000_000, 20_000_000, 1_000_000))
    async with served(vllm_page()) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url, kvcached=str(segment), hbm_bytes=1e9))
        there = await node.step()
        segment.unlink()
        gone = await node.step()
    assert said(there, 0, "quota_hard_bytes") == 50e6
    assert said(there, 0, "kv_mapped_bytes") == 21e6
    assert said(gone, 0, "quota_hard_bytes") == 100e6, "the page's"
    assert math.isnan(said(gone, 0, "kv_mapped_bytes"))
    assert any(name == "kv_mapped_bytes" for _, name, _ in gone.flags)


async def test_the_devices_memory_is_the_cards(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    async def devices(session: aiohttp.ClientSession) -> dict[int, CardMemory]:
        return {0: CardMemory(1e9, 5e8)}

    async with served(vllm_page()) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url, weights_bytes=1e8), devices=devices)
        reading = await node.step()
    assert said(reading, 0, "hbm_bytes") == 1e9
    assert said(reading, 0, "weights_bytes") == 1e8
    assert said(reading, 0, "card_free_bytes") == 0, "300 MB in use that nobody claims, 75 MB free in the pool"


async def test_the_models_folder_is_asked_once(session: aiohttp.ClientSession, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "dtype": "float32"}'
    )
    async with served(vllm_page(info={"kv_cache_memory_bytes": "None"})) as engine:
        engine.models = f'{{"data": [{{"id": "tiny", "root": "{tmp_path}"}}]}}'
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        first = await node.step()
        engine.models = "gone"
        second = await node.step()
    assert said(first, 0, "kv_bytes_per_token") == said(second, 0, "kv_bytes_per_token") == 512


async def test_the_peak_rate_is_told_after_a_minute_of_it_or_as_set(
    session: aiohttp.ClientSession, tmp_path: Path
) -> None:
    async with served(vllm_page()) as engine:
        node = Node(tmp_path, session, Engine(kind="vllm", url=engine.url))
        rates = []
        for step in range(34):
            engine.page = vllm_page(output_tokens=1000 + 200 * step)
            rates.append(said(await node.step(), 0, "reference_tokens_per_s"))
        set_to = Node(tmp_path, session, Engine(kind="vllm", url=engine.url, reference_tokens_per_s=5000))
        assert said(await set_to.step(), 0, "reference_tokens_per_s") == 5000
    assert math.isnan(rates[20])
    assert rates[-1] == pytest.approx(100.0)


class Heard:
    def __init__(self) -> None:
        self.samples: asyncio.Queue[NodeSample] = asyncio.Queue()

    async def __call__(self, messages: list[Message]) -> None:
        for message in messages:
            self.samples.put_nowait(NODE_SAMPLE.decode(message.data))

    async def next(self) -> NodeSample:
        async with asyncio.timeout(10):
            return await self.samples.get()


@asynccontextmanager
async def service(folder: Path, heard: Heard, **settings: Any) -> AsyncIterator[Shell]:
    network = MemoryNetwork()
    listener, bus = MemoryBus(network), MemoryBus(network)
    await listener.subscribe(subject("telemetry", "n0"), heard)
    made = Settings(
        node="n0", source="engines", sockets=str(folder), boot_file=str(folder / "boot"), devices="none", **settings
    )
    shell = Shell("telemetry", "t", bus=bus, observe=Observe("telemetry"), clock=MonotonicClock())
    await Telemetry(made, lambda: 1000).start(shell)
    try:
        yield shell
    finally:
        await shell.cancel_tasks()
        await bus.drain()
        await listener.drain()


async def test_the_service_publishes_a_step_of_each_engine_and_the_tracker_takes_it(tmp_path: Path) -> None:
    heard, tracker = Heard(), Tracker(TrackerSettings(window_steps=2))
    async with served(vllm_page()) as engine:
        engines = (Engine(kind="vllm", url=engine.url),)
        async with service(tmp_path, heard, engines=engines, step_s=0.4, scrape_timeout_s=0.39):
            samples: list[NodeSample] = []
            while len(samples) < 3:  # a busy machine may take longer than a step to answer
                sample = await heard.next()
                samples += [sample] if sample.ages_s[0] >= 0 else []
    assert samples[0].step < samples[1].step < samples[2].step
    assert samples[0].workers == ("n0/0/w0",)
    assert samples[0].source == "engines"
    assert 0 <= samples[0].ages_s[0] < 5
    assert metrics_of(samples[0])[0, COLUMN["running"]] == 2
    states = tracker.observe(samples[0])
    assert states is not None
    assert states.holds.tolist() == [Hold.WINDOW_FILLING], "waits for its window, and lacks nothing"
    assert not any(reason == "missing" for reason, _ in tracker.counts)


async def test_an_engine_that_is_not_there_is_published_as_such_and_counted(tmp_path: Path) -> None:
    heard = Heard()
    async with served("") as nobody:
        engines = (Engine(kind="vllm", url=nobody.url),)
        async with service(tmp_path, heard, engines=engines, step_s=1.0, scrape_timeout_s=0.99) as shell:
            sample = await heard.next()
            errors = shell.observe.registry.get_sample_value(
                "tidegate_telemetry_source_errors_total", {"kind": "ScrapeFailed"}
            )
    assert sample.flags == ((0, "", "an empty answer"),)
    assert errors == 1


async def test_each_row_of_failures_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    heard = Heard()
    async with served(vllm_page()) as engine:
        engines = (Engine(kind="vllm", url=engine.url),)
        async with service(tmp_path, heard, engines=engines, step_s=0.4, scrape_timeout_s=0.39) as shell:
            for fault in ("500", "", "500"):
                engine.fault = fault
                while (await heard.next()).ages_s[0] >= 0 if fault else not (await heard.next()).ages_s[0] >= 0:
                    pass
                await heard.next()
            failures = shell.observe.registry.get_sample_value(
                "tidegate_telemetry_source_errors_total", {"kind": "ScrapeFailed"}
            )
    told = [record for record in caplog.records if record.getMessage() == "source failed"]
    assert len(told) >= 2, "the first of each row"
    assert failures is not None
    assert len(told) < failures, "not one a step"
