"""`tidegate report`: what Tidegate would have done, what was seen, and what that could have brought at most.

Decisions come from the audit stream, what was seen from the file that attach keeps in its folder; where no such file
is at hand, from what goes over the bus in a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import msgspec

from schemas.codec import DecodeError
from schemas.subjects import wildcard
from schemas.telemetry import NODE_SAMPLE
from services.bus import Bus, Message
from services.bus.embedded import EmbeddedServer
from services.errors import BusUnavailable, UserError
from services.operator import attach_folder, attach_seen, session
from services.operator.attach_folder import Attached
from services.operator.attach_seen import Recorder, Seen
from services.operator.report_decisions import Decisions, decisions
from services.operator.report_estimates import estimates, never_short
from services.operator.report_text import as_text
from services.settings import CommonSettings

EMBEDDED_FOLDER: Final = "nats"
"""Of an embedded server's store, in attach's folder."""


class Report(msgspec.Struct, kw_only=True):
    """All that is told of one worker."""

    worker: str
    mode: str = ""
    seen: Seen | None = None
    decisions: Decisions | None = None
    seen_from: str = ""


def report(options: argparse.Namespace) -> int:
    """Gather and tell; 1 when nothing is known."""
    out = sys.stdout
    with session.quiet_bus_log():
        found, hints = asyncio.run(_gathered(options))
    if options.json:
        out.write(json.dumps({"workers": [as_json(one) for one in found], "hints": hints}) + "\n")
    else:
        out.write("\n".join(as_text(one) for one in found))
    for hint in hints:
        session.warn(hint)
    return 0 if found else 1


async def _gathered(options: argparse.Namespace) -> tuple[list[Report], list[str]]:
    since_ns = 0 if options.since is None else session.moment_ns(options.since)
    if options.worker is not None:
        session.node_of(options.worker)
    folder: Path | None = options.folder
    if folder is None and options.nats is None:
        folder = attach_folder.newest(os.environ)
    attached = attach_folder.recall(folder) if folder is not None else None
    if options.folder is not None and attached is None:
        raise UserError(f"--folder {folder}: found no {attach_folder.FILE}, expected a folder that attach was run with")
    async with bus_of(options, folder, attached) as bus:
        return await gathered(bus, folder, attached, since_ns, options.worker, options.wait)


async def gathered(
    bus: Bus, folder: Path | None, attached: Attached | None, since_ns: int, worker: str | None, wait_s: float
) -> tuple[list[Report], list[str]]:
    """Reports by worker, and what stands in the way of a better one."""
    hints: list[str] = []
    seen: dict[str, Seen] = {}
    source = ""
    if folder is not None:
        source = str(folder / attach_seen.FILE)
        seen = attach_seen.read(Path(source), since_ns, worker)
    decided = await decisions(bus, since_ns, worker, session.node_of(worker) if worker else None)
    if not seen:
        source = f"the bus, in {wait_s:g} s"
        seen = {name: one for name, one in (await _live(bus, wait_s)).items() if worker in (None, name)}
        hints.append("what was seen is of now alone: no file of attach's is at hand for that time (--folder, --since)")
    if not decided:
        hints.append("no decisions in the audit stream for that time: is decision running, and for how long?")
    found = [
        Report(
            worker=name,
            mode=attached.mode if attached is not None and attached.worker == name else "",
            seen=seen.get(name),
            decisions=decided.get(name),
            seen_from=source,
        )
        for name in sorted(seen.keys() | decided.keys())
    ]
    return found, hints


@contextlib.asynccontextmanager
async def bus_of(options: argparse.Namespace, folder: Path | None, attached: Attached | None) -> AsyncIterator[Bus]:
    """The bus that was asked for: ``--nats``, else the folder's, whose embedded server is started where attach has
    ended, else the settings'."""
    overrides: dict[str, object] = {"nats_url": options.nats} if options.nats else {}
    server: EmbeddedServer | None = None
    lock = None
    if not overrides and attached is not None and folder is not None:
        overrides = {
            "nats_url": attached.nats_url, "nats_user": attached.nats_user, "nats_password": attached.nats_password,
            "nats_token": attached.nats_token,
        }  # fmt: skip
        if attached.embedded and not attach_folder.running(folder):
            lock = attach_folder.claim(folder)
            server = EmbeddedServer(folder / EMBEDDED_FOLDER)
            await server.start()
            overrides |= {"nats_url": server.url, "nats_user": server.user, "nats_password": server.password}
    try:
        common = session.settings_of(options, CommonSettings, "common", **overrides)
        try:
            bus = await session.connected(common)
        except BusUnavailable as error:
            if options.nats is not None or folder is not None:
                raise
            raise BusUnavailable(
                f"found no attachment's folder ({attach_folder.root(os.environ)}), expected --folder FOLDER or a NATS "
                f"server at {common.nats_url}: {error}"
            ) from error
        try:
            yield bus
        finally:
            await bus.drain(1.0)
    finally:
        if server is not None:
            await server.stop()
        if lock is not None:
            lock.close()


async def _live(bus: Bus, wait_s: float) -> dict[str, Seen]:
    """What telemetry says in a few seconds."""
    recorder = Recorder()
    seen: dict[str, Seen] = {}

    def keep(minutes: list[Seen]) -> None:
        for one in minutes:
            if one.worker in seen:
                seen[one.worker].add(one)
            else:
                seen[one.worker] = one

    async def on_batch(messages: list[Message]) -> None:
        for message in messages:
            with contextlib.suppress(DecodeError):
                keep(recorder.take(NODE_SAMPLE.decode(message.data), time.time_ns()))

    subscription = await bus.subscribe(wildcard("telemetry"), on_batch)
    with contextlib.suppress(BusUnavailable):
        await asyncio.sleep(wait_s)
        await subscription.unsubscribe()
    keep(recorder.rest())
    return seen


def as_json(one: Report) -> dict[str, Any]:
    """For programs: sums as they were seen, counts, bounds with their formulas; null where something is not known."""
    told: dict[str, Any] = {"worker": one.worker, "mode": one.mode or None, "seen_from": one.seen_from}
    told["seen"] = msgspec.to_builtins(msgspec.structs.asdict(one.seen)) if one.seen is not None else None
    told["decisions"] = one.decisions.told() if one.decisions is not None else None
    told["estimates"] = [each._asdict() for each in estimates(one.seen)] if one.seen is not None else []
    told["memory_never_short"] = never_short(one.seen) if one.seen is not None else None
    return told
