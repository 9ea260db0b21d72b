"""The demo as a process in a temporary folder of its own, by which everything that it started is found."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from loadgen.demo.ready import metrics_text

LIMIT_S = 100.0
"""For all that may have to be compiled first; without that, a demo of these tests takes a tenth of it."""

QUICK = {
    "TIDEGATE_FEATURIZER_WINDOW_STEPS": "3",
    "TIDEGATE_LEARNER_WARMUP_ROWS": "16",
    "TIDEGATE_LEARNER_PUBLISH_UPDATES": "2",
}
"""Settings under which a network is there after a few steps."""


class Demo:
    """``tidegate demo`` with these arguments; it and its children keep what is temporary in ``folder``."""

    def __init__(self, *arguments: str, environ: Mapping[str, str] = QUICK) -> None:
        # Not pytest's own: a Unix socket's path holds 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="tg-"))
        self.process: asyncio.subprocess.Process
        self._arguments = arguments
        self._environ = {**os.environ, **environ, "TMPDIR": str(self.folder)}

    async def __aenter__(self) -> Demo:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.cli", "demo", "--plain", *self._arguments),
            env=self._environ,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        left = self.left()
        for process in left:
            process.kill()
        # The demo's own exit is asyncio's to collect.
        psutil.wait_procs([process for process in left if process.pid != self.process.pid], timeout=5.0)
        if self.process.returncode is None:
            await self.process.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    async def until_it_runs(self) -> None:
        """All services are up and the replay has begun."""
        await self.until(lambda: any(self._run_folder("telemetry-n0.port")), "telemetry is ready")

    async def until(self, condition: object, what: str, limit_s: float = LIMIT_S) -> None:
        assert callable(condition)
        deadline_s = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {limit_s:g} s: {what}"
            await asyncio.sleep(0.02)

    async def output(self) -> tuple[str, str]:
        """stdout and stderr, once it has ended."""
        async with asyncio.timeout(LIMIT_S):
            out, err = await self.process.communicate()
        return out.decode(), err.decode()

    def server_port(self) -> int:
        """Of the embedded server, while it runs."""
        ports = next(self._run_folder("nats/*.ports"))
        return int(json.loads(ports.read_bytes())["nats"][0].rpartition(":")[2])

    def steps_sampled(self) -> int:
        """Steps that telemetry has sent of the first node, as it tells itself; 0 while nobody answers."""
        try:
            text = metrics_text(next(self._run_folder("telemetry-n0.port")))
        except (OSError, ValueError, StopIteration):
            return 0
        lines = (line.split() for line in text.splitlines() if line.startswith("tidegate_telemetry_samples_total"))
        return int(sum(float(value) for _, value in lines))

    def left(self) -> list[psutil.Process]:
        """Processes of this demo that are alive, the demo itself among them."""
        mark = f"TMPDIR={self.folder}"
        return [process for process in psutil.process_iter() if process.pid != os.getpid() and _has(process, mark)]

    def _run_folder(self, pattern: str) -> Iterator[Path]:
        return self.folder.glob(f"tidegate-*/{pattern}")


def _has(process: psutil.Process, mark: str) -> bool:
    name, _, value = mark.partition("=")
    try:
        return bool(process.environ().get(name) == value and process.status() != psutil.STATUS_ZOMBIE)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False


def refuses(port: int) -> bool:
    """Whether nobody listens at this port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0
