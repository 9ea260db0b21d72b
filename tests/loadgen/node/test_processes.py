"""Real processes: the actuator is killed, and the engines let go by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from loadgen.node.files import NodeConfig, load_arrays, save_tables, write_config
from loadgen.node.replay import NODE_SOCKET
from loadgen.requests import empty_table
from schemas.actions import ACTION_BATCH, ALL_ACTIONS, ActionBatch, WorkerAction, action_batch
from schemas.engine import Sample, SampleReply
from schemas.identity import STEP_NS, action_id
from schemas.metrics import COLUMN
from schemas.outcomes import OUTCOME_BATCH, outcomes_of
from schemas.subjects import subject
from schemas.telemetry import NodeSample, metrics_of
from services.actuator.engines.protocol import EngineClient
from services.bus import nats
from services.bus.embedded import EmbeddedServer

ROOT = Path(__file__).parents[3]
BOOT = 7
WORKERS = ("n0/0/w0", "n0/0/w1")


async def start(*arguments: str, **environment: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip


async def ended(process: asyncio.subprocess.Process, how: signal.Signals) -> int:
    if process.returncode is None:
        process.send_signal(how)
    return await asyncio.wait_for(process.wait(), 20)


async def there(path: Path, process: asyncio.subprocess.Process) -> None:
    while not path.exists():  # noqa: ASYNC240  # what is waited for is the file
        assert process.returncode is None, "the process ended before it was up"
        await asyncio.sleep(0.02)


async def listens(path: Path, process: asyncio.subprocess.Process) -> None:
    await there(path, process)
    while True:
        try:
            _, writer = await asyncio.open_unix_connection(path)
        except ConnectionRefusedError:  # the socket is there a moment before somebody listens
            assert process.returncode is None, "the process ended before it was up"
            await asyncio.sleep(0.02)
        else:
            writer.close()
            return


class Loop:
    """The hands of telemetry, featurizer and decision."""

    def __init__(self, bus: nats.NatsBus, client: EngineClient) -> None:
        self.bus = bus
        self.client = client
        self.step = -1
        self.rows = np.empty((0, 0))
        self.outcomes: asyncio.Queue = asyncio.Queue()

    async def sample(self) -> bool:
        reply = await self.client.request(Sample(self.step, BOOT, 30.0), SampleReply)
        self.step = reply.step
        node = NodeSample("n0", BOOT, reply.step, 1, 0, reply.workers, reply.cards, reply.classes, reply.metrics)
        self.rows = metrics_of(node)
        return reply.finished

    def column(self, name: str) -> list[float]:
        return self.rows[:, COLUMN[name]].tolist()

    async def command(self, rho: float) -> list:
        """Command the newest step until an actuator answers: one that is starting does not listen yet."""
        while True:
            self.step = -1
            await self.sample()
            await self.bus.publish(subject("action", "n0"), ACTION_BATCH.encode(self._batch(rho)))
            try:
                return outcomes_of(await asyncio.wait_for(self.outcomes.get(), 0.3))
            except TimeoutError:
                continue

    def _batch(self, rho: float) -> ActionBatch:
        t_ns = self.step * STEP_NS
        actions = [
            WorkerAction(
                worker, action_id(worker, BOOT, self.step), 1, rho, 256, int(self.column("generation")[i]),
                t_ns + 2 * STEP_NS, t_ns + 3 * STEP_NS, "test", 1.0, ALL_ACTIONS, (0,) * 5,
            )
            for i, worker in enumerate(WORKERS)
        ]  # fmt: skip
        return action_batch("n0", BOOT, self.step, t_ns, actions)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    made = EmbeddedServer(tmp_path / "nats")
    await made.start()
    yield made
    await made.stop()


def actuator(server: EmbeddedServer, folder: Path):
    return start(
        "-m", "services.actuator", "--node", "n0", "--set", f"sockets={folder}", "--set", "common.http_port=-1",
        TIDEGATE_COMMON_NATS_URL=server.url, TIDEGATE_COMMON_NATS_USER=server.user,
        TIDEGATE_COMMON_NATS_PASSWORD=server.password,
    )  # fmt: skip


async def test_a_killed_actuator_leaves_no_raised_quota_behind(tmp_path, server):
    folder = tmp_path / "s"
    folder.mkdir()
    settings = NodeConfig(
        node="n0", sockets=str(folder), tables="", results=str(tmp_path / "results.npz"), duration_s=400.0,
        step_timeout_s=1.0,
    )  # fmt: skip
    write_config(tmp_path / "node.json", settings)
    bus = await nats.connect(server.url, user=server.user, password=server.password)
    node = await start("-m", "tests.loadgen.node.fake_node", str(tmp_path / "node.json"))
    first = await actuator(server, folder)
    second = None
    try:
        await listens(folder / NODE_SOCKET, node)
        loop = Loop(bus, EngineClient("node", folder / NODE_SOCKET, 60.0))

        async def arrived(messages) -> None:
            for message in messages:
                loop.outcomes.put_nowait(OUTCOME_BATCH.decode(message.data))

        await bus.subscribe(subject("outcome", "n0"), arrived)
        assert [one.effective_rho for one in await loop.command(1.4)] == [1.4, 1.4]
        await loop.sample()
        assert loop.column("rho") == [1.4, 1.4]

        await ended(first, signal.SIGKILL)
        raised_at = loop.step
        while loop.column("rho") != [1.0, 1.0]:
            await loop.sample()
            assert loop.step <= raised_at + 3, "three steps without renewal are the end of a lease"
        assert loop.column("quota_soft_bytes") == loop.column("q0_bytes")

        second = await actuator(server, folder)
        outcomes = await loop.command(1.2)
        assert [one.effective_rho for one in outcomes] == [1.2, 1.2], "a new actuator takes the next step"
        assert await ended(second, signal.SIGTERM) == 0
        await loop.client.close()
    finally:
        for process in (first, second):
            if process is not None:
                await ended(process, signal.SIGKILL)
        assert await ended(node, signal.SIGTERM) == 0
        await bus.drain()
    assert list(folder.iterdir()) == [], "a stopped node removes its sockets"
    assert not (tmp_path / "results.npz").exists(), "a replay that was stopped has no results"


@pytest.mark.slow
@pytest.mark.timeout(300)  # the first run compiles the engine's kernels
async def test_a_node_process_replays_to_the_end_and_writes_its_results(tmp_path):
    save_tables(tmp_path / "tables.npz", [empty_table()] * 2)
    settings = NodeConfig(
        node="n0", sockets=str(tmp_path / "s"), tables=str(tmp_path / "tables.npz"),
        results=str(tmp_path / "results.npz"), duration_s=6.0, step_timeout_s=0.01,
    )  # fmt: skip
    write_config(tmp_path / "node.json", settings)
    node = await start("-m", "loadgen.node", "--config", str(tmp_path / "node.json"))
    try:
        await listens(tmp_path / "s" / NODE_SOCKET, node)
        client = EngineClient("node", tmp_path / "s" / NODE_SOCKET, 60.0)
        reply = await client.request(Sample(2, BOOT, 60.0), SampleReply)
        assert (reply.step, reply.finished, reply.workers) == (3, True, WORKERS)
        await there(tmp_path / "results.npz", node)
        await client.close()
        results = load_arrays(tmp_path / "results.npz")
        assert int(results["node.missed_steps"]) == 3
        assert float(results["duration_s"]) == pytest.approx(6.0)
    finally:
        assert await ended(node, signal.SIGTERM) == 0


async def test_a_configuration_that_is_not_there_is_one_line_and_exit_code_2(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen.node", "--config", str(tmp_path / "absent.json"),
        cwd=ROOT, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, error = await process.communicate()
    assert process.returncode == 2
    assert error.decode().count("\n") == 1
    assert "absent.json" in error.decode()
