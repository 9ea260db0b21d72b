"""The control daemon's answers, and the client that asks a real process which plays it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from services.actuator.mps.control import (
    Control,
    MpsClient,
    default_limit_command,
    parse_limit,
    parse_pids,
    parse_ps,
    server_limit_command,
)
from services.errors import DeviceError, UserError

GIB = 1 << 30

DAEMON = """
import json, os, pathlib, sys, time
pipes = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if not (pipes / "control").exists():
    print("Cannot find MPS control daemon process")
    sys.exit(1)
words = sys.stdin.readline().split()
state = pipes / "state"
limits = json.loads(state.read_text()) if state.exists() else {}
if words[0] == "get_server_list":
    print("6472")
elif words[0] == "get_client_list":
    print("101\\n102" if words[1] == "6472" else "Server " + words[1] + " not found")
elif words[0] == "ps":
    print("PID    ID    SERVER    DEVICE             NAMESPACE    COMMAND")
    print("101    0     6472      GPU-0e19c809-f81d  4026531836   python -m vllm serve /models/a b")
elif words[0].startswith("set_"):
    if words[-2] == "9":
        print("Invalid device")
    else:
        limits[" ".join(words[1:-1])] = words[-1]
        state.write_text(json.dumps(limits))
elif words[0].startswith("get_"):
    print(limits.get(" ".join(words[1:]), ""))
elif words[0] == "hang":
    time.sleep(60)
else:
    sys.exit(7)
"""


def control(folder: Path, *, up: bool = True, timeout_s: float = 10.0) -> Control:
    (folder / "daemon.py").write_text(DAEMON)
    if up:
        (folder / "control").touch()
    return Control(folder, program=(sys.executable, "-S", str(folder / "daemon.py")), timeout_s=timeout_s)


async def test_servers_clients_and_processes_are_read(tmp_path: Path) -> None:
    daemon = control(tmp_path)
    assert await daemon.servers() == (6472,)
    assert await daemon.clients(6472) == (101, 102)
    assert await daemon.ps() == (
        MpsClient(101, 0, 6472, "GPU-0e19c809-f81d", "4026531836", "python -m vllm serve /models/a b"),
    )


async def test_a_limit_is_set_and_read_back(tmp_path: Path) -> None:
    daemon = control(tmp_path)
    assert await daemon.server_limit(6472, 0) is None
    assert await daemon.set_server_limit(6472, 0, 10 * GIB + 5) == 10 * GIB
    assert await daemon.set_default_limit(1, 3 * GIB) == 3 * GIB


async def test_an_answer_to_a_set_command_is_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Invalid device"):
        await control(tmp_path).set_default_limit(9, GIB)


async def test_words_where_pids_are_expected_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="Server 5 not found"):
        await control(tmp_path).clients(5)


async def test_a_daemon_that_is_not_up_says_how_to_start_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        await control(tmp_path, up=False).servers()
    assert caught.value.reason == "mps_not_running"
    assert "-d" in caught.value.remedy


async def test_a_machine_without_mps_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(DeviceError) as caught:
        await Control(tmp_path, program=("/nowhere/nvidia-cuda-mps-control",)).servers()
    assert caught.value.reason == "mps_missing"


async def test_a_daemon_that_hangs_is_left_after_its_time(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="mps_silent"):
        await control(tmp_path, timeout_s=0.3).run("hang")


async def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="ended with 7"):
        await control(tmp_path).run("nonsense")


async def test_two_commands_in_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="one command"):
        await control(tmp_path).run("ps\nquit")


async def test_a_pipe_directory_too_long_for_a_socket_is_told(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="longer than 107"):
        await Control(tmp_path / ("x" * 120)).servers()


def test_commands_are_as_the_daemon_takes_them() -> None:
    assert default_limit_command(0, 10752 << 20) == "set_default_device_pinned_mem_limit 0 10752M"
    assert server_limit_command(1024, 0, 900 << 20) == "set_device_pinned_mem_limit 1024 0 900M"
    with pytest.raises(ValueError, match="pid"):
        server_limit_command(0, 0, GIB)
    with pytest.raises(UserError):
        default_limit_command("0; quit", GIB)


@pytest.mark.parametrize(("answer", "pids"), [("", ()), ("\n", ()), ("12\n 13 \n", (12, 13))])
def test_pids(answer: str, pids: tuple[int, ...]) -> None:
    assert parse_pids(answer) == pids


@pytest.mark.parametrize("answer", ["0", "-4", "12 13", "Connection refused", "1\n²"])
def test_what_is_no_list_of_pids_is_refused(answer: str) -> None:
    with pytest.raises(DeviceError, match="expected pids"):
        parse_pids(answer)


HEAD = "PID ID SERVER DEVICE NAMESPACE COMMAND\n"


def test_ps_without_clients_and_with_a_command_that_is_gone() -> None:
    assert parse_ps("") == ()
    assert parse_ps(HEAD) == ()
    assert parse_ps(HEAD.strip() + " ATTRIBUTES\n1 0 2 GPU-a 9\n")[0].command == ""


@pytest.mark.parametrize("answer", ["no clients", HEAD + "x 0 2 GPU-a 9 c", HEAD + "1 0"])
def test_another_table_is_refused(answer: str) -> None:
    with pytest.raises(DeviceError, match="mps_answer"):
        parse_ps(answer)


@pytest.mark.parametrize(
    ("answer", "limit"),
    [("10G", 10 * GIB), ("10752M\n", 10752 << 20), ("900MB", 900 << 20), ("0.5G", GIB // 2), ("", None), ("0", None),
     ("No limit", None)],
)  # fmt: skip
def test_limits(answer: str, limit: int | None) -> None:
    assert parse_limit(answer) == limit


def test_a_limit_in_other_words_is_refused() -> None:
    with pytest.raises(DeviceError, match="a limit such as"):
        parse_limit("Server not found")
