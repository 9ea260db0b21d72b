"""`tidegate bench loop`: how long from a sample to its action, and what the five services cost.

A real server, the real services in processes of their own, made-up node samples, engines that accept everything;
beside it, in the same run and over the same server, three bare NATS hops between processes: as many messages of
the same sizes, sent in the middle of the same steps, so that both meet the same cold caches. The loop ends at the
actuator's receipt of the action. The learner ingests and stores, without gradients. The featurizer's long window
is cut to a few steps, so that transitions flow from the start.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from loadgen.bench.hops import BareHops
from loadgen.demo.processes import Processes
from loadgen.demo.ready import metrics_text, until_ready
from schemas.actions import ACTION_BATCH, WorkerAction, action_batch
from schemas.features import FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION, STEP_S, worker_id
from schemas.metrics import METRICS
from schemas.states import STATE_BATCH, StateBatch
from schemas.telemetry import NODE_SAMPLE, NodeSample
from services.bus.embedded import EmbeddedServer
from services.errors import TidegateError, UserError

STARTS: Final = (("learner", "actuator", "decision", "featurizer"), ("telemetry",))
"""What starts together; telemetry last, since it sends at once."""
SERVICES: Final = tuple(name for group in STARTS for name in group)
WINDOW_STEPS: Final = 2
WARM_UP_STEPS: Final = 4
"""Windows fill, transitions begin to flow, and what runs for the first time has run."""
QUIET_STEPS: Final = 0.5
"""From a step's samples to the bare hops and the readings: when the loop has come to rest."""
SETTLE_LIMIT_S: Final = 10.0
BUS_LOSSES: Final = ("dropped", "publish_dropped", "callback_errors", "stream_failures", "reconnects")
_STAMP: Final = 1 << 62
"""A number as long on the wire as a boot id or a clock."""


def bench_loop(workers: int, per_node: int, seconds: float, *, step_s: float = STEP_S) -> dict[str, Any]:
    """The figures of one run; keys are those of the command's JSON. UserError for impossible numbers.

    ``step_s``: from one sample of a node to the next; the system's own unless a test is in a hurry.
    """
    if not 1 <= per_node <= 64:
        raise UserError(f"--per-node: found {per_node}, expected 1 to 64")
    if workers < per_node or workers % per_node:
        raise UserError(f"--workers: found {workers}, expected a multiple of --per-node {per_node}")
    if not 2 * step_s <= seconds <= 86_400:
        raise UserError(f"--seconds: found {seconds:g}, expected {2 * step_s:g} to 86400")
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        return asyncio.run(_Bench(Path(folder), workers, per_node, int(seconds / step_s), step_s).run())


class _Reading(NamedTuple):
    """CPU seconds, memory and counters of every process at one moment."""

    cpu_s: dict[str, float]
    rss_bytes: dict[str, float]
    counters: dict[str, float]
    """By name without prefix ``tidegate_`` and suffix ``_total``, summed over labels."""


class _Bench:
    """One run of ``steps`` measured steps."""

    def __init__(self, folder: Path, workers: int, per_node: int, steps: int, step_s: float) -> None:
        self._folder = folder
        self._workers, self._per_node, self._steps, self._step_s = workers, per_node, steps, step_s
        self._server = EmbeddedServer(folder / "nats")
        self._processes = Processes(folder)
        self._hops = BareHops(self._server, self._processes, payload_bytes(per_node))

    async def run(self) -> dict[str, Any]:
        await self._server.start()
        try:
            await self._hops.start()
            settings = self._settings()
            for group in STARTS:
                children = [
                    await self._processes.start_service(name, name, self._server, settings[name], {}) for name in group
                ]
                await until_ready(self._processes, children)
            before, after = await self._measure()
            lost = await self._losses()
            hops = (await self._hops.latencies_ms())[-self._steps * self._nodes :]
            self._processes.check()
        finally:
            await self._hops.stop()
            late = await self._processes.stop()
            await self._server.stop()
        if late:
            raise TidegateError(f"{', '.join(late)} had to be killed")
        return self._figures(before, after, lost, hops)

    @property
    def _nodes(self) -> int:
        return self._workers // self._per_node

    async def _measure(self) -> tuple[_Reading, _Reading]:
        """Readings before and after the measured steps, a burst of bare hops in the middle of each."""
        first_s = time.monotonic() + (WARM_UP_STEPS + QUIET_STEPS) * self._step_s
        await asyncio.sleep(first_s - time.monotonic())
        before = self._reading()
        for step in range(self._steps):
            await asyncio.sleep(first_s + step * self._step_s - time.monotonic())
            await self._hops.burst(self._nodes)
            self._processes.check()
        await asyncio.sleep(first_s + self._steps * self._step_s - time.monotonic())
        return before, self._reading()

    def _reading(self) -> _Reading:
        reading = _Reading({}, {}, {})
        watched = {name: self._processes.children[name].process.pid for name in SERVICES}
        for name, pid in (watched | {"nats-server": self._server.pid or 0}).items():
            process = psutil.Process(pid)
            times = process.cpu_times()
            reading.cpu_s[name] = times.user + times.system
            reading.rss_bytes[name] = float(process.memory_info().rss)
        reading.counters.update(self._counters())
        return reading

    def _counters(self) -> dict[str, float]:
        counters: dict[str, float] = {}
        for name in SERVICES:
            for family in text_string_to_metric_families(metrics_text(self._processes.port_file(name))):
                for sample in family.samples:
                    key = sample.name.removeprefix("tidegate_").removesuffix("_total")
                    counters[key] = counters.get(key, 0.0) + sample.value
                    if "action" in sample.labels:
                        counters[f"{key}:{sample.labels['action']}"] = sample.value
        return counters

    async def _losses(self) -> dict[str, int]:
        """What was lost since the first sample, by kind: bus drops of every service, audit gaps, rejected
        messages, and samples whose action never came. One lost message may count in several places."""
        deadline_s = time.monotonic() + SETTLE_LIMIT_S
        while True:
            counters = self._counters()
            missing = counters["telemetry_samples"] - counters["actuator_events_batches"]
            if missing <= 0 or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(0.1)
        lost = {f"{name}_{kind}": counters[f"{name}_bus_{kind}"] for name in SERVICES for kind in BUS_LOSSES}
        for key in ("superseded", "duplicates", "decode_errors", "audit_gaps"):
            lost[f"actuator_{key}"] = counters[f"actuator_events_{key}"]
        for key in ("featurizer_rejected", "decision_rejected"):
            lost[key] = counters.get(key, 0.0)
        lost["actions_missing"] = max(missing, 0.0)
        return {key: int(value) for key, value in lost.items() if value}

    def _settings(self) -> dict[str, dict[str, str]]:
        return {
            "learner": {"updates_per_transition": "0", "checkpoint_dir": str(self._folder / "learner")},
            "actuator": {"engine": "loopback", "latency_file": str(self._folder / "latency.npy")},
            "decision": {"policy": "heuristic", "step_s": str(self._step_s)},
            "featurizer": {"window_steps": str(WINDOW_STEPS)},
            "telemetry": {
                "source": "synthetic",
                "step_s": str(self._step_s),
                "synthetic_nodes": str(self._nodes),
                "synthetic_workers": str(self._per_node),
                "boot_file": str(self._folder / "boot"),
            },
        }

    @staticmethod
    def _acting_share(before: _Reading, after: _Reading) -> float:
        """Share of the decisions that were another action than hold: what a step costs depends on it."""
        made = {
            key: after.counters[key] - before.counters.get(key, 0.0)
            for key in after.counters
            if key.startswith("decision_decisions:")
        }
        return 1.0 - made.get("decision_decisions:hold", 0.0) / max(sum(made.values()), 1.0)

    def _figures(
        self, before: _Reading, after: _Reading, lost: Mapping[str, int], hops: NDArray[np.float64]
    ) -> dict[str, Any]:
        first, last = (int(reading.counters["actuator_events_batches"]) for reading in (before, after))
        latencies: NDArray[np.float64] = np.load(self._folder / "latency.npy")
        if last == first or not len(hops):
            raise TidegateError(f"{last - first} actions and {len(hops)} bare messages arrived: expected some")
        total = max(last, len(latencies))  # the file holds the newest ones and may go on beyond the last reading
        latencies = latencies[len(latencies) - total + first :][: last - first]
        cpu = {name: (after.cpu_s[name] - before.cpu_s[name]) / self._steps for name in before.cpu_s}
        p50, bare = float(np.percentile(latencies, 50)), float(np.percentile(hops, 50))
        grown = after.counters["featurizer_transitions"] - before.counters["featurizer_transitions"]
        return {
            "workers": self._workers,
            "latency_p50_ms": round(p50, 3),
            "latency_p99_ms": round(float(np.percentile(latencies, 99)), 3),
            "dropped": sum(lost.values()),
            "dropped_by": dict(lost),
            "cpu_s_per_step": {name: round(cpu[name], 4) for name in SERVICES},
            "cpu_s_per_step_all_services": round(sum(cpu[name] for name in SERVICES), 4),
            "cpu_s_per_step_nats_server": round(cpu["nats-server"], 4),
            "bare_hops_p50_ms": round(bare, 3),
            "bare_hops_p99_ms": round(float(np.percentile(hops, 99)), 3),
            "ratio_p50": round(p50 / bare, 2),
            "steps": self._steps,
            "acting_share": round(self._acting_share(before, after), 3),
            "transitions_per_step": round(grown / self._steps, 1),
            "memory_mb": {name: round(after.rss_bytes[name] / 1e6) for name in after.rss_bytes},
        }


def payload_bytes(per_node: int) -> tuple[int, int, int]:
    """Sizes of a node's sample, state and action message, as the services send them."""
    node = "n1000"
    workers = tuple(worker_id(node, w // 2, f"w{w}") for w in range(per_node))
    zeros = (0,) * per_node
    head = (node, _STAMP, 1000, SCHEMA_VERSION, _STAMP)
    sample = NodeSample(*head, workers, zeros, zeros, bytes(8 * len(METRICS) * per_node), "synthetic")
    features = bytes(4 * FEATURE_COUNT * per_node)
    state = StateBatch(*head, FEATURE_HASH, workers, zeros, zeros, zeros, features)
    actions = [
        WorkerAction(one, f"{one}@{_STAMP}.1000", 0, 1.0, 256, 0, _STAMP, _STAMP, "heuristic", 1.0, 31, (0, 0, 0, 0, 0))
        for one in workers
    ]
    action = action_batch(node, _STAMP, 1000, _STAMP, actions, "heuristic")
    return len(NODE_SAMPLE.encode(sample)), len(STATE_BATCH.encode(state)), len(ACTION_BATCH.encode(action))
