"""The one shell that runs every service: settings, log, bus, tracing, probes, signals, drain.

A service is a ``Service``; its ``__main__`` calls ``main``. Nothing else handles signals or ends a process.

Exit codes: 0 stopped as asked; 1 a task of the service failed, or the drain took too long; 2 the caller's
mistake (settings, an address that does not answer), told in one line.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import logging
import os
import random
import re
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from services import logs
from services.bus import Bus
from services.clock import MonotonicClock
from services.errors import BusUnavailable, UserError
from services.health import HealthServer, answer_on_nats
from services.lifetime import die_with_parent, limit_the_end, on_stop_signals
from services.observe import Observe
from services.settings import CommonSettings, check_environment, load, parse_assignments
from services.shell import DrainBudget, Service, Shell, drain, within

if TYPE_CHECKING:
    from nats.micro.service import Service as MicroService

__all__ = ["Service", "Shell", "connect", "main", "serve"]

T = TypeVar("T", bound=msgspec.Struct)
R = TypeVar("R")
SPANS_SHARE = 0.15
"""Of the drain's time, for sending the last spans; the rest is shared out by ``services.shell``."""

COLLECT_AFTER = 50_000
"""Objects that may be made beyond those freed before the youngest are looked through for cycles."""

CLOSED_POLL_S = 1.0

_TOKEN_BREAKS = re.compile(r"[^A-Za-z0-9_-]")
log = logging.getLogger(__name__)


def main(
    name: str,
    settings_type: type[T],
    build: Callable[[T], Service],
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> int:
    """Run a service until it is told to stop; the exit code (see the module's docstring)."""
    environ = os.environ if environ is None else environ
    try:
        common, settings = _settings(name, settings_type, argv, environ)
        if common.die_with_parent:
            die_with_parent(common.parent_pid)
        instance = _TOKEN_BREAKS.sub("_", f"{getattr(settings, 'node', '') or name}-{os.getpid()}")
        logs.configure(name, instance, common.log_level, common.log_format)
        observe = Observe(name)
        observe.start(common, environ, instance=instance, rng=random.Random())
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                code = runner.run(
                    serve(
                        name,
                        instance,
                        common,
                        build(settings),
                        observe,
                        lambda: connect(common, instance),
                        # A little more than the drain, whose parts keep to their own shares of it.
                        lambda: limit_the_end(common.drain_timeout_s + 0.3),
                    )
                )
        finally:
            # After the loop, so that spans of the drain itself are sent too.
            observe.stop(common.drain_timeout_s * SPANS_SHARE)
            limit_the_end(0.0)
    except UserError as error:
        print(f"tidegate {name}: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return code


async def connect(common: CommonSettings, instance: str) -> Bus:
    """The bus that the settings name. Raises UserError when none answers in ``connect_timeout_s``."""
    from services.bus import nats

    shown = re.sub(r"//[^/@]*@", "//", common.nats_url)  # a password in the address is nobody's to read
    try:
        return await nats.connect(
            common.nats_url,
            user=common.nats_user,
            password=common.nats_password,
            token=common.nats_token,
            name=f"tidegate-{instance}",
            first_connect_limit_s=common.connect_timeout_s,
        )
    except BusUnavailable as error:
        found = str(error).replace(common.nats_url, shown)
        raise UserError(f"nats_url {shown}: found {found}, expected a NATS server that answers") from error


async def serve(
    name: str,
    instance: str,
    common: CommonSettings,
    service: Service,
    observe: Observe,
    connecting: Callable[[], Coroutine[Any, Any, Bus]],
    on_end: Callable[[], None] = lambda: None,
) -> int:
    """Connect, wire, wait for the end, drain; the exit code. Handles this process's signals meanwhile.

    ``on_end`` is called when the end begins, perhaps twice: there ``main`` limits the whole process's end.
    """
    stopping = asyncio.Event()
    shells: list[Shell] = []

    def stop(signal_name: str) -> None:
        log.info("stopping", extra={"fields": {"signal": signal_name}})
        on_end()
        stopping.set()
        for shell in shells:
            shell.stop()

    on_stop_signals(asyncio.get_running_loop(), stop)
    log.info("connecting")
    bus = await _unless(stopping, connecting())
    if bus is None:
        return 0
    shell = Shell(name, instance, bus=bus, observe=observe, clock=MonotonicClock(), stopping=stopping)
    shells.append(shell)
    observe.counters_from("bus", bus.counters)
    server = HealthServer(shell.health, observe.render)
    micro = None
    wired = clean = False
    try:
        await server.start(common)
        micro = await _answer(shell, server.port)
        wired = await _unless(stopping, _wire(service, shell)) is not None
        if wired:
            calm_collector()
            shell.spawn(_while_connected(shell), "bus")
            shell.ready()
            log.info("wired", extra={"fields": {"http_port": server.port}})
            await stopping.wait()
    except UserError:
        raise
    except Exception as error:
        # Told as a line of the log like everything else; the process ends in order, with code 1.
        log.exception("start failed")
        shell.failed = error
    finally:
        on_end()
        budget = DrainBudget(common.drain_timeout_s)
        if micro is not None:
            await within("registration", micro.stop(), budget.take_s(0.05))
        clean = await drain(shell, service if wired else None, budget)
        await within("http", server.stop(), budget.take_s(0.05))
    return 0 if clean and shell.failed is None else 1


def calm_collector() -> None:
    """Take what was loaded out of the garbage collector's sight, and let it look less often.

    A step of a large fleet makes tens of thousands of messages that reference counting frees; with the default
    thresholds the collector walks them, and all loaded modules, a hundred times meanwhile: a fifth of all CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 20, 50)


async def _while_connected(shell: Shell) -> None:
    """Fail when the client gave up for good (a fatal answer of the server): nothing would ever reconnect it, and a
    process that ends is one that a supervisor starts again. A lost connection is not that: it comes back by itself."""
    client = getattr(shell.bus, "client", None)
    while client is not None and not shell.stopping.is_set():
        if client.is_closed:
            raise BusUnavailable("the NATS client closed for good: the server refused it")
        await asyncio.sleep(CLOSED_POLL_S)


async def _wire(service: Service, shell: Shell) -> bool:
    await service.start(shell)
    return True


async def _answer(shell: Shell, http_port: int) -> MicroService | None:
    client = getattr(shell.bus, "client", None)  # only a NATS bus has one
    if client is None:
        return None
    metadata = {"pid": str(os.getpid()), "http_port": str(http_port)}
    return await answer_on_nats(client, shell.health, version=_version(), metadata=metadata)


async def _unless(stopping: asyncio.Event, coroutine: Coroutine[Any, Any, R]) -> R | None:
    """The coroutine's result (or its exception), or None if the end began first; then it is cancelled."""
    work = asyncio.create_task(coroutine)
    end = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({work, end}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        end.cancel()
        await asyncio.gather(work, end, return_exceptions=True)


def _version() -> str:
    try:
        return importlib.metadata.version("tidegate")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout that was never installed
        return "0.0.0"


def _settings(
    name: str, settings_type: type[T], argv: Sequence[str] | None, environ: Mapping[str, str]
) -> tuple[CommonSettings, T]:
    """Read the command line, the file and the environment. Raises SettingsError."""
    parser = argparse.ArgumentParser(prog=f"tidegate run {name}", description=f"Run the {name} service.")
    parser.add_argument("--config", type=Path, help="settings file (TOML); default: TIDEGATE_CONFIG")
    parser.add_argument("--node", help=f"the same as --set node=..., where {name} serves one node")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help=f"a setting of [{name}], or common.KEY=VALUE for one of [common]",
    )
    options = parser.parse_args(argv)
    check_environment(environ)
    assigned = parse_assignments(options.set)
    if options.node is not None:
        assigned["node"] = options.node
    shared = {key.removeprefix("common."): assigned.pop(key) for key in list(assigned) if key.startswith("common.")}
    named = environ.get("TIDEGATE_CONFIG", "")
    file = options.config or (Path(named) if named else None)
    return (
        load(CommonSettings, "common", file=file, environ=environ, overrides=shared),
        load(settings_type, name, file=file, environ=environ, overrides=assigned),
    )
