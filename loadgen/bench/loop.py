"""`tidegate bench loop`: how long from a sample to its action, and what the five services cost.

A real server, the real services in processes of their own, made-up node samples, engines that accept everything;
beside it, in the same run and over the same server, three bare NATS hops between processes with messages of the
sample's size. The loop ends at the actuator's receipt of the action. The learner ingests and stores, without
gradients. The featurizer's long window is cut to a few steps, so that transitions flow from the start.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from loadgen.bench.hops import measure_hops
from loadgen.demo.processes import Processes
from loadgen.demo.ready import metrics_text, until_ready
from schemas.identity import STEP_S
from schemas.metrics import METRICS
from services.bus.embedded import EmbeddedServer
from services.errors import TidegateError, UserError

SERVICES: Final = ("learner", "actuator", "decision", "featurizer", "telemetry")
"""In the order of their start: who sends comes last."""
WINDOW_STEPS: Final = 2
WARM_UP_S: Final = 3 * WINDOW_STEPS * STEP_S
HOP_ROUNDS: Final = 5
HOP_SAMPLES: Final = 200
"""Bare-hop samples at least: one burst of a step's messages is a single sample for a small fleet."""


def bench_loop(workers: int, per_node: int, seconds: float) -> dict[str, Any]:
    """The figures of one run; keys are those of the command's JSON. UserError for impossible numbers."""
    if not 1 <= per_node <= 64:
        raise UserError(f"--per-node: found {per_node}, expected 1 to 64")
    if workers < per_node or workers % per_node:
        raise UserError(f"--workers: found {workers}, expected a multiple of --per-node {per_node}")
    if not seconds >= 2 * STEP_S:
        raise UserError(f"--seconds: found {seconds:g}, expected {2 * STEP_S:g} or more")
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        return asyncio.run(_bench(Path(folder), workers, per_node, seconds))


async def _bench(folder: Path, workers: int, per_node: int, seconds: float) -> dict[str, Any]:
    nodes = workers // per_node
    server = EmbeddedServer(folder / "nats")
    processes = Processes(folder)
    await server.start()
    try:
        await processes.start("relay", ["-m", "loadgen.bench.hops", server.url, server.user, server.password])
        hops = await measure_hops(
            server.url, server.user, server.password, messages=nodes, payload_bytes=8 * len(METRICS) * per_node,
            rounds=max(HOP_ROUNDS, HOP_SAMPLES // nodes), pause_s=0.02,
        )  # fmt: skip
        settings = _settings(folder, nodes, per_node)
        for name in SERVICES:
            child = await processes.start_service(name, name, server, settings[name], {})
            await until_ready(processes, [child])
        await asyncio.sleep(WARM_UP_S)
        before = _readings(processes, server)
        await asyncio.sleep(seconds)
        after = _readings(processes, server)
        processes.check()
    finally:
        late = await processes.stop()
        await server.stop()
    if late:
        raise TidegateError(f"{', '.join(late)} had to be killed")
    return _figures(workers, seconds, before, after, _latencies(folder, before, after), hops)


def _settings(folder: Path, nodes: int, per_node: int) -> dict[str, dict[str, str]]:
    return {
        "learner": {"updates_per_transition": "0", "checkpoint_dir": str(folder / "learner")},
        "actuator": {"engine": "loopback", "latency_file": str(folder / "latency.npy")},
        "decision": {"policy": "heuristic"},
        "featurizer": {"window_steps": str(WINDOW_STEPS)},
        "telemetry": {
            "source": "synthetic",
            "synthetic_nodes": str(nodes),
            "synthetic_workers": str(per_node),
            "boot_file": str(folder / "boot"),
        },
    }


class _Reading:
    """CPU seconds, memory and counters of every service at one moment."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.rss_bytes: dict[str, float] = {}
        self.counters: dict[str, float] = {}

    def total(self, *names: str) -> float:
        return sum(self.counters.get(name, 0.0) for name in names)


def _readings(processes: Processes, server: EmbeddedServer) -> _Reading:
    reading = _Reading()
    watched = {name: processes.children[name].process.pid for name in SERVICES} | {"nats-server": server.pid or 0}
    for name, pid in watched.items():
        process = psutil.Process(pid)
        times = process.cpu_times()
        reading.cpu_s[name] = times.user + times.system
        reading.rss_bytes[name] = float(process.memory_info().rss)
    for name in SERVICES:
        for family in text_string_to_metric_families(metrics_text(processes.port_file(name))):
            for sample in family.samples:
                reading.counters[sample.name] = reading.counters.get(sample.name, 0.0) + sample.value
    return reading


def _latencies(folder: Path, before: _Reading, after: _Reading) -> NDArray[np.float64]:
    """Milliseconds of the actions received between the readings, as the actuator wrote them at its end."""
    everything: NDArray[np.float64] = np.load(folder / "latency.npy")
    wanted = int(after.total(BATCHES) - before.total(BATCHES))
    return everything[-wanted:] if wanted else everything


def _figures(
    workers: int,
    seconds: float,
    before: _Reading,
    after: _Reading,
    latencies: NDArray[np.float64],
    hops: NDArray[np.float64],
) -> dict[str, Any]:
    steps = seconds / STEP_S
    cpu = {name: round((after.cpu_s[name] - before.cpu_s[name]) / steps, 4) for name in before.cpu_s}
    p50, bare = float(np.percentile(latencies, 50)), float(np.percentile(hops, 50))
    return {
        "workers": workers,
        "latency_p50_ms": round(p50, 3),
        "latency_p99_ms": round(float(np.percentile(latencies, 99)), 3),
        "dropped": int(sum(after.total(name) - before.total(name) for name in DROPS)),
        "cpu_s_per_step": {name: cpu[name] for name in SERVICES},
        "cpu_s_per_step_all_services": round(sum(cpu[name] for name in SERVICES), 4),
        "cpu_s_per_step_nats_server": cpu["nats-server"],
        "bare_hops_p50_ms": round(bare, 3),
        "ratio_p50": round(p50 / bare, 2),
        "steps": steps,
        "memory_mb": {name: round(after.rss_bytes[name] / 1e6) for name in after.rss_bytes},
    }
