"""The loop of a demo: an embedded server, the five services, one emulated node per card, all in one folder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from loadgen.demo.options import DemoOptions
from loadgen.demo.plan import Plan
from loadgen.demo.processes import Child, Processes
from loadgen.demo.ready import until_ready
from loadgen.demo.report import MemoryFigures
from loadgen.engine.report import Results
from loadgen.node.files import NodeConfig, load_arrays, save_tables
from services.bus import Bus
from services.bus.embedded import EmbeddedServer
from services.errors import UserError

STEP_TIMEOUT_S: Final = 2.0
MAX_SOCKET_PATH: Final = 107
"""What the kernel takes as the address of a Unix socket."""
STREAM_BYTES: Final = 256 * 1024 * 1024
"""A demo's streams are thrown away with its folder: they need no more."""


class Loop:
    """Starts and stops the processes; ``folder`` holds sockets, logs, streams, checkpoints and results."""

    def __init__(self, folder: Path, options: DemoOptions, plan: Plan) -> None:
        self.folder = folder
        self.nodes = [f"n{k}" for k in range(options.nodes)]
        self.server = EmbeddedServer(folder / "nats")
        self.processes = Processes(folder)
        self._options = options
        self._plan = plan
        longest = max(len(str(folder / node / f"0-w{plan.fleet.workers_per_card - 1}.sock")) for node in self.nodes)
        if longest > MAX_SOCKET_PATH:
            raise UserError(
                f"folder {folder}: found a path of {longest} characters for a node's socket, expected at most "
                f"{MAX_SOCKET_PATH}: set TMPDIR or --keep to a shorter one"
            )

    async def start_server(self) -> None:
        await self.server.start()

    async def connect(self, name: str) -> Bus:
        from services.bus import nats

        return await nats.connect(self.server.url, user=self.server.user, password=self.server.password, name=name)

    async def start(self) -> None:
        """Nodes and services; telemetry comes last, since the nodes' clocks begin with its first question."""
        for k, node in enumerate(self.nodes):
            self._write_node(k, node)
            await self.processes.start(
                f"node-{node}", ["-m", "loadgen.node", "--config", str(self._file(node, "json"))]
            )
        children = [
            await self._start("learner", "learner"),
            await self._start("decision", "decision"),
            await self._start("featurizer", "featurizer"),
            *[await self._start("actuator", f"actuator-{node}", node) for node in self.nodes],
        ]
        await until_ready(self.processes, children)
        await self._until_served()
        telemetry = [await self._start("telemetry", f"telemetry-{node}", node) for node in self.nodes]
        await until_ready(self.processes, telemetry)

    async def revive(self) -> list[str]:
        """Start services that ended again, as a supervisor would; the names. ChildDied when a node ended: its
        requests are lost with it."""
        return await self.processes.revive(lambda name: not name.startswith("node-"))

    @property
    def finished(self) -> bool:
        """Every node has written its results."""
        return all(self._file(node, "npz").exists() for node in self.nodes)

    def results(self) -> Results:
        """All nodes' requests together. Call it once ``finished``."""
        parts = [load_arrays(self._file(node, "npz")) for node in self.nodes]
        joined: dict[str, Any] = {}
        for name in parts[0]:
            if name.startswith("node."):
                continue
            arrays = [part[name] for part in parts]
            joined[name] = float(arrays[0]) if arrays[0].ndim == 0 else np.concatenate(arrays)
        return Results(**joined)

    def node_figures(self, name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """A figure that each node wrote beside its requests, of all nodes one after another."""
        parts = [load_arrays(self._file(node, "npz"))[f"node.{name}"] for node in self.nodes]
        return np.concatenate([np.atleast_1d(part) for part in parts]).astype(np.float64)

    def memory(self) -> MemoryFigures:
        """What the nodes' bytes did. Call it once ``finished``."""

        def total(name: str) -> int:
            return int(self.node_figures(f"memory_{name}").sum())

        scale = int(self.node_figures("memory_scale").max())
        return MemoryFigures(
            scale=scale,
            packed_bytes=total("move_bytes") * scale,
            out_bytes=total("out_bytes") * scale,
            back_bytes=total("back_bytes") * scale,
            checks=total("verified"),
            wrong_blocks=total("wrong"),
            unshared_workers=total("unshared"),
        )

    async def stop(self) -> list[str]:
        """Everything ends; names of processes that had to be killed."""
        late = await self.processes.stop()
        await self.server.stop()
        return late

    def _file(self, name: str, suffix: str) -> Path:
        return self.folder / f"{name}.{suffix}"

    def _write_node(self, number: int, node: str) -> None:
        save_tables(self._file(f"{node}-requests", "npz"), self._plan.node_tables(number))
        config = NodeConfig(
            node=node,
            sockets=str(self.folder / node),
            tables=str(self._file(f"{node}-requests", "npz")),
            results=str(self._file(node, "npz")),
            duration_s=self._plan.duration_s,
            fleet=self._plan.live_fleet(),
            step_timeout_s=STEP_TIMEOUT_S,
            speed=self._options.speed,
            linger_s=3600.0,
            parent_pid=os.getpid(),
        )
        self._file(node, "json").write_bytes(msgspec.json.encode(config))

    async def _start(self, service: str, name: str, node: str = "") -> Child:
        settings = self._settings(service, name) | ({"node": node} if node else {})
        common = {}
        if self._options.trace_out is not None:
            common = {"trace_file": str(self._options.trace_out.absolute()), "trace_ratio": "1.0"}
        return await self.processes.start_service(service, name, self.server, settings, common)

    def _settings(self, service: str, name: str) -> dict[str, str]:
        sockets = str(self.folder / "{node}")
        return {
            "telemetry": {"source": "emulated", "sockets": sockets, "boot_file": str(self._file(name, "boot"))},
            "featurizer": {"stream_max_bytes": str(STREAM_BYTES)},
            "decision": {"policy": self._options.policy},
            "actuator": {"sockets": sockets, "audit_max_bytes": str(STREAM_BYTES)},
            "learner": {
                "checkpoint_dir": str(self.folder / "learner"),
                "seed": str(self._options.seed),
                "stream_max_bytes": str(STREAM_BYTES),
                "updates_per_transition": "1.0",
                "fetch_timeout_s": "0.2",
            },
        }[service]

    async def _until_served(self) -> None:
        """Wait for the nodes' sockets: they compile before they serve."""
        while not all((self.folder / node / "node.sock").exists() for node in self.nodes):
            self.processes.check()
            await asyncio.sleep(0.05)
