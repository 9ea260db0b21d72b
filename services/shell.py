"""What a running service is given, what it must offer, and how it is brought to its end.

Kept apart from ``services.runtime`` so that a test can run a service's wiring on an in-memory bus without
signals, HTTP or a process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Protocol

from services.bus import Bus
from services.clock import Clock
from services.health import DRAINING, READY, Health
from services.observe import Observe

log = logging.getLogger(__name__)


class Shell:
    """What a running service is given."""

    def __init__(
        self,
        name: str,
        instance: str,
        *,
        bus: Bus,
        observe: Observe,
        clock: Clock,
        stopping: asyncio.Event | None = None,
    ) -> None:
        self.name = name
        self.instance = instance
        """Tells apart the processes of one service; a token of letters, digits, ``-`` and ``_``."""
        self.bus = bus
        self.observe = observe
        self.clock = clock
        self.health = Health(name, instance)
        self.health.connected = lambda: bus.connected
        self.health.counters = bus.counters
        self.failed: BaseException | None = None
        """The first exception of a supervised task."""
        self.stopping = stopping or asyncio.Event()
        """Set once the process begins to end."""
        self._tasks: set[asyncio.Task[None]] = set()

    def ready(self) -> None:
        """Everything is wired: /ready answers 200 from now on, while the bus is connected."""
        if not self.stopping.is_set():
            self.health.state = READY

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run beside the rest. If it raises, that is logged and the process drains and ends with code 1;
        cancelling it or returning from it ends nothing else."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def stop(self) -> None:
        """Begin to end: nothing new is taken up, and the runtime drains."""
        self.health.state = DRAINING
        self.stopping.set()

    async def cancel_tasks(self) -> None:
        """Cancel the supervised tasks that still run and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.error("task failed", exc_info=error, extra={"fields": {"task": task.get_name()}})
        if self.failed is None:
            self.failed = error
        self.stop()


class Service(Protocol):
    """What a service's ``build`` gives."""

    async def start(self, shell: Shell) -> None:
        """Subscribe and spawn; return when wired (the runtime then calls ``shell.ready()``)."""
        ...

    async def stop(self) -> None:
        """Drain what is its own; called on SIGTERM or SIGINT, before its tasks are cancelled and the bus drains."""
        ...


class DrainBudget:
    """The time of a drain, shared out: each part has its share and whatever those before it left over."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._until_s = asyncio.get_running_loop().time()

    def take_s(self, share: float) -> float:
        """Seconds that the next part may take, never less than a moment."""
        self._until_s += share * self._limit_s
        return max(0.05, self._until_s - asyncio.get_running_loop().time())


async def drain(shell: Shell, service: Service | None, budget: DrainBudget) -> bool:
    """Let the service finish, cancel its tasks, drain the bus: together 0.75 of the budget. False, with a
    line in the log, when a part failed or took longer than its share; the others are still tried."""
    shell.stop()
    clean = service is None or await within("service", service.stop(), budget.take_s(0.45))
    clean = await within("tasks", shell.cancel_tasks(), budget.take_s(0.1)) and clean
    bus_s = budget.take_s(0.2)
    return await within("bus", shell.bus.drain(timeout_s=bus_s * 0.9), bus_s) and clean


async def within(part: str, coroutine: Coroutine[Any, Any, Any], limit_s: float) -> bool:
    """Await a part of the drain; False and a line in the log when it fails or takes too long."""
    try:
        await asyncio.wait_for(coroutine, limit_s)
    except TimeoutError:
        log.error("drain overran", extra={"fields": {"part": part, "limit_s": limit_s}})
        return False
    except Exception:
        log.exception("drain failed", extra={"fields": {"part": part}})
        return False
    return True
