"""What every operator command has: a connection by the usual settings, who asks and why, times as people write them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import getpass
import logging
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final, TextIO, TypeVar

import msgspec

from schemas.identity import parse_worker_id
from services.bus import Bus
from services.errors import BusUnavailable, TidegateError, UserError
from services.settings import CommonSettings, check_environment, load

Command = Callable[[Bus, argparse.Namespace, TextIO], Awaitable[int]]
S = TypeVar("S", bound=msgspec.Struct)

WALL_FROM_NS: Final = 10**18
"""September 2001: what lies before is another clock's."""
_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
SCHEMES: Final = ("nats", "tls", "ws", "wss")
"""Of a server's address; one without a scheme is a host's name."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


class NothingFound(TidegateError):
    """What was asked for may well be, but nothing was heard of it and nothing of it is kept."""


def settings_of(options: argparse.Namespace, kind: type[S], section: str, **overrides: object) -> S:
    """A section of the settings as a service would read it; SettingsError."""
    named = os.environ.get("TIDEGATE_CONFIG", "")
    file = options.config or (Path(named) if named else None)
    return load(kind, section, file=file, environ=os.environ, overrides=overrides)


def run(command: Command, options: argparse.Namespace) -> int:
    """Connect, run one command, leave; its exit code. BusUnavailable when no server answers."""
    check_environment(os.environ)
    overrides = {"nats_url": options.url} if options.url else {}
    common = settings_of(options, CommonSettings, "common", **overrides)
    scheme, found, _ = common.nats_url.partition("://")
    if found and scheme not in SCHEMES:
        raise UserError(f"nats_url: found scheme {scheme!r}, expected one of {', '.join(SCHEMES)}")

    async def session() -> int:
        bus = await connected(common)
        try:
            return await command(bus, options, sys.stdout)
        finally:
            await bus.drain(1.0)

    with quiet_bus_log():
        return asyncio.run(session())


@contextlib.contextmanager
def quiet_bus_log() -> Iterator[None]:
    """What a connection goes through is told once, by the error that ends the command."""
    log = logging.getLogger("services.bus")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


async def connected(common: CommonSettings) -> Bus:
    """The bus that the settings name; BusUnavailable when no server answers, UserError for a mistake in them."""
    from services.runtime import connect

    try:
        return await connect(common, f"operator-{os.getpid()}")
    except UserError as error:
        # To a service an address that nobody answers at is a mistake in its settings. Here it may as well be the
        # server that is down, and a script must be able to tell that from a mistyped command.
        if isinstance(error.__cause__, BusUnavailable):
            raise BusUnavailable(str(error)) from error
        raise


def warn(text: str) -> None:
    """One line beside the output, which stays what a program may read."""
    sys.stderr.write(f"tidegate: {one_line(text)}\n")


def one_line(text: str) -> str:
    """What others wrote, as part of a line: no line breaks, no orders to a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def node_of(worker: str) -> str:
    """The node of a worker's id; UserError for what is none."""
    try:
        return str(parse_worker_id(worker).node)
    except ValueError as error:
        raise UserError(str(error)) from None


def check_filters(options: argparse.Namespace) -> None:
    """UserError for a worker's id that is none, or one of another node than asked for."""
    if options.worker is None:
        return
    node = node_of(options.worker)
    if options.node not in (None, node):
        raise UserError(f"--worker {options.worker} and --node {options.node}: found a worker of another node")


def who(options: argparse.Namespace) -> str:
    """Who makes a change. UserError when nobody can be named."""
    try:
        name = options.who if options.who is not None else os.environ.get("USER") or getpass.getuser()
    except (KeyError, OSError):  # no such user in the password database
        name = ""
    if not name:
        raise UserError("--who: found nobody, expected the name of who makes this change")
    return str(name)


def duration_s(text: str) -> float:
    """``90``, ``90s``, ``15m``, ``1h``, ``2d``; UserError for anything else or 0."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS_S[match[2]] if match else 0.0
    if not 0 < seconds <= 3.2e8:
        raise UserError(f"duration {text!r}: expected one such as 90s, 15m, 1h or 2d")
    return seconds


def expiry_ns(ttl: str | None, now_ns: int) -> int:
    """When an order ends, 0 for never."""
    return 0 if ttl is None else now_ns + round(duration_s(ttl) * 1e9)


def moment_ns(text: str) -> int:
    """A wall clock: a duration before now, or ISO 8601 (without zone: UTC)."""
    if _DURATION.fullmatch(text.strip()):
        return time.time_ns() - round(duration_s(text) * 1e9)
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UserError(f"time {text!r}: expected ISO 8601, or how long ago, such as 15m") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return round(moment.timestamp() * 1e9)


def shown_time(t_ns: int) -> str:
    """Wall clock as ISO 8601 in UTC, to the second; ``-`` for none, and for what can be no wall clock."""
    if t_ns < WALL_FROM_NS:
        return "-"
    return datetime.datetime.fromtimestamp(t_ns // 10**9, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def table(head: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(line[k]) for line in [head, *rows]) for k in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines) + "\n"
