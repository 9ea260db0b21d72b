"""A real second process on a real segment, and an engine in front of it."""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvsegment import FOLDER
from tests.services.actuator.engines.kvcached import player
from tests.services.actuator.engines.kvcached.player import PAGE

PAGES = 16
POOL = PAGES * PAGE


class Played:
    """A process that plays one engine after another; ``path`` is the segment of the present one."""

    def __init__(self) -> None:
        self.path = FOLDER / "none"
        self._process: subprocess.Popen[str] | None = None

    def play(self, name: str) -> None:
        self.path = FOLDER / name
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-S", str(Path(player.__file__))],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
        assert self.say(f"play {name} {PAGES}") == "ready"

    def say(self, words: str) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(words + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()


@pytest.fixture(scope="module")
def process() -> Iterator[Played]:
    played = Played()
    yield played
    played.kill()


@pytest.fixture
def played(process: Played, request: pytest.FixtureRequest) -> Iterator[Played]:
    """A fresh engine of 16 pages of 1 MiB; a test that kills it has the next one started anew."""
    name = f"tidegate-test-{os.getpid()}-{zlib.crc32(request.node.nodeid.encode())}"
    process.play(name)
    yield process
    process.path.unlink(missing_ok=True)
    process.path.with_name(f".{name}.tidegate").unlink(missing_ok=True)
