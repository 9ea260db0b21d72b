"""The whole loop as processes on a real server, and a witness on the bus that says what they do."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from loadgen.demo.processes import Child, Processes
from loadgen.demo.ready import metrics_text, until_ready
from loadgen.engine.specs import FleetConfig
from loadgen.node.files import NodeConfig, save_tables, write_config
from loadgen.node.replay import NODE_SOCKET
from loadgen.workload import builtin
from schemas.actions import ACTION_BATCH, ActionBatch
from schemas.codec import Codec, DecodeError
from schemas.engine import Sample
from schemas.metrics import COLUMN, METRICS
from schemas.outcomes import OUTCOME_BATCH, OutcomeBatch, Status
from schemas.policies import HEURISTIC_POINTER, KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.states import STATE_BATCH, StateBatch
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, wildcard
from schemas.telemetry import NODE_SAMPLE, NodeSample
from schemas.transitions import TRANSITION_BATCH, TransitionBatch
from services.bus import Message, nats
from services.bus.embedded import EmbeddedServer
from services.telemetry.sources.node_client import NodeClient

SERVICES = ("telemetry", "featurizer", "decision", "actuator", "learner")
NODE = "n0"
WORKERS = ("n0/0/w0", "n0/0/w1")
LIMIT_S = 30.0
"""Far more than anything takes; what waits this long has failed."""
COMPILE_LIMIT_S = 100.0
"""For a node that must compile its engine first, on a machine that does other things too."""
STEP_TIMEOUT_S = 0.3
SPEED = 40.0
"""Simulated seconds a second: 20 steps, which leaves half of two cores to processes that start again."""
WINDOW_STEPS = 4
SETTINGS: dict[str, dict[str, str]] = {
    "telemetry": {"source": "emulated", "retry_s": "0.05"},
    "featurizer": {"window_steps": str(WINDOW_STEPS)},
    "decision": {},
    "actuator": {},
    "learner": {
        "warmup_rows": "32",
        "publish_updates": "1000000",  # no candidates but those that a test publishes
        "checkpoint_every_s": "0.3",
        "fetch_timeout_s": "0.1",
    },
}
ENVIRON = {"learner": {"PYTHONPROFILEIMPORTTIME": "1"}}
"""Its log then tells every module that it loaded."""
KEPT = 4000


@dataclasses.dataclass
class Witness:
    """What went over the bus, newest last."""

    samples: deque[NodeSample] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))
    states: deque[StateBatch] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))
    actions: deque[ActionBatch] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))
    outcomes: deque[OutcomeBatch] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))
    transitions: deque[TransitionBatch] = dataclasses.field(default_factory=lambda: deque(maxlen=KEPT))

    async def attach(self, bus: nats.NatsBus) -> None:
        await self._keep(bus, "telemetry", NODE_SAMPLE, self.samples)
        await self._keep(bus, "state", STATE_BATCH, self.states)
        await self._keep(bus, "action", ACTION_BATCH, self.actions)
        await self._keep(bus, "outcome", OUTCOME_BATCH, self.outcomes)
        await self._keep(bus, "transition", TRANSITION_BATCH, self.transitions)

    async def _keep(self, bus: nats.NatsBus, family: Any, codec: Codec[Any], into: deque[Any]) -> None:
        async def on_batch(messages: list[Message]) -> None:
            for message in messages:
                try:
                    into.append(codec.decode(message.data))
                except DecodeError:  # a test published it
                    continue

        await bus.subscribe(wildcard(family), on_batch)


class RunningLoop:
    """Server, five services and one node of two workers; everything is gone after ``stop``."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.folder = folder
        self.server = EmbeddedServer(folder / "nats")
        self.processes = Processes(folder)
        self.witness = Witness()
        self._environ = environ
        self._engines = NodeClient(NODE, folder / NODE / NODE_SOCKET)
        self.bus: nats.NatsBus

    async def start(self) -> None:
        await self.server.start()
        self.bus = await nats.connect(self.server.url, user=self.server.user, password=self.server.password)
        await self.witness.attach(self.bus)
        self._write_node()
        await self.processes.start("node", ["-m", "loadgen.node", "--config", str(self.folder / "node.json")])
        first = [await self.launch(service) for service in ("learner", "featurizer", "decision")]
        await self.until(self._served, "the node compiles and serves its sockets", COMPILE_LIMIT_S)
        first.append(await self.launch("actuator"))
        await until_ready(self.processes, first)
        await until_ready(self.processes, [await self.launch("telemetry")])

    async def launch(self, service: str) -> Child:
        """Start a service, or start it again after it ended."""
        settings = dict(SETTINGS[service])
        if service in ("telemetry", "actuator"):
            settings |= {"node": NODE, "sockets": str(self.folder / "{node}")}
        if service == "telemetry":
            settings["boot_file"] = str(self.folder / "boot")
        if service == "learner":
            settings["checkpoint_dir"] = str(self.folder / "learner")
        environ = self._environ | ENVIRON.get(service, {})
        before = {name: os.environ.get(name) for name in environ}
        os.environ.update(environ)
        try:
            return await self.processes.start_service(service, service, self.server, settings, {})
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    async def bring_back(self, service: str) -> None:
        """Start an ended service again and wait until it is ready."""
        await until_ready(self.processes, [await self.launch(service)])

    async def end(self, service: str, how: signal.Signals) -> tuple[int, float]:
        """Signal a service and wait for its end: exit code, seconds it took."""
        process = self.processes.children[service].process
        began_s = time.monotonic()
        process.send_signal(how)
        async with asyncio.timeout(LIMIT_S):
            code = await process.wait()
        return code, time.monotonic() - began_s

    async def heal(self) -> None:
        """Whatever the test before did: server and services run, the heuristic is champion and acts."""
        await self.server.start()
        await self.until(lambda: self.bus.connected, "the witness is connected")
        dead = [name for name, child in self.processes.children.items() if not child.alive]
        assert "node" not in dead, self.processes.children["node"].tail()
        again = [await self.launch(name) for name in dead]
        await until_ready(self.processes, again)
        await self.point(KEY_CHAMPION, HEURISTIC_POINTER)
        await self.until_in_control(policy="heuristic")

    async def stop(self) -> list[str]:
        self._engines.close()
        await self.bus.drain(1.0)
        late = await self.processes.stop()
        await self.server.stop()
        return late

    # ---- what the engines and the bus say

    async def engines(self) -> tuple[int, NDArray[np.float64]]:
        """The node's step and METRICS rows, asked of the node itself: no service is needed."""
        _, reply = await self._engines.sample(Sample(-1, 0, 1.0))
        return reply.step, np.frombuffer(reply.metrics, "<f8").reshape(len(reply.workers), len(METRICS))

    async def rho(self) -> list[float]:
        """Overcommit factor in force in each engine."""
        return [float(value) for value in (await self.engines())[1][:, COLUMN["rho"]]]

    async def until(self, condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
        """Wait for a condition; what it is about stands in the failure."""
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
            await asyncio.sleep(0.01)

    async def until_rho(self, condition: Callable[[float], bool], what: str) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not all(condition(rho) for rho in await self.rho()):
            assert time.monotonic() < deadline_s, f"not within {LIMIT_S:g} s: {what}; rho {await self.rho()}"
            await asyncio.sleep(0.02)

    async def until_stepped(self, steps: int, what: str) -> None:
        """The node's own clock went on by ``steps``."""
        first, _ = await self.engines()
        deadline_s = time.monotonic() + LIMIT_S
        while (await self.engines())[0] < first + steps:
            assert time.monotonic() < deadline_s, f"{steps} steps of the node not within {LIMIT_S:g} s: {what}"
            await asyncio.sleep(0.02)

    async def until_in_control(self, steps: int = 2, policy: str = "") -> None:
        """``steps`` more steps come in which no worker is held and both engines took their commands."""
        seen = {self._order(batch) for batch in self.witness.outcomes}

        def taken() -> bool:
            acted = {
                self._order(batch)
                for batch in self.witness.actions
                if (not policy or batch.policy_version == policy) and not any(batch.holds)
            }
            good = [
                batch
                for batch in self.witness.outcomes
                if self._order(batch) not in seen
                and self._order(batch) in acted
                and Status.REFUSED not in batch.statuses
            ]
            return len(good) >= steps

        await self.until(taken, f"{steps} steps under control {policy}")

    @staticmethod
    def _order(batch: Any) -> tuple[int, int]:
        return batch.boot_id, batch.step

    async def metrics(self, service: str) -> dict[str, float]:
        """Samples of a service's /metrics by ``name{label="value",...}`` without the prefix ``tidegate_<service>_``."""
        text = await asyncio.to_thread(metrics_text, self.processes.port_file(service))
        return {
            sample.name.removeprefix(f"tidegate_{service}_")
            + ("{" + ",".join(sorted(sample.labels.values())) + "}" if sample.labels else ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    # ---- policies

    async def point(self, key: str, pointer: PolicyPointer) -> None:
        await self.bus.kv_put(BUCKET_POLICY, key, msgspec.json.encode(pointer))

    async def publish_network(self, key: str, pointer: PolicyPointer, data: bytes) -> None:
        """The object first, then the pointer."""
        await self.bus.object_put(BUCKET_WEIGHTS, pointer.version, data)
        await self.point(key, pointer)

    async def withdraw_candidate(self) -> None:
        await self.point(KEY_CANDIDATE, HEURISTIC_POINTER)

    def _served(self) -> bool:
        self.processes.check()
        return (self.folder / NODE / NODE_SOCKET).exists()

    def _write_node(self) -> None:
        workload = builtin("chat", duration_s=5000.0, rate_scale=0.25, seed=3)
        save_tables(self.folder / "requests.npz", workload.assign(len(WORKERS), 3))
        write_config(
            self.folder / "node.json",
            NodeConfig(
                node=NODE,
                sockets=str(self.folder / NODE),
                tables=str(self.folder / "requests.npz"),
                results=str(self.folder / "results.npz"),
                duration_s=1e6,
                fleet=FleetConfig(workers_per_card=len(WORKERS)),
                step_timeout_s=STEP_TIMEOUT_S,
                speed=SPEED,
                parent_pid=os.getpid(),
            ),
        )
