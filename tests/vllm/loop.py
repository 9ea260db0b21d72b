"""The five services steering real vLLM servers, as processes of their own around a real NATS server."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from loadgen.demo.processes import Processes
from loadgen.demo.ready import until_ready
from schemas.actions import Action
from schemas.metrics import COLUMN
from schemas.outcomes import OUTCOME_BATCH, OutcomeBatch, Refusal, outcomes_of
from schemas.subjects import subject
from schemas.telemetry import NODE_SAMPLE, metrics_of
from services.bus import Bus, Message
from services.bus import nats as nats_bus
from services.bus.embedded import EmbeddedServer
from tests.vllm.servers import VllmServer

NODE = "n0"
HBM_BYTES = 64 << 30
"""Of a card that is none: the servers run on CPUs."""
SERVICES = ("learner", "decision", "featurizer", "actuator", "telemetry")


class Loop:
    """Starts, breaks and stops them; what the bus carried is counted."""

    def __init__(self, folder: Path, servers: Sequence[VllmServer]) -> None:
        self.folder = folder
        self.server = EmbeddedServer(folder / "nats")
        self.processes = Processes(folder)
        self._servers = servers
        self.samples = 0
        self.rho: dict[str, set[float]] = {}
        """Effective factors that each worker's engine confirmed."""
        self.executed: Counter[str] = Counter()
        """Actions other than hold, as executed."""
        self.refused: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        """Metrics that were absent in a sample of a worker that answered."""
        self.bus: Bus | None = None

    async def start(self) -> None:
        await self.server.start()
        children = [await self._start(name) for name in SERVICES[:-1]]
        await until_ready(self.processes, children)
        await until_ready(self.processes, [await self._start("telemetry")])
        await self._listen()

    async def _listen(self) -> None:
        self.bus = await nats_bus.connect(
            self.server.url, user=self.server.user, password=self.server.password, name="test"
        )
        await self.bus.subscribe(subject("telemetry", NODE), self._on_samples)
        await self.bus.subscribe(subject("outcome", NODE), self._on_outcomes)

    async def stop(self) -> None:
        if self.bus is not None:
            await self.bus.drain()
        await self.processes.stop()
        await self.server.stop()

    async def kill(self, name: str) -> None:
        """SIGKILL to a service, and start it again as a supervisor would."""
        child = self.processes.children[name]
        self.processes.kill(name, signal.SIGKILL)
        await child.process.wait()
        await until_ready(self.processes, [await self._start(name)])

    async def kill_nats(self, away_s: float) -> None:
        """SIGKILL to the bus; it comes back with the same port and store."""
        await self.server.kill()
        await asyncio.sleep(away_s)
        await self.server.start()

    async def _start(self, name: str):  # type: ignore[no-untyped-def]
        sockets = str(self._servers[0].sockets)
        engines = [
            {
                "kind": "vllm", "url": one.url, "name": one.name, "service_class": "chat",
                "hbm_bytes": HBM_BYTES, "reference_tokens_per_s": 500.0,
            }
            for one in self._servers
        ]  # fmt: skip
        settings = {
            "telemetry": {
                "node": NODE, "source": "engines", "engines": json.dumps(engines), "sockets": sockets,
                "boot_file": str(self.folder / "boot"), "devices": "none", "scrape_timeout_s": "1.8",
            },
            "featurizer": {},
            "decision": {},
            # The reserve of a whole card is more than these pools have.
            "actuator": {
                "node": NODE, "sockets": sockets, "engine_timeout_s": "3", "effects": json.dumps({"reserve_bytes": 0}),
            },
            "learner": {"checkpoint_dir": str(self.folder / "learner")},
        }[name]  # fmt: skip
        return await self.processes.start_service(name, name, self.server, settings, {})

    async def _on_samples(self, messages: list[Message]) -> None:
        for message in messages:
            sample = NODE_SAMPLE.decode(message.data)
            self.samples += 1
            values = metrics_of(sample)
            for row, worker in enumerate(sample.workers):
                for name in ("kv_bytes", "q0_bytes", "running", "rho", "generation"):
                    self.missing[f"{worker} {name}"] += bool(np.isnan(values[row, COLUMN[name]]))

    async def _on_outcomes(self, messages: list[Message]) -> None:
        for message in messages:
            batch: OutcomeBatch = OUTCOME_BATCH.decode(message.data)
            for one in outcomes_of(batch):
                if one.effective_rho > 0:  # nothing is known of an engine that did not answer
                    self.rho.setdefault(one.worker, set()).add(round(float(one.effective_rho), 1))
                if one.executed_action:
                    self.executed[Action(one.executed_action).name.lower()] += 1
                if one.refusal:
                    self.refused[Refusal(one.refusal).name.lower()] += 1
