"""The MPS server by pid: alive, gone, another process under its number."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.actuator.mps.health import SERVER, Health, Server, check, identify
from services.errors import DeviceError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A real process that goes by the server's name."""
    program = tmp_path / SERVER
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    with subprocess.Popen([program, "60"]) as process:
        yield process
        process.kill()


def proc(folder: Path, pid: int, start: int, program: str, command: str = "nvidia-cuda-mps", state: str = "S") -> Path:
    """A made-up /proc: what no real process can be made to show."""
    entry = folder / str(pid)
    entry.mkdir(exist_ok=True)
    fields = [state, *(["0"] * 18), str(start), *(["0"] * 5)]
    (entry / "stat").write_text(f"{pid} ({command}) {' '.join(fields)}")
    (entry / "cmdline").write_bytes(program.encode() + b"\0-d\0")
    return folder


def test_a_running_server_is_alive_and_a_killed_one_gone(server: subprocess.Popen[bytes]) -> None:
    known = identify(server.pid)
    assert check(known) is Health.ALIVE
    server.kill()
    server.wait()
    assert check(known) is Health.GONE


def test_a_server_that_ended_and_was_not_collected_is_gone(server: subprocess.Popen[bytes]) -> None:
    known = identify(server.pid)
    server.kill()
    import os

    os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)  # a zombie from here on
    assert check(known) is Health.GONE


def test_a_pid_that_went_to_another_process_is_reused(tmp_path: Path) -> None:
    known = identify(55, proc(tmp_path, 55, 1000, f"/usr/bin/{SERVER}"))
    assert check(known, proc(tmp_path, 55, 2000, f"/usr/bin/{SERVER}")) is Health.REUSED


def test_the_control_daemon_is_not_the_server_though_comm_is_the_same(tmp_path: Path) -> None:
    folder = proc(tmp_path, 55, 1000, "/usr/bin/nvidia-cuda-mps-control")
    with pytest.raises(DeviceError, match="nvidia-cuda-mps-control"):
        identify(55, folder)
    assert check(Server(55, 1000), folder) is Health.NOT_MPS


def test_a_command_with_blanks_and_brackets_does_not_shift_the_fields(tmp_path: Path) -> None:
    assert identify(55, proc(tmp_path, 55, 77, SERVER, command="a) S (b")).start_ticks == 77


def test_no_process_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="no process 55"):
        identify(55, tmp_path)
