"""The processes of a run: started together, watched, and gone together.

Every child is a process group of its own (so that Ctrl-C reaches only the parent, which then stops the others in
order) and asks the kernel to be killed with its parent. What a child prints goes to ``<folder>/<name>.log``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from services.errors import TidegateError

STOP_TIMEOUT_S = 8.0
RESTART_LIMIT = 5
"""Restarts of one child before a run is given up: what dies so often will die again."""


class Server(Protocol):
    """Where services find their NATS server; an embedded one is such."""

    @property
    def url(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def password(self) -> str: ...


class ChildDied(TidegateError):
    """A process of the run ended by itself; ``tail`` is the end of what it printed."""

    def __init__(self, name: str, returncode: int, tail: str) -> None:
        super().__init__(f"{name} ended with {returncode}:\n{tail}")
        self.name = name
        self.returncode = returncode
        self.tail = tail


class Child:
    """One started process."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        log: Path,
        arguments: Sequence[str],
        environment: dict[str, str],
    ) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.arguments = arguments
        self.environment = environment

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def tail(self, lines: int = 12) -> str:
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


class Processes:
    """Start order is kept; stopping goes backwards, so that nobody waits for who is already gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.children: dict[str, Child] = {}
        self.restarts: dict[str, int] = {}
        """How often :meth:`revive` started a child again."""

    async def start(self, name: str, arguments: Sequence[str], environment: dict[str, str] | None = None) -> Child:
        """Run ``python <arguments>`` as child ``name``; a former child of that name must have ended."""
        former = self.children.get(name)
        if former is not None and former.alive:
            raise RuntimeError(f"{name} is still running as process {former.process.pid}")
        log = self._folder / f"{name}.log"
        with log.open("ab") as out:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        child = Child(name, process, log, arguments, environment or {})
        self.children[name] = child
        return child

    def port_file(self, name: str) -> Path:
        """Where child ``name`` writes its HTTP port."""
        return self._folder / f"{name}.port"

    async def start_service(
        self,
        service: str,
        name: str,
        server: Server,
        settings: Mapping[str, str],
        common: Mapping[str, str],
        file: Path | None = None,
    ) -> Child:
        """A service as a child that connects to ``server`` and dies with this process. ``settings`` win over those of
        the ``file``."""
        everything = {
            "nats_url": server.url,
            "nats_user": server.user,
            "nats_password": server.password,
            "die_with_parent": "true",
            "parent_pid": str(os.getpid()),
            "http_port_file": str(self.port_file(name)),
            **common,
        }
        self.port_file(name).unlink(missing_ok=True)
        arguments = ["-m", f"services.{service}"] + (["--config", str(file)] if file is not None else [])
        for key, value in settings.items():
            arguments += ["--set", f"{key}={value}"]
        return await self.start(
            name, arguments, {f"TIDEGATE_COMMON_{key.upper()}": value for key, value in everything.items()}
        )

    def check(self) -> None:
        """ChildDied when one ended that nobody stopped."""
        for child in self.children.values():
            code = child.process.returncode
            if code is not None:
                raise ChildDied(child.name, code, child.tail())

    async def revive(self, may_restart: Callable[[str], bool], limit: int = RESTART_LIMIT) -> list[str]:
        """Start again what ended by itself and ``may_restart``; the names. ChildDied for another child, and for one
        that ended more than ``limit`` times."""
        revived = []
        for child in list(self.children.values()):
            code = child.process.returncode
            if code is None:
                continue
            count = self.restarts.get(child.name, 0)
            if not may_restart(child.name) or count >= limit:
                raise ChildDied(child.name, code, child.tail())
            self.restarts[child.name] = count + 1
            await self.start(child.name, child.arguments, child.environment)
            revived.append(child.name)
        return revived

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        self.children[name].process.send_signal(how)

    async def stop(self) -> list[str]:
        """SIGTERM to all, last started first, then SIGKILL to who is still there; gives the names of the latter."""
        running = [child for child in reversed(self.children.values()) if child.alive]
        for child in running:
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(child.process.wait()) for child in running]
        if waits:
            await asyncio.wait(waits, timeout=STOP_TIMEOUT_S)
        late = [child for child in running if child.alive]
        for child in late:
            with contextlib.suppress(ProcessLookupError):
                child.process.kill()
            await child.process.wait()
        for wait in waits:
            await wait
        return [child.name for child in late]
