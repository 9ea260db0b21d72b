"""`tidegate demo` as a newcomer runs it: real processes, and nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from loadgen.demo.options import DemoOptions
from loadgen.demo.plan import figures, make_plan, run_baselines
from tests.loadgen.demo.demos import Demo, refuses

pytestmark = pytest.mark.asyncio(loop_scope="module")

POLICIES = {"static", "fixed:1.6", "vllm_recompute", "vllm_offload", "vllm_offload+fast", "heuristic", "loop"}
FIGURES = {
    "goodput_tokens_per_s", "tokens_per_s", "hbm_utilisation", "queue_wait_p99_s", "tpot_p99_ms", "preemptions", "oom",
}  # fmt: skip
LOOP = {"steps", "latency_p50_ms", "latency_p99_ms", "policy_versions", "dropped"}
FIVE = ("telemetry sample", "featurize", "decide", "actuate", "transition")
GONE_LIMIT_S = 5.0
DURATION_S = 60
STEPS = DURATION_S // 2
WHAT = ("--duration", str(DURATION_S), "--workload", "chat", "--seed", "5")
LONG = ("--duration", "200", "--workload", "chat", "--speed", "2")
"""Soon prepared, and far from its end when it is stopped."""


class Finished(NamedTuple):
    """A demo that ran to its end."""

    code: int
    out: str
    err: str
    document: dict[str, Any]
    spans: list[str]
    left: list[str]
    port_refuses: bool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("demo")
    files = ("--json", str(folder / "demo.json"), "--trace-out", str(folder / "spans.jsonl"))
    async with Demo(*WHAT, "--policy", "dqn", "--speed", "25", *files) as demo:
        await demo.until_it_runs()
        port = demo.server_port()
        out, err = await demo.output()
        left = [" ".join(process.cmdline()) for process in demo.left()]
        assert demo.process.returncode is not None
        assert demo.process.returncode == 0, out + err
        assert not list(demo.folder.iterdir()), "the temporary folder is gone"
        return Finished(
            demo.process.returncode,
            out,
            err,
            json.loads((folder / "demo.json").read_text()),
            (folder / "spans.jsonl").read_text().splitlines(),
            left,
            refuses(port),
        )


async def test_it_ends_with_the_comparison_as_table_and_json(finished: Finished) -> None:
    assert not finished.err
    policies, loop = finished.document["policies"], finished.document["loop"]
    assert policies.keys() == POLICIES
    assert all(row.keys() == FIGURES for row in policies.values())
    assert loop.keys() >= LOOP
    assert loop["steps"] == STEPS
    assert loop["dropped"] == 0
    assert 0 < loop["latency_p50_ms"] <= loop["latency_p99_ms"]
    for name, row in policies.items():
        assert math.isfinite(row["goodput_tokens_per_s"]), name
        assert 0 < row["goodput_tokens_per_s"] <= row["tokens_per_s"], name
        assert 0 < row["hbm_utilisation"] < 1, name
        assert name in finished.out, "the table shows every policy"


async def test_no_process_and_no_port_is_left(finished: Finished) -> None:
    assert not finished.left
    assert finished.port_refuses


async def test_a_forced_network_acts_once_there_is_one(finished: Finished) -> None:
    first, *later = finished.document["loop"]["policy_versions"]
    assert first == "heuristic", "until a network is there"
    assert later, finished.document["loop"]
    assert all(version.startswith("dqn-") for version in later)


async def test_baselines_depend_on_the_seed_alone(finished: Finished) -> None:
    plan = make_plan(DemoOptions(duration_s=float(DURATION_S), workload="chat", seed=5))
    again = {name: figures(run.summary) for name, run in run_baselines(plan).items()}
    assert {name: finished.document["policies"][name] for name in again} == again


async def test_spans_without_a_collector(finished: Finished) -> None:
    names: dict[str, Counter[str]] = defaultdict(Counter)
    for number, line in enumerate(finished.spans, 1):
        document = json.loads(line)
        for spans in document["resourceSpans"]:
            for scope in spans["scopeSpans"]:
                for span in scope["spans"]:
                    names[span["traceId"]][span["name"]] += 1
                    # protobuf's own JSON form has ids in base64, OTLP's in hex; the rest is one
                    for key in ("traceId", "spanId", "parentSpanId"):
                        assert set(span.pop(key, "")) <= set("0123456789abcdef"), f"line {number}: {key}"
                    span.pop("links", None)
        ParseDict(document, TracesData())
    steps = [trace for trace in names.values() if trace["telemetry sample"]]
    assert len(steps) in (STEPS, STEPS + 1), "one trace a node and step"
    assert all(trace[name] <= 1 for trace in steps for name in FIVE)
    whole = [trace for trace in steps if all(trace[name] == 1 for name in FIVE)]
    assert len(whole) >= STEPS // 2, "held steps and the last one have no transition, all others the five"


class Running(NamedTuple):
    """Two demos side by side, both in the middle: one to be interrupted, one to be killed."""

    interrupted: Demo
    killed: Demo
    json: Path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    path = tmp_path_factory.mktemp("interrupted") / "demo.json"
    async with Demo(*LONG, "--json", str(path)) as interrupted, Demo(*LONG) as killed:
        await asyncio.gather(interrupted.until_it_runs(), killed.until_it_runs())
        yield Running(interrupted, killed, path)


async def test_ctrl_c_in_the_middle_leaves_nothing(running: Running) -> None:
    demo = running.interrupted
    port = demo.server_port()
    demo.process.send_signal(signal.SIGINT)
    out, err = await demo.output()
    assert demo.process.returncode == 130
    assert "Traceback" not in out + err
    assert not err
    assert not demo.left()
    assert refuses(port)
    assert not list(demo.folder.iterdir()), "the temporary folder is gone"
    assert not os.listdir(running.json.parent), "nothing half-written"


async def test_nothing_outlives_a_killed_demo(running: Running) -> None:
    demo = running.killed
    port = demo.server_port()
    started = demo.left()
    assert len(started) >= 8, "demo, server, node, five services"
    demo.process.kill()
    await demo.until(lambda: not demo.left(), "all are gone", GONE_LIMIT_S)
    assert refuses(port)


async def test_ctrl_c_while_it_prepares(tmp_path: Path) -> None:
    async with Demo("--duration", "100000", "--workload", "mixed", "--json", str(tmp_path / "demo.json")) as demo:
        assert demo.process.stdout is not None
        line = await demo.process.stdout.readline()
        assert b"preparing" in line
        demo.process.send_signal(signal.SIGINT)
        _, err = await demo.output()
        assert (demo.process.returncode, err) == (130, "")
        assert not demo.left()
    assert not os.listdir(tmp_path)


async def test_services_killed_in_the_middle_are_started_again_and_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    async with Demo("--duration", "120", "--workload", "chat", "--speed", "24", "--json", str(path)) as demo:
        await demo.until_it_runs()
        await demo.until(lambda: demo.steps_sampled() > 2, "the replay is in the middle")
        services = {
            process.cmdline()[2]: process for process in demo.left() if "services." in " ".join(process.cmdline()[1:3])
        }
        for name in ("services.learner", "services.telemetry", "services.decision"):
            services[name].kill()
        out, err = await demo.output()
        assert demo.process.returncode == 0, out + err
        for name in ("learner", "telemetry-n0", "decision"):
            assert f"{name} ended and was started again" in out
    assert json.loads(path.read_text())["loop"]["steps"] == 60
