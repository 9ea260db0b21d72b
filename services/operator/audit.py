"""`tidegate audit`: the stream TG_AUDIT by worker, and among it every change that anybody made.

Changes need no record of their own: the buckets ``tg_config`` and ``tg_policy`` keep 64 revisions of each key, each
with who, when and why, and the revision that the server gave it. A record beside them could be lost; these cannot.
"""

from __future__ import annotations

import argparse
from collections import deque
from typing import Final, TextIO

from schemas.subjects import STREAM_AUDIT, subject, wildcard
from services.bus import Bus
from services.errors import UserError
from services.operator.entries import Entry, entries_of, line_of, passes, past_changes
from services.operator.following import coming
from services.operator.session import check_filters, moment_ns, node_of, warn

LOOK_BACK: Final = 20_000
"""Records that are looked through where no ``--since`` is given: enough for 5 hours of two nodes."""


async def audit(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Show the newest entries that pass the filters, then follow if asked."""
    since_ns = 0 if options.since is None else moment_ns(options.since)
    until_ns = 1 << 63 if options.until is None else moment_ns(options.until)
    _check(options, since_ns, until_ns)
    kept: deque[Entry] = deque(maxlen=options.limit)
    past = await past_changes(bus)
    known = {(e["bucket"], e["key"], e["revision"]) for e in past}
    changes = [e for e in past if since_ns <= e["t_ns"] <= until_ns and passes(e, options)]
    span = None if options.changes else await bus.stream_span(STREAM_AUDIT)
    next_sequence = first = 1
    if span is not None:
        first = max(span[0], 1 if since_ns else span[1] - LOOK_BACK)
        next_sequence = span[1] + 1
        async for delivery in bus.stream_read(STREAM_AUDIT, _subject(options), start_sequence=first, since_ns=since_ns):
            if delivery.stored_ns > until_ns:
                break
            next_sequence = delivery.stream_sequence + 1
            kept.extend(e for e in entries_of(delivery) if passes(e, options))
    shown = sorted([*changes, *kept], key=lambda e: e["t_ns"])[-options.limit :]
    for entry in shown:
        out.write(line_of(entry, options.json))
    if not shown and not options.follow:
        warn(f"nothing passes the filters: {_looked_through(span, first, options)}")
    if not options.follow:
        return 0
    out.flush()
    where = None if options.changes else _subject(options)
    async for entry in coming(bus, where, next_sequence, known):
        if passes(entry, options):
            out.write(line_of(entry, options.json))
            out.flush()
    return 0


def _check(options: argparse.Namespace, since_ns: int, until_ns: int) -> None:
    """UserError for filters that nothing can pass together."""
    if options.limit < 1:
        raise UserError(f"--limit: found {options.limit}, expected 1 or more")
    if since_ns >= until_ns:
        raise UserError(f"--since {options.since} and --until {options.until}: found an end before the beginning")
    if options.until is not None and options.follow:
        raise UserError("--until and --follow: found both, expected one of them")
    if options.changes and (options.action or options.status):
        raise UserError("--changes: found it beside --action or --status, which changes do not have")
    check_filters(options)


def _looked_through(span: tuple[int, int] | None, first: int, options: argparse.Namespace) -> str:
    if options.changes:
        return "looked through the changes that both buckets keep"
    if span is None:
        return "there is no audit stream (no actuator has run here)"
    further = "; --since looks further back" if first > span[0] else ""
    return f"looked through the changes and records {first} to {span[1]} of {STREAM_AUDIT}{further}"


def _subject(options: argparse.Namespace) -> str:
    node = node_of(options.worker) if options.worker else options.node
    return subject("audit", node) if node else wildcard("audit")
