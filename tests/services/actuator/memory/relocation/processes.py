"""The two processes of these tests: an engine that keeps writing, and an actuator that stops where it is told to."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from loadgen.memory_engine.engine import Report
from services.actuator.engines.protocol import EngineClient, SocketEngine
from services.actuator.memory import segment
from services.actuator.memory.attachment import SharedAttachment, gate_path
from services.actuator.memory.relocation import Relocator

WORKER = "n0/0/w0"
ROOT = Path(__file__).parents[5]


def connect(path: Path, timeout_s: float = 20.0) -> SocketEngine:
    return SocketEngine(EngineClient(WORKER, path, timeout_s))


def relocator(engine: SocketEngine) -> Relocator:
    return Relocator(engine, SharedAttachment.open)


class Child:
    """A process that talks in lines. A test's time limit bounds the wait for one."""

    ACTUATOR = "tests.services.actuator.memory.relocation.actuator_process"

    def __init__(self, module: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], cwd=ROOT, start_new_session=True, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.line()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()


class EngineProcess:
    """An engine at ``path`` whose segment is ``arena``; may be started again after it was killed."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.path = path
        self.arena = f"tidegate-test-{uuid.uuid4().hex}"
        self.arguments: Sequence[str] = arguments
        self.child: Child | None = None

    @property
    def segment(self) -> Path:
        return segment.FOLDER / self.arena

    def start(self) -> None:
        self.child = Child("loadgen.memory_engine", "--socket", str(self.path), "--arena", self.arena, *self.arguments)
        assert self.child.line() == "ready", "the engine did not come up"

    def report(self) -> Report:
        assert self.child is not None
        return msgspec.json.decode(self.child.ask("report"), type=Report)

    def kill(self) -> None:
        if self.child is not None:
            self.child.kill()

    def close(self) -> None:
        """Kill it, and take away what a killed engine leaves."""
        self.kill()
        self.segment.unlink(missing_ok=True)
        gate_path(self.arena).unlink(missing_ok=True)


def assert_served_right(report: Report) -> None:
    """Every byte of every session that the engine read was the session's own."""
    assert report.sessions.checked_blocks > 0, "nothing was read"
    assert not report.sessions.wrong_blocks, report.sessions.wrong
