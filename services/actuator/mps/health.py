"""Is the MPS server still the one we knew: by pid, program and start time, from /proc.

A server that dies takes every client's work with it and a new one has another pid, so limits set on the old one are
gone. ``/proc/<pid>/comm`` holds 15 characters, in which server and control daemon are the same ``nvidia-cuda-mps``:
the program is read from the command line.
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Final, NamedTuple

from services.errors import DeviceError

SERVER: Final = "nvidia-cuda-mps-server"
_PROC: Final = Path("/proc")
_STATE, _START = 0, 19
"""Places in /proc/<pid>/stat after the command's closing bracket: fields 3 and 22 of proc(5)."""


class Health(enum.Enum):
    ALIVE = "alive"
    GONE = "gone"
    """No such process, or a zombie."""
    REUSED = "reused"
    """The pid is another process's now."""
    NOT_MPS = "not_mps"
    """Alive, but not an MPS server."""


class Server(NamedTuple):
    """A process that cannot be taken for another: the kernel gives no two the same pid and start."""

    pid: int
    start_ticks: int


def identify(pid: int, proc: Path = _PROC) -> Server:
    """The MPS server with this pid; DeviceError ``mps_server`` when it is none."""
    start = _start(pid, proc)
    program = _program(pid, proc)
    if start is None or program is None:
        raise DeviceError("mps_server", f"no process {pid}", "ask the control daemon: get_server_list")
    if program != SERVER:
        raise DeviceError("mps_server", f"process {pid} is {program!r}, expected {SERVER}")
    return Server(pid, start)


def check(server: Server, proc: Path = _PROC) -> Health:
    """What became of a server that was identified before."""
    start = _start(server.pid, proc)
    if start is None:
        return Health.GONE
    if start != server.start_ticks:
        return Health.REUSED
    return Health.ALIVE if _program(server.pid, proc) == SERVER else Health.NOT_MPS


def _start(pid: int, proc: Path) -> int | None:
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command may hold blanks and brackets
    if len(fields) <= _START or fields[_STATE] in ("Z", "X"):
        return None
    return int(fields[_START])


def _program(pid: int, proc: Path) -> str | None:
    try:
        first = (proc / str(pid) / "cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return None
    return Path(first.decode(errors="replace")).name
