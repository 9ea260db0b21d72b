"""The MPS control daemon: its commands, its answers, and a client that asks it.

The daemon reads one command a line and answers on its output, errors included, often with status 0: every answer is
parsed, and what is not understood is an error. Limits set here reach clients that start later, none that runs.
(NVIDIA MPS documentation, *Legacy MPS v2 Interface*; driver 550 takes device ordinals only, later ones UUIDs too.)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from services.actuator.mps.fence import DEFAULT_PIPES, MIB, device_text, limit_text
from services.errors import DeviceError

PROGRAM: Final = "nvidia-cuda-mps-control"
_NO_DAEMON: Final = "Cannot find MPS control daemon"
_LIMIT: Final = re.compile(r"(?P<amount>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)i?B?\Z", re.IGNORECASE)
_UNITS: Final = {"": 1, "K": 1 << 10, "M": MIB, "G": 1 << 30, "T": 1 << 40}
_COLUMNS: Final = ("PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND")
_SUN_PATH_BYTES: Final = 107
"""Longest path of a Unix socket: above it the daemon only says that it cannot be found."""


class MpsClient(NamedTuple):
    """A line of ``ps``."""

    pid: int
    id: int
    server: int
    device: str
    """Beginning of the UUID."""
    namespace: str
    command: str


def default_limit_command(device: str | int, limit_bytes: int) -> str:
    """For servers that start later; lost when the daemon quits."""
    return f"set_default_device_pinned_mem_limit {device_text(device)} {limit_text(limit_bytes)}"


def server_limit_command(server: int, device: str | int, limit_bytes: int) -> str:
    """For clients of this server that start later; those that run keep what they have."""
    return f"set_device_pinned_mem_limit {_pid(server)} {device_text(device)} {limit_text(limit_bytes)}"


def parse_pids(answer: str) -> tuple[int, ...]:
    """Of ``get_server_list`` and ``get_client_list``: one pid a line; none is an empty answer."""
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if not all(line.isascii() and line.isdigit() and int(line) > 0 for line in lines):
        raise _not_understood("pids, one a line", answer)
    return tuple(int(line) for line in lines)


def parse_ps(answer: str) -> tuple[MpsClient, ...]:
    """Of ``ps``: a table with a head, columns as above; the command is the rest of the line."""
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return ()
    if tuple(lines[0].split()[: len(_COLUMNS)]) != _COLUMNS:
        raise _not_understood(f"the columns {' '.join(_COLUMNS)}", answer)
    clients = []
    for line in lines[1:]:
        parts = line.split(maxsplit=len(_COLUMNS) - 1)
        if len(parts) < len(_COLUMNS) - 1 or not all(part.isdigit() for part in parts[:3]):
            raise _not_understood("a client's line", line)
        command = parts[5].strip() if len(parts) > 5 else ""
        clients.append(MpsClient(int(parts[0]), int(parts[1]), int(parts[2]), parts[3], parts[4], command))
    return tuple(clients)


def parse_limit(answer: str) -> int | None:
    """Of ``get_device_pinned_mem_limit`` and its default: bytes; None when no limit is set."""
    text = answer.strip()
    if not text or text.lower() in ("none", "n/a", "no limit", "not set"):
        return None
    match = _LIMIT.match(text)
    if match is None:
        raise _not_understood("a limit such as 10752M", answer)
    return int(float(match["amount"]) * _UNITS[match["unit"].upper()]) or None


class Control:
    """Asks one daemon, one command at a time. Every method raises DeviceError: ``mps_missing`` (no such program),
    ``mps_not_running``, ``mps_silent``, ``mps_answer`` (not understood, or a refusal)."""

    def __init__(
        self, pipes: Path = DEFAULT_PIPES, *, program: Sequence[str] = (PROGRAM,), timeout_s: float = 5.0
    ) -> None:
        self._pipes = pipes
        self._program = tuple(program)
        self._timeout_s = timeout_s

    async def servers(self) -> tuple[int, ...]:
        return parse_pids(await self.run("get_server_list"))

    async def clients(self, server: int) -> tuple[int, ...]:
        return parse_pids(await self.run(f"get_client_list {_pid(server)}"))

    async def ps(self) -> tuple[MpsClient, ...]:
        return parse_ps(await self.run("ps"))

    async def default_limit(self, device: str | int) -> int | None:
        return parse_limit(await self.run(f"get_default_device_pinned_mem_limit {device_text(device)}"))

    async def server_limit(self, server: int, device: str | int) -> int | None:
        return parse_limit(await self.run(f"get_device_pinned_mem_limit {_pid(server)} {device_text(device)}"))

    async def set_default_limit(self, device: str | int, limit_bytes: int) -> int | None:
        """Set, and what the daemon then says is set. It does not check that the device exists."""
        self._accepted(await self.run(default_limit_command(device, limit_bytes)))
        return await self.default_limit(device)

    async def set_server_limit(self, server: int, device: str | int, limit_bytes: int) -> int | None:
        self._accepted(await self.run(server_limit_command(server, device, limit_bytes)))
        return await self.server_limit(server, device)

    async def run(self, command: str) -> str:
        """The daemon's answer to one command line."""
        if "\n" in command:
            raise ValueError("one command a time")
        socket = self._pipes / "control"
        if len(str(socket).encode()) > _SUN_PATH_BYTES:
            raise DeviceError(
                "mps_not_running", f"{socket} is longer than {_SUN_PATH_BYTES} bytes", "use a shorter pipe directory"
            )
        environment = {**os.environ, "CUDA_MPS_PIPE_DIRECTORY": str(self._pipes), "LC_ALL": "C"}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *self._program, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise DeviceError(
                "mps_missing", f"{self._program[0]}: {error.strerror}", "install nvidia-compute-utils of the driver"
            ) from error
        try:
            async with asyncio.timeout(self._timeout_s):
                output, _ = await process.communicate(f"{command}\n".encode())
        except TimeoutError as error:
            raise DeviceError(
                "mps_silent", f"no answer to {command!r} within {self._timeout_s:g} s", "look at the daemon's log"
            ) from error
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        answer = output.decode(errors="replace")
        if _NO_DAEMON in answer:
            raise DeviceError(
                "mps_not_running", f"{answer.strip()} in {self._pipes}", f"start it: {PROGRAM} -d, same pipe directory"
            )
        if process.returncode:
            raise DeviceError("mps_answer", f"{command!r} ended with {process.returncode}: {answer.strip()[:200]}")
        return answer

    @staticmethod
    def _accepted(answer: str) -> None:
        # Set commands answer nothing; anything said is a refusal.
        if answer.strip():
            raise DeviceError("mps_answer", answer.strip()[:200])


def _pid(pid: int) -> int:
    if pid <= 0:
        raise ValueError(f"pid {pid}: expected above 0")
    return pid


def _not_understood(expected: str, found: str) -> DeviceError:
    return DeviceError("mps_answer", f"found {found.strip()[:200]!r}, expected {expected}")
