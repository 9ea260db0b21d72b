"""Waiting for services: their HTTP port from the file that they write, then /ready and /metrics."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from loadgen.demo.processes import Child, Processes
from services.errors import TidegateError

READY_TIMEOUT_S: Final = 60.0


async def until_ready(processes: Processes, children: Sequence[Child]) -> None:
    """Wait for /ready of each; TidegateError when one is not there in time, ChildDied when one ended."""
    deadline_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
    for child in children:
        while not await asyncio.to_thread(_is_ready, processes.port_file(child.name)):
            processes.check()
            if asyncio.get_running_loop().time() > deadline_s:
                raise TidegateError(f"{child.name} was not ready within {READY_TIMEOUT_S:g} s:\n{child.tail()}")
            await asyncio.sleep(0.05)


def metrics_text(port_file: Path) -> str:
    """What /metrics answers; OSError when nobody does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{_port(port_file)}/metrics", timeout=5.0) as answer:
        return str(answer.read().decode())


def _port(port_file: Path) -> int:
    return int(port_file.read_text())


def _is_ready(port_file: Path) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{_port(port_file)}/ready", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, urllib.error.URLError):
        return False
