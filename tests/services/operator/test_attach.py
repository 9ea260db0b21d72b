"""Attach as it is typed: real processes, a real NATS server, a real HTTP server that goes wrong meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from schemas.engine import (
    Describe,
    Description,
    Failure,
    Receipt,
    ReplyBody,
    RequestBody,
    Sample,
    SampleReply,
    SetQuota,
    Snapshot,
    SnapshotReply,
)
from schemas.metrics import COLUMN, METRICS
from schemas.subjects import subject
from schemas.telemetry import pack_metrics
from services import cli
from services.actuator.engines.serving import Sockets
from services.bus.embedded import EmbeddedServer
from services.errors import UserError
from services.kvsegment import LAYOUT, read_usage
from services.operator import attach_folder, session
from services.operator.attach_folder import Attached
from services.operator.attach_loop import AttachedLoop, Wiring
from services.settings import CommonSettings, load
from tests.services.operator.inference_server import InferenceServer, sample_page

SETTINGS = """
[telemetry]
step_s = 0.2
scrape_timeout_s = 0.15
[featurizer]
window_steps = 2
"""
"""Steps of 0.2 s and a short past, so that a test need not wait a minute for a decision."""
LIMIT_S = 40.0


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="tg-"))  # not pytest's own: a Unix socket's path holds 107 bytes
    (path / "settings.toml").write_text(SETTINGS)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
async def server(shared_dir: Path) -> AsyncIterator[InferenceServer]:
    async with InferenceServer(sample_page(shared_dir)).running() as running:
        yield running


class Typed:
    """A command of ``tidegate`` as a process; ``lines`` is what it said so far."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.lines: list[str] = []
        self.errors: list[str] = []
        self._words = words

    async def __aenter__(self) -> Typed:
        environ = {**os.environ, "USER": "ann", "XDG_STATE_HOME": str(self.folder / "state")}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.cli", *self._words, "--config", str(self.folder / "settings.toml"),
            env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._came = asyncio.Condition()
        self._reading = [
            asyncio.create_task(self._read(self.process.stdout, self.lines)),
            asyncio.create_task(self._read(self.process.stderr, self.errors)),
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        left = self.children()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        for child in left:
            child.kill()
        await asyncio.gather(*self._reading)

    async def until(self, true: Callable[[str], bool], after: int = 0) -> str:
        """The first line of those from ``after`` on for which it is true."""
        async with asyncio.timeout(LIMIT_S), self._came:
            while True:
                for line in self.lines[after:]:
                    if true(line):
                        return line
                if self.process.returncode is not None:
                    raise AssertionError(f"it ended with {self.process.returncode}: {self.lines} {self.errors}")
                await self._came.wait()

    async def end(self, how: signal.Signals = signal.SIGINT) -> int:
        self.process.send_signal(how)
        return await self.ended()

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*self._reading)
            return await self.process.wait()

    def children(self) -> list[psutil.Process]:
        """What it started, all that runs now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def _read(self, stream: asyncio.StreamReader | None, into: list[str]) -> None:
        assert stream is not None
        async for line in stream:
            async with self._came:
                into.append(line.decode().rstrip("\n"))
                self._came.notify_all()
        async with self._came:
            self._came.notify_all()


async def test_shadow_watches_decides_records_survives_faults_and_reports(
    folder: Path, server: InferenceServer
) -> None:
    words = ("attach", "vllm", "--url", server.url, "--node", "n0", "--class", "agent", "--every", "0.2")
    async with Typed(folder, *words, "--folder", str(folder / "a")) as attach:
        await attach.until(lambda line: line.startswith("idle KV") and "no eviction" in line)
        await attach.until(lambda line: "nothing: no Tidegate inside this server, shadow only" in line)
        await attach.until(lambda line: "mode of worker n0/0/w0: shadow, by ann" in line)
        would = await attach.until(lambda line: "shadow: heuristic would tighten" in line)
        assert "preemption_rate" in would, "it says why"
        assert "queue 5 (4 for memory)" in would
        for fault, told in (("500", "status 500"), ("hang", "no whole answer within"), ("half", "stale and held")):
            server.fault, so_far = fault, len(attach.lines)
            stale = await attach.until(lambda line, told=told: "stale and held" in line and told in line, so_far)
            assert "tighten" not in stale, "nothing is decided on a guess"
            server.fault, so_far = "", len(attach.lines)
            await attach.until(lambda line: "shadow: heuristic would" in line, so_far)
        started = attach.children()
        assert await attach.end() == 0
        text = "\n".join(attach.lines)
        assert attach.errors == []
        assert len(started) >= 5, "four services and a NATS server"
        assert not any(one.is_running() for one in started), "nothing is left behind"
    said = text[text.rindex("n0/0/w0, agent, shadow:") :]
    expected = (
        "KV use               mean 90.0%, peak 90.0%", "tighten", "status 500",
        "waiting saved by admission: at most 80.0%", "idle KV that could leave the card: not known",
    )  # fmt: skip
    for line in expected:
        assert line in said, said
    assert "refused" not in said, "shadow's commands are accepted by a server that nobody commands"

    async with Typed(folder, "report", "--folder", str(folder / "a"), "--json") as later:
        assert await later.ended() == 0, later.errors
        (worker,) = json.loads(later.lines[0])["workers"]
    assert worker["decisions"]["would"]["tighten"] > 0, "the embedded server's store is read after attach has ended"
    assert worker["decisions"]["held"]["sample_rejected"] > 0
    assert worker["seen"]["unseen_s"] > 0
    assert worker["memory_never_short"] is False
    assert {each["name"]: each["bound"] for each in worker["estimates"]}["waiting saved by admission"] == pytest.approx(
        0.8
    )


async def test_what_cannot_be_read_or_enforced_starts_nothing(
    folder: Path, server: InferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("attach", "vllm", "--url", server.url, "--folder", str(folder / "a"))
    server.fault = "500"
    assert await asyncio.to_thread(cli.main, words) == 1
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    server.fault = ""
    assert await asyncio.to_thread(cli.main, (*words, "--mode", "enforce", "--node", "n7")) == 2
    told = capsys.readouterr().err
    assert "--scheduler-cls services.actuator.engines.vllm.scheduler.TidegateScheduler" in told
    assert "TIDEGATE_SOCKET=/run/tidegate/n7/0-w0.sock TIDEGATE_NODE=n7" in told
    assert "found no engine socket at /run/tidegate/n7/0-w0.sock: " in told
    assert not (folder / "a").exists()


class Engine:
    """An engine behind a socket that takes every quota."""

    def __init__(self, lease_until_ns: int = 0) -> None:
        self.told: list[SetQuota] = []
        self.lease_until_ns = lease_until_ns

    def answer(self, body: RequestBody) -> ReplyBody:
        gb = 10**9
        match body:
            case Describe():
                return Description("n0/0/w0", 0, "vllm", 1 << 20, 1 << 20, 65536, gb, gb, 0, 1 << 20, 0, ("evict",))
            case Snapshot():
                return SnapshotReply(0, 1.0, gb, gb, 256, 0, 0, 0, 0, 0, 0, 0, 0, 0, self.lease_until_ns)
            case Sample():
                row = np.full((1, len(METRICS)), np.nan)
                row[0, COLUMN["kv_idle_bytes"]] = 0.0
                return SampleReply(body.after_step, ("n0/0/w0",), (0,), (0,), pack_metrics(row))
            case SetQuota():
                self.told.append(body)
                return Receipt(body.action_id, True, 0, body.rho, body.soft_bytes, body.hard_bytes, body.max_running, 0)
        return Failure("unsupported")


def enforcing(server: InferenceServer, folder: Path) -> tuple[str, ...]:
    return ("attach", "vllm", "--url", server.url, "--mode", "enforce", "--every", "0.2", "--folder", str(folder / "a"))


async def test_enforcing_commands_the_engine_and_dies_without_a_trace(folder: Path, server: InferenceServer) -> None:
    engine, sockets = Engine(), Sockets(time.monotonic_ns)
    await sockets.serve(folder / "0-w0.sock", engine.answer)
    words = enforcing(server, folder)
    async with Typed(folder, *words, "--socket", str(folder / "0-w0.sock")) as attach:
        await attach.until(lambda line: "an engine of kind vllm" in line)
        await attach.until(lambda line: line.split() == ["eviction", "of", "idle", "KV", "to", "host", "memory", "yes"])
        await attach.until(lambda line: line.startswith("idle KV") and line.endswith("measured  by the engine itself"))
        done = await attach.until(lambda line: "heuristic: tighten" in line and "in force 1" in line)
        assert "n0/0/w0" in done, "the node is the one that the engine says"
        assert any(one.max_running < 256 for one in engine.told), "the ceiling was really lowered"
        left = attach.children()
        assert len(left) >= 5, "four services and a NATS server"
        attach.process.kill()
        await attach.process.wait()
        _, alive = await asyncio.to_thread(psutil.wait_procs, left, 5.0)
        assert alive == [], "all die with the process that started them, even where that could say nothing"
    await sockets.close()


async def test_an_engine_that_somebody_else_commands_is_not_commanded_twice(
    folder: Path, server: InferenceServer, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, sockets = Engine(time.monotonic_ns() + 3600 * 10**9), Sockets(time.monotonic_ns)
    await sockets.serve(folder / "0-w0.sock", engine.answer)
    words = (*enforcing(server, folder), "--socket", str(folder / "0-w0.sock"))
    assert await asyncio.to_thread(cli.main, words) == 1
    told = capsys.readouterr().err
    assert (
        f"engine n0/0/w0 at {folder / '0-w0.sock'} is commanded by somebody else: its lease runs for another " in told
    )
    assert told.rstrip().endswith("--mode shadow")
    assert engine.told == []
    assert not (folder / "a").exists()
    await sockets.close()


async def test_a_kvcached_limit_follows_the_quota_and_sleep_needs_a_device_to_verify_it(
    folder: Path, server: InferenceServer
) -> None:
    engine, sockets = Engine(), Sockets(time.monotonic_ns)
    await sockets.serve(folder / "0-w0.sock", engine.answer)
    server.asleep = False
    segment = Path(f"/dev/shm/tidegate-test-{os.getpid()}-attach")
    told = ("--kvcached", segment.name, "--sleep", "--weights-gb", "16", "--socket", str(folder / "0-w0.sock"))
    words = enforcing(server, folder)
    try:
        segment.write_bytes(LAYOUT.pack(10**10, 0, 0))  # noqa: ASYNC240
        async with Typed(folder, *words, *told) as attach:
            line = await attach.until(lambda line: line.startswith("  kvcached "))
            assert line.endswith(": 0.0 of 10.0 GB mapped; its limit moves with the hard quota")
            await attach.until(lambda line: line.startswith("  sleep: no: what it frees cannot be verified"))
            await attach.until(lambda line: "in force 1" in line)
            async with asyncio.timeout(LIMIT_S):
                # The engine's capacity in page groups; a file in shared memory tells nobody that it changed.
                while read_usage(segment).limit_bytes != 10**9 >> 20 << 20:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert await attach.end() == 0
        log = (folder / "a" / "actuator.log").read_text()
        assert "device memory cannot be read" in log
    finally:
        segment.unlink(missing_ok=True)  # noqa: ASYNC240
        segment.with_name(f".{segment.name}.tidegate").unlink(missing_ok=True)
    await sockets.close()


@pytest.mark.parametrize(
    ("mode", "words", "expected"),
    [
        ("shadow", ("--sleep",), "in shadow nobody is sent to sleep"),
        ("shadow", ("--weights-gb", "1"), "found without --sleep"),
        ("enforce", ("--kvcached", "tidegate-none"), "vanished"),
        ("enforce", ("--kvcached", ".."), "expected the name in KVCACHED_IPC_NAME"),
        ("enforce", ("--sleep",), "expected --weights-gb X"),
        ("enforce", ("--sleep", "--weights-gb", "1"), "--enable-sleep-mode"),
    ],
)
async def test_what_the_server_was_not_started_for_starts_nothing(
    folder: Path, server: InferenceServer, capsys: pytest.CaptureFixture[str],
    mode: str, words: tuple[str, ...], expected: str,
) -> None:  # fmt: skip
    sockets = Sockets(time.monotonic_ns)
    await sockets.serve(folder / "0-w0.sock", Engine().answer)
    told = ("attach", "vllm", "--url", server.url, "--mode", mode, "--folder", str(folder / "a"))
    assert await asyncio.to_thread(cli.main, (*told, "--socket", str(folder / "0-w0.sock"), *words)) == 2
    assert expected in capsys.readouterr().err
    assert not (folder / "a").exists()
    await sockets.close()


async def test_a_given_bus_gets_telemetry_and_actuator_and_nothing_else(folder: Path, server: InferenceServer) -> None:
    nats = await given(folder)
    words = ("attach", "vllm", "--url", server.url, "--node", "n0", "--every", "0.2", "--nats", nats.url)
    async with Typed(folder, *words, "--folder", str(folder / "a")) as attach:
        await attach.until(lambda line: line == "running: actuator, telemetry; Ctrl-C ends it")
        assert await attach.end(signal.SIGTERM) == 0
    assert any("no decisions in the audit stream" in line for line in attach.errors), "decision is somebody else's"
    await nats.stop()


async def given(folder: Path) -> EmbeddedServer:
    """A server that somebody else runs, with its credentials in the settings."""
    nats = EmbeddedServer(folder / "given", password="x")
    await nats.start()
    with (folder / "settings.toml").open("a") as file:
        file.write(f'[common]\nnats_user = "{nats.user}"\nnats_password = "x"\n')
    return nats


async def test_a_node_that_somebody_measures_already_is_refused(folder: Path) -> None:
    nats = await given(folder)
    wiring = Wiring("n0", [], None, "shadow", None)
    common = CommonSettings(nats_url=nats.url, nats_user=nats.user, nats_password="x")
    other = await session.connected(common)

    async def measure() -> None:
        while True:
            await other.publish(subject("telemetry", "n0"), b"a sample")
            await asyncio.sleep(0.05)

    measuring = asyncio.create_task(measure())
    with pytest.raises(UserError, match="found somebody who measures it on this bus already"):
        await AttachedLoop(folder, wiring, common).connect()
    measuring.cancel()
    await other.drain()
    await nats.stop()


def test_a_folder_is_one_attachments_own(folder: Path) -> None:
    attached = Attached(worker="n0/0/w0", kind="vllm", url="http://h", mode="shadow", nats_url="nats://h", pid=7)
    with attach_folder.claim(folder / "a"):
        attach_folder.remember(folder / "a", attached)
        assert attach_folder.running(folder / "a")
        with pytest.raises(UserError, match="found an attachment that runs"):
            attach_folder.claim(folder / "a")
    assert not attach_folder.running(folder / "a")
    assert attach_folder.recall(folder / "a") == attached
    for name in (attach_folder.FILE, attach_folder.SETTINGS):
        assert (folder / "a" / name).stat().st_mode & 0o777 == 0o600, "it holds a password"
    again = load(CommonSettings, "common", file=folder / "a" / attach_folder.SETTINGS, environ={})
    assert again.nats_url == "nats://h", "operator commands reach the bus with it"
