"""`tidegate attach`: point Tidegate at a running inference server.

It says first what it can see and control, and starts nothing where the server cannot be read. Then it runs what a
node needs for that server, in shadow unless told otherwise: recorded, never acted upon. At the end it prints the
report.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Final, TextIO

import msgspec

from schemas.codec import DecodeError
from schemas.config import ModeOrder, mode_key
from schemas.identity import parse_worker_id
from schemas.subjects import BUCKET_CONFIG, subject
from schemas.telemetry import NODE_SAMPLE
from services.bus import Bus, Message
from services.decision.settings import Settings as DecisionSettings
from services.errors import BusError
from services.operator import attach_folder, attach_seen, attach_sight, attach_view, changes, report, session
from services.operator.attach_elastic import Elastic, elastic_of
from services.operator.attach_endpoint import look
from services.operator.attach_folder import Attached
from services.operator.attach_loop import AttachedLoop, Wiring
from services.operator.attach_plan import Plan, check_mode, engine_settings, plan_of
from services.operator.attach_seen import Recorder
from services.operator.live import Listener
from services.operator.report_text import as_text
from services.settings import CommonSettings

LAST_WORD_S: Final = 2.0
"""For taking an enforcing order back at the end."""
TICK_S: Final = 0.25


def attach(options: argparse.Namespace) -> int:
    """Look, tell, run until Ctrl-C or ``--duration``, report. EndpointProblem before anything was started."""
    with session.quiet_bus_log():
        return asyncio.run(_attach(options, sys.stdout))


async def _attach(options: argparse.Namespace, out: TextIO) -> int:
    endpoint = await look(options.url, options.kind)
    plan = await plan_of(options, endpoint)
    given = {} if options.hbm_gb is None else {"hbm_bytes": f"{options.hbm_gb:g} GB, as you say"}
    out.write(attach_sight.as_text(endpoint, plan.description, given, plan.own))
    out.flush()
    check_mode(plan, endpoint)
    elastic = await elastic_of(options, plan)
    for line in elastic.told:
        _tell(out, line)
    lock = attach_folder.claim(plan.folder)
    try:
        return await _run(options, plan, elastic, out)
    finally:
        lock.close()


async def _run(options: argparse.Namespace, plan: Plan, elastic: Elastic, out: TextIO) -> int:
    common = None
    if options.nats is not None:
        common = session.settings_of(options, CommonSettings, "common", nats_url=options.nats)
    name = parse_worker_id(plan.worker)
    wiring = Wiring(
        name.node, [engine_settings(options, plan) | elastic.for_telemetry],
        None if plan.socket is None else plan.socket.parent, plan.mode, options.config, elastic.for_actuator,
    )  # fmt: skip
    attach_seen.trim(plan.folder / attach_seen.FILE)
    loop = AttachedLoop(plan.folder, wiring, common)
    began_ns = time.time_ns()
    ordered = {plan.worker}  # more where several engines stand behind the address
    try:
        async with _bus(loop, plan, ordered, out) as bus:
            attached = Attached(
                worker=plan.worker, kind=plan.kind, url=plan.url, mode=plan.mode, nats_url=loop.server.url,
                nats_user=loop.server.user, nats_password=loop.server.password, nats_token=loop.token,
                embedded=common is None, pid=os.getpid(),
            )  # fmt: skip
            attach_folder.remember(plan.folder, attached)
            _tell(out, f"folder {plan.folder}; {'embedded ' if common is None else ''}NATS server {loop.server.url}")
            _tell(out, f"operator commands: tidegate status --config {plan.folder / attach_folder.SETTINGS}")
            view = _View(plan, session.settings_of(options, DecisionSettings, "decision"), out)
            await view.listen(bus)
            await _until_end(loop, view, bus, plan, ordered, out)
            await view.keep(rest=True)
            found, hints = await report.gathered(bus, plan.folder, attached, began_ns, None, 0.05)
            out.write("\n" + "\n".join(as_text(one) for one in found))
            for hint in hints:
                session.warn(hint)
            _tell(out, f"again, later: tidegate report --folder {plan.folder}")
    finally:
        await loop.stop_server()
    return 0


@contextlib.asynccontextmanager
async def _bus(loop: AttachedLoop, plan: Plan, ordered: set[str], out: TextIO) -> AsyncIterator[Bus]:
    """The bus with the mode in force; an enforcing one is taken back at the end, since nobody would look after it."""
    bus = await loop.connect()
    try:
        await _order(bus, plan.worker, plan.mode, "tidegate attach", out)
        try:
            yield bus
        finally:
            if plan.mode == "enforce":
                try:
                    async with asyncio.timeout(LAST_WORD_S):
                        for worker in sorted(ordered):
                            await _order(bus, worker, "shadow", "tidegate attach ended", out)
                except (BusError, TimeoutError) as error:
                    why = str(error) or f"no answer within {LAST_WORD_S:g} s"
                    _tell(out, f"mode enforce stands, it could not be taken back: {why}")
    finally:
        await bus.drain(1.0)


async def _order(bus: Bus, worker: str, mode: str, why: str, out: TextIO) -> None:
    """Put the worker's mode in ``tg_config``, and say what stood there."""
    who = os.environ.get("USER") or "attach"
    key = mode_key(worker=worker)
    new = changes.checked(ModeOrder, mode=mode, who=who, when_ns=time.time_ns(), why=why)
    before, revision = await changes.put(bus, BUCKET_CONFIG, key, msgspec.json.encode(new), None)
    _tell(out, f"{changes.about(key)}: {changes.what(new)}{changes.by(new)} (revision {revision})")
    if before is not None and before.value is not None:
        _tell(out, f"before: {changes.told(key, before.value)} (revision {before.revision})")


class _View:
    """Listens to the worker's messages: a line now and then, and what was seen for the file."""

    def __init__(self, plan: Plan, settings: DecisionSettings, out: TextIO) -> None:
        self._plan = plan
        self._settings = settings
        self._out = out
        self._recorder = Recorder()
        self._ended: list[attach_seen.Seen] = []
        self._chosen: dict[str, object] = {}
        self._told_s = time.monotonic()
        self._trouble: dict[str, str] = {}
        """Why a worker's server could not be read in the newest step."""
        self.workers = {plan.worker}
        """All that were measured: several engines may stand behind one address."""
        self.node = parse_worker_id(plan.worker).node
        self.listener: Listener

    async def listen(self, bus: Bus) -> None:
        self.listener = Listener(bus, self.node)
        await self.listener.start()
        await bus.subscribe(subject("telemetry", self.node), self._on_samples)

    async def _on_samples(self, messages: list[Message]) -> None:
        for message in messages:
            with contextlib.suppress(DecodeError):
                sample = NODE_SAMPLE.decode(message.data)
                self._ended += self._recorder.take(sample, time.time_ns())
                self.workers.update(sample.workers)
                self._trouble = {sample.workers[row]: why for row, metric, why in sample.flags if not metric}

    async def tick(self) -> None:
        """Count what was chosen since, write what is whole, say a line when it is time."""
        for worker, heard in self.listener.workers.items():
            if heard.state is not None and heard.state.order == heard.acted != self._chosen.get(worker):
                self._chosen[worker] = heard.acted
                if words := attach_view.kind_of_choice(heard, self._settings):
                    self._recorder.chose(worker, words)
        await self.keep()
        now_s = time.monotonic()
        if now_s - self._told_s >= self._plan.every_s:
            self._told_s = now_s
            self._tell(now_s)

    async def keep(self, rest: bool = False) -> None:
        """Write the minutes that ended, and with ``rest`` those under way."""
        ended, self._ended = self._ended + (self._recorder.rest() if rest else []), []
        if ended:
            await asyncio.to_thread(attach_seen.append, self._plan.folder / attach_seen.FILE, ended)

    def _tell(self, now_s: float) -> None:
        for worker in sorted(self.listener.workers) or [self._plan.worker]:
            line = attach_view.line_of(worker, self.listener.workers.get(worker), self._settings, now_s)
            trouble = self._trouble.get(worker, "")
            _tell(self._out, line + (f": {trouble}" if trouble else ""))


async def _until_end(loop: AttachedLoop, view: _View, bus: Bus, plan: Plan, ordered: set[str], out: TextIO) -> None:
    """Run the services until a signal or the end of the duration; then they are stopped."""
    ending = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, ending.set)
    try:
        started = asyncio.ensure_future(loop.start())
        end = asyncio.ensure_future(ending.wait())
        try:
            await asyncio.wait({started, end}, return_when=asyncio.FIRST_COMPLETED)
            if ending.is_set():
                return
            started.result()
            _tell(out, f"running: {', '.join(loop.names)}; Ctrl-C ends it")
            until_s = running.time() + plan.duration_s if plan.duration_s else float("inf")
            while not ending.is_set() and running.time() < until_s:
                for told in await loop.mend():
                    _tell(out, told)
                for worker in view.workers - ordered:
                    ordered.add(worker)
                    await _order(bus, worker, plan.mode, "tidegate attach", out)
                await view.tick()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.wait(), TICK_S)
        finally:
            for task in (started, end):
                task.cancel()
            await asyncio.gather(started, end, return_exceptions=True)
    finally:
        for late in await loop.stop_services():
            _tell(out, f"{late} had to be killed; its log is {plan.folder / f'{late}.log'}")
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)


def _tell(out: TextIO, line: str) -> None:
    out.write(session.one_line(line) + "\n")
    out.flush()
