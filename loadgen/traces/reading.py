"""Reading a trace file: which format, which reader, and what a user is told."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from loadgen.traces.errors import BadLines, MalformedLine, TraceError
from loadgen.traces.fields import Header, shown
from loadgen.traces.lines import text_lines
from loadgen.traces.mooncake import read_mooncake
from loadgen.traces.sessions import DEFAULT_SESSION_RATE_PER_S, REQUIRED, read_sessions
from loadgen.traces.single import TABLES, read_single
from loadgen.workload.info import info, render
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass
from services.errors import UserError

FORMATS: Final = ("azure", "mooncake", "sessions", "burstgpt", "servegen")

_COLUMNS: Final[dict[str, tuple[str, ...]]] = {
    "azure": TABLES["azure"].columns,
    "burstgpt": TABLES["burstgpt"].columns,
    "sessions": REQUIRED,
    "servegen": TABLES["servegen"].columns,
}
"""In the order in which a header is tried: a session table has all that servegen's has."""


def read(
    path: Path | str,
    format: str | None = None,
    skip_bad: bool = False,
    *,
    seed: int = 0,
    session_rate_per_s: float = DEFAULT_SESSION_RATE_PER_S,
    service_class: ServiceClass | None = None,
) -> Workload:
    """The requests of a trace file, plain or gzip; the format is found from its first line unless given.

    ``skip_bad`` leaves malformed lines out and counts them (``Workload.left_out``; the first few are named in
    the notes); otherwise the first one is a TraceError with file, line, column, found and expected. ``seed`` and
    ``session_rate_per_s`` start the sessions of a session table. ``service_class`` overrides the format's
    default (agent for session tables, chat for the rest). TraceError (a UserError) for everything that is wrong
    with the file; UserError for a format that does not exist.
    """
    if format is not None and format not in FORMATS:
        near = difflib.get_close_matches(format, FORMATS, 1)
        hint = f" (nearest: {near[0]})" if near else ""
        raise UserError(f"format: found {format!r}, expected one of: {', '.join(FORMATS)}{hint}")
    if not 0 < session_rate_per_s < float("inf"):
        raise UserError(f"session rate: found {session_rate_per_s!r}, expected a positive number a second")
    path = Path(path)
    bad = BadLines(path, skip_bad)
    lines = text_lines(path, bad)
    number, first = next(lines, (0, ""))
    if not number:
        raise TraceError(path, "no line of text", "a header and requests")
    wanted = format or _detected(path, number, first)
    if wanted == "mooncake":
        every: Iterable[tuple[int, str]] = itertools.chain([(number, first)], lines)
        return read_mooncake(every, bad, service_class or ServiceClass.CHAT)
    return _read_table(wanted, number, first, lines, bad, service_class, seed, session_rate_per_s)


def trace_info(path: Path | str, format: str | None = None, skip_bad: bool = False) -> str:
    """What ``tidegate trace info FILE`` prints; errors as ``read``."""
    return "\n".join(render(info(read(path, format, skip_bad))))


def _read_table(
    wanted: str,
    number: int,
    first: str,
    lines: Iterator[tuple[int, str]],
    bad: BadLines,
    service_class: ServiceClass | None,
    seed: int,
    session_rate_per_s: float,
) -> Workload:
    header = _header(bad.path, number, first)
    missing = [name for name in _COLUMNS[wanted] if not header.has(name)]
    if missing:
        found = f"columns {shown(', '.join(header.names))}"
        raise TraceError(bad.path, found, f"also {', '.join(missing)} ({wanted})", number, "header")
    if wanted == "sessions":
        chosen = service_class or ServiceClass.AGENT
        return read_sessions(lines, header, bad, chosen, seed, session_rate_per_s)
    return read_single(lines, header, TABLES[wanted], bad, service_class or ServiceClass.CHAT)


def _header(path: Path, number: int, first: str) -> Header:
    try:
        return Header(first)
    except MalformedLine as problem:
        raise TraceError(path, problem.found, problem.expected, number, "header") from problem


def _detected(path: Path, number: int, first: str) -> str:
    if first.startswith("{"):
        if '"requests"' in first and '"timestamp"' not in first:
            raise TraceError(path, "sessions as JSON lines", "the session table (requests.csv) beside it", number)
        return "mooncake"
    header = _header(path, number, first)
    for name, columns in _COLUMNS.items():
        if header.has(*columns):
            return name
    known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in _COLUMNS.items())
    expected = f"columns of a known format ({known}; mooncake: JSON lines) or a file of one of these"
    raise TraceError(path, shown(first), expected, number, "header")
