"""What every operator command has: a connection by the usual settings, who asks and why, times as people write them."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import getpass
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TextIO, TypeVar

import msgspec

from services.bus import Bus
from services.errors import UserError
from services.settings import CommonSettings, check_environment, load

Command = Callable[[Bus, argparse.Namespace, TextIO], Awaitable[int]]
S = TypeVar("S", bound=msgspec.Struct)

WALL_FROM_NS: Final = 10**18
"""September 2001: what lies before is another clock's."""
_UNITS_S: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw]?)")


def settings_of(options: argparse.Namespace, kind: type[S], section: str, **overrides: object) -> S:
    """A section of the settings as a service would read it; SettingsError."""
    named = os.environ.get("TIDEGATE_CONFIG", "")
    file = options.config or (Path(named) if named else None)
    return load(kind, section, file=file, environ=os.environ, overrides=overrides)


def run(command: Command, options: argparse.Namespace) -> int:
    """Connect, run one command, leave; its exit code."""
    check_environment(os.environ)
    overrides = {"nats_url": options.url} if options.url else {}
    common = settings_of(options, CommonSettings, "common", **overrides)

    async def session() -> int:
        from services.runtime import connect

        bus = await connect(common, f"operator-{os.getpid()}")
        try:
            return await command(bus, options, sys.stdout)
        finally:
            await bus.drain(1.0)

    return asyncio.run(session())


def who(options: argparse.Namespace) -> str:
    """Who makes a change. UserError when nobody can be named."""
    try:
        name = options.who or os.environ.get("USER") or getpass.getuser()
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
