"""The shell runs a real service as a process on a real server: probes, $SRV, metrics, traces, drain, exit codes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from nats.aio.client import Client
from prometheus_client.parser import text_string_to_metric_families

from services.bus.embedded import EmbeddedServer
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.observe import Observe
from services.runtime import main, serve
from services.settings import CommonSettings
from services.shell import DrainBudget, Shell, drain
from tests.services.tiny import Settings

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0
"""Far more than anything takes; a test that waits this long has failed."""
DRAIN_S = 5.0
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Process:
    """``python -m tests.services.tiny`` on a server, and what it tells."""

    def __init__(self, folder: Path, url: str, user: str = "", password: str = "") -> None:
        self.port_file = folder / "port"
        self.trace_file = folder / "spans.jsonl"
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("OTEL_", "TIDEGATE_"))},
            "PYTHONPATH": str(ROOT),
            "TIDEGATE_COMMON_NATS_URL": url,
            "TIDEGATE_COMMON_NATS_USER": user,
            "TIDEGATE_COMMON_NATS_PASSWORD": password,
            "TIDEGATE_COMMON_HTTP_PORT_FILE": str(self.port_file),
        }
        self.lines: list[str] = []

    async def start(self, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.services.tiny", "--node", "n0", *arguments),
            env={**self.environ, **(environ or {})},
            stderr=asyncio.subprocess.PIPE,
        )

    async def line(self, holding: str) -> str:
        """The next line of the log that holds this."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT_S):
            while True:
                line = (await self.process.stderr.readline()).decode()
                assert line, f"ended without {holding!r}; it said {self.lines}"
                self.lines.append(line)
                if holding in line:
                    return line

    async def port(self) -> int:
        if not any("listening" in line for line in self.lines):
            await self.line("listening")
        return int(self.port_file.read_text())

    async def end(self, number: signal.Signals | None = signal.SIGTERM) -> int:
        if number is not None:
            self.process.send_signal(number)
        async with asyncio.timeout(LIMIT_S):
            _, rest = await self.process.communicate()
        self.lines.append(rest.decode())
        assert self.process.returncode is not None
        return self.process.returncode


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def client(server: EmbeddedServer) -> AsyncIterator[Client]:
    client = Client()
    await client.connect(server.url, user=server.user, password=server.password)
    yield client
    await client.close()


@pytest.fixture
async def tiny(tmp_path: Path, server: EmbeddedServer) -> AsyncIterator[Process]:
    process = Process(tmp_path, server.url, server.user, server.password)
    yield process
    if process.process.returncode is None:
        process.process.kill()
        await process.process.communicate()


@pytest.fixture
def own_log() -> Iterator[None]:
    """``main`` in this process sets the log up; what was there before comes back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


async def get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def ask(client: Client, subject: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((await client.request(subject, b"", timeout=LIMIT_S)).data)
    return answer


async def test_ready_once_wired_and_drained_on_sigterm(tiny: Process, client: Client) -> None:
    await tiny.start("--set", "wire_when=go")
    port = await tiny.port()
    assert (await get(port, "/live"))[0] == 200
    status, body = await get(port, "/ready")
    assert (status, json.loads(body)["state"]) == (503, "starting"), "not wired yet"

    while not (await ask(client, "$SRV.INFO.tidegate-tiny"))["endpoints"]:
        pass
    # The service may subscribe to ``go`` a moment later than it answers, so it is said until it is heard.
    wired = asyncio.create_task(tiny.line("msg=wired"))
    while not wired.done():
        await client.publish("go", b"")
        await asyncio.wait({wired}, timeout=0.02)
    status, body = await get(port, "/ready")
    assert (status, json.loads(body)["ready"]) == (200, True)

    heard = await client.subscribe("tg.v1.tiny-out.n0")
    await client.flush()
    began_s = time.monotonic()
    assert await tiny.end() == 0
    assert time.monotonic() - began_s < DRAIN_S
    assert (await heard.next_msg(LIMIT_S)).data == b"stopped", "what stop() sends still leaves the process"


async def test_it_answers_on_nats_and_to_prometheus(tiny: Process, client: Client) -> None:
    await tiny.start()
    await tiny.line("msg=wired")
    ping = await ask(client, "$SRV.PING")
    assert ping["name"] == "tidegate-tiny"
    assert ping["metadata"]["pid"] == str(tiny.process.pid)
    assert (await ask(client, "$SRV.INFO.tidegate-tiny"))["endpoints"][0]["subject"] == "tg.v1.health.tiny"
    assert (await ask(client, "$SRV.STATS.tidegate-tiny"))["endpoints"][0]["data"]["dropped"] == 0
    assert (await ask(client, "tg.v1.health.tiny"))["ready"] is True

    heard = await client.subscribe("tg.v1.tiny-out.n0")
    await client.publish("tg.v1.tiny.n0", b"one")
    await heard.next_msg(LIMIT_S)
    status, text = await get(await tiny.port(), "/metrics")
    families = list(text_string_to_metric_families(text))
    values = {sample.name: sample.value for family in families for sample in family.samples}
    assert status == 200
    assert values["tidegate_tiny_seen_total"] == 1
    assert values["tidegate_tiny_bus_dropped_total"] == 0
    assert values["tidegate_tiny_process_resident_memory_bytes"] > 0
    assert await tiny.end(signal.SIGINT) == 0


async def test_a_trace_goes_through_the_process_into_the_file(tiny: Process, client: Client) -> None:
    await tiny.start(environ={"TIDEGATE_COMMON_TRACE_FILE": str(tiny.trace_file)})
    await tiny.line("msg=wired")
    heard = await client.subscribe("tg.v1.tiny-out.n0")
    await client.publish("tg.v1.tiny.n0", b"one", headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    answer = await heard.next_msg(LIMIT_S)
    assert f"trace={TRACE}" in await tiny.line("msg=seen"), "log lines of a traced operation name the trace"
    assert await tiny.end() == 0
    (line,) = tiny.trace_file.read_text().splitlines()
    (span,) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (span["traceId"], span["name"]) == (TRACE, "tiny")
    assert answer.headers is not None
    assert answer.headers["traceparent"] == f"00-{TRACE}-{span['spanId']}-01"


async def test_a_collector_that_does_not_answer_delays_the_end_within_the_limit(tiny: Process, client: Client) -> None:
    await tiny.start(
        environ={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    )
    await tiny.line("msg=wired")
    heard = await client.subscribe("tg.v1.tiny-out.n0")
    await client.publish("tg.v1.tiny.n0", b"one")
    await heard.next_msg(LIMIT_S)
    began_s = time.monotonic()
    assert await tiny.end() == 0, "lost spans are no reason to fail"
    assert time.monotonic() - began_s < DRAIN_S


async def test_a_failed_task_ends_the_process_with_code_1(tiny: Process, client: Client) -> None:
    await tiny.start("--set", "common.log_format=json")
    await tiny.line('"msg":"wired"')
    await client.publish("tg.v1.tiny.n0", b"fail")
    line = json.loads(await tiny.line("task failed"))
    assert line["task"] == "fail_when_told"
    assert "RuntimeError: told to fail" in line["error"]
    assert await tiny.end(None) == 1


async def test_a_service_that_does_not_stop_is_left_behind_and_a_second_signal_ends_at_once(
    tiny: Process, client: Client
) -> None:
    await tiny.start("--set", "common.drain_timeout_s=60")
    await tiny.line("msg=wired")
    await client.publish("tg.v1.tiny.n0", b"hang")
    await tiny.line("msg=seen")
    tiny.process.send_signal(signal.SIGTERM)
    await tiny.line("msg=stopping")
    assert await tiny.end() == 128 + signal.SIGTERM

    await tiny.start("--set", "common.drain_timeout_s=0.5")
    await tiny.line("msg=wired")
    await client.publish("tg.v1.tiny.n0", b"hang")
    await tiny.line("msg=seen")
    assert await tiny.end() == 1
    assert "drain overran" in "".join(tiny.lines)


async def test_it_dies_with_its_parent(tiny: Process) -> None:
    """The parent here starts the service, prints its pid and is killed."""
    parent = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'tests.services.tiny', '--node', 'n0'],"
        " stderr=subprocess.PIPE)\n"
        "assert any(b'msg=wired' in line for line in child.stderr)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    tiny.process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", parent),
        env={**tiny.environ, "TIDEGATE_COMMON_DIE_WITH_PARENT": "true"},
        stdout=asyncio.subprocess.PIPE,
    )
    assert tiny.process.stdout is not None
    await asyncio.wait_for(tiny.process.stdout.readline(), LIMIT_S)
    tiny.process.kill()
    # The service holds the other end too: the pipe ends when both are gone.
    await asyncio.wait_for(tiny.process.communicate(), LIMIT_S)


async def test_a_parent_that_was_gone_before_the_service_began_is_noticed(tiny: Process) -> None:
    parent_pid = 1 if os.getppid() != 1 else 2
    await tiny.start("--set", "common.die_with_parent=true", "--set", f"common.parent_pid={parent_pid}")
    assert await tiny.end(None) == -signal.SIGKILL


async def test_it_can_be_stopped_while_no_server_answers(tmp_path: Path) -> None:
    process = Process(tmp_path, "nats://127.0.0.1:9")
    await process.start()
    await process.line("msg=connecting")
    assert await process.end() == 0


async def test_refused_credentials_are_the_callers_mistake(tmp_path: Path, server: EmbeddedServer) -> None:
    process = Process(tmp_path, server.url, server.user, "wrong")
    await process.start()
    assert await process.end(None) == 2
    assert "wrong" not in "".join(process.lines), "a password is never shown"
    assert "Traceback" not in "".join(process.lines)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--set", "nodee=n1"], "command line: nodee: found an unknown key, expected the known key 'node'"),
        (["--set", "common.http_port=-2"], "http_port: found '-2', expected int >= -1"),
        (["--set", "common.nats_url=nats://u:hidden@127.0.0.1:9"], "nats_url nats://127.0.0.1:9"),
        (["--config", "nowhere.toml"], "nowhere.toml: settings file: found No such file"),
    ],
)
@pytest.mark.usefixtures("own_log")
def test_the_callers_mistake_is_one_line_and_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.services.tiny import Tiny

    environ = {"TIDEGATE_COMMON_CONNECT_TIMEOUT_S": "0.2", "TIDEGATE_COMMON_HTTP_PORT": "-1"}
    assert main("tiny", Settings, Tiny, ["--node", "n0", *arguments], environ) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("tidegate tiny: ")]
    assert len(error) == 1
    assert told in error[0]
    assert "hidden" not in error[0]


class Failing:
    """Cannot be wired."""

    def __init__(self) -> None:
        self.stopped = False

    async def start(self, shell: Shell) -> None:
        raise RuntimeError("no engine")

    async def stop(self) -> None:
        self.stopped = True


async def test_a_service_that_cannot_be_wired_ends_with_code_1_and_is_not_stopped() -> None:
    async def connecting() -> MemoryBus:
        return MemoryBus(MemoryNetwork())

    service = Failing()
    common = CommonSettings(http_port=-1)
    assert await serve("tiny", "n0-1", common, service, Observe("tiny"), connecting) == 1
    assert not service.stopped, "stop() is for what was started"


async def test_supervised_tasks_may_return_or_be_cancelled_without_ending_anything() -> None:
    shell = Shell("tiny", "n0-1", bus=MemoryBus(MemoryNetwork()), observe=Observe("tiny"), clock=ManualClock())
    shell.ready()

    async def brief() -> None:
        pass

    async def endless() -> None:
        await asyncio.Event().wait()

    await shell.spawn(brief(), "brief")
    task = shell.spawn(endless(), "endless")
    task.cancel()
    await asyncio.wait({task})
    assert not shell.stopping.is_set()
    assert shell.health.ready
    shell.spawn(endless(), "endless")
    assert await drain(shell, None, DrainBudget(5.0))
    assert shell.failed is None
    assert not shell.health.ready, "while draining nothing new should come"
