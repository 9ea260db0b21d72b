"""`tidegate demo` from the first line to the table."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live

from loadgen.demo import report
from loadgen.demo.background import in_background
from loadgen.demo.gate import Gate
from loadgen.demo.options import DemoOptions
from loadgen.demo.plan import Plan, figures, make_plan, run_baselines
from loadgen.demo.services import Loop
from loadgen.demo.view import LiveView
from loadgen.engine.report import summary
from schemas.identity import STEP_S
from services.bus import Bus
from services.errors import UserError

REFRESH_S = 0.25
PLAIN_EVERY_S = 5.0
PLAIN_WIDTH = 130
"""Columns where nothing tells: wide enough for the tables."""


def main(options: DemoOptions) -> int:
    """Exit code 0; 130 when Ctrl-C ended it. Errors leave as exceptions, with every process stopped before."""
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    with contextlib.ExitStack() as stack:
        if options.keep is not None:
            folder = options.keep.absolute()
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"--keep: {folder}: found {error.strerror}, expected a folder to write to") from error
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-")))
        try:
            return asyncio.run(_demo(options, folder, console))
        except asyncio.CancelledError:
            return 130


async def _demo(options: DemoOptions, folder: Path, console: Console) -> int:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    if options.trace_out is not None:
        options.trace_out.unlink(missing_ok=True)
    console.print("preparing: workload, load 1.0 and the baselines on the same requests ...")
    plan = await in_background(make_plan, options)
    for line in plan.statement(options):
        console.print(f"  {line}")
    baselines = await in_background(run_baselines, plan)
    rows = {name: figures(run.summary) for name, run in baselines.items()}
    console.print("starting: NATS server, telemetry, featurizer, decision, actuator, learner, emulated nodes ...")
    rows["loop"], loop = await _live(options, plan, folder, console)
    loop.heuristic_goodput_share = rows["loop"]["goodput_tokens_per_s"] / max(
        rows["heuristic"]["goodput_tokens_per_s"], 1e-9
    )
    _conclude(options, plan, rows, loop, console)
    return 1 if loop.memory.wrong_blocks else 0


async def _live(
    options: DemoOptions, plan: Plan, folder: Path, console: Console
) -> tuple[dict[str, float], report.LoopFigures]:
    """Run the loop over the whole replay; its row of the table and its own figures."""
    loop = Loop(folder, options, plan)
    bus: Bus | None = None
    gating: asyncio.Task[None] | None = None
    try:
        await loop.start_server()
        if options.keep is not None:  # who keeps the folder has the password, in nats/server.conf
            console.print(
                f"operator commands: TIDEGATE_COMMON_NATS_URL={loop.server.url} "
                f"TIDEGATE_COMMON_NATS_USER={loop.server.user} TIDEGATE_COMMON_NATS_PASSWORD={loop.server.password} "
                "tidegate status"
            )
        bus = await loop.connect("demo")
        view = LiveView()
        await view.attach(bus)
        gate = Gate(bus, plan.node_fleet())
        await gate.put_heuristic()
        gating = asyncio.create_task(gate.run())
        await loop.start()
        await _watch(options, plan, loop, view, gate, console)
        result = summary(loop.results())
        latencies = loop.node_figures("latency_ms")
        figures_of_loop = report.LoopFigures(
            steps=int(loop.node_figures("steps").sum()),
            missed_steps=int(loop.node_figures("missed_steps").sum()),
            latency_p50_ms=float(np.percentile(latencies, 50)),
            latency_p99_ms=float(np.percentile(latencies, 99)),
            policy_versions=view.policy_versions,
            dropped=view.dropped + bus.counters()["dropped"],
            candidates=[verdict.version for verdict in gate.verdicts],
            promoted=[verdict.version for verdict in gate.verdicts if verdict.promoted],
            best_candidate_ratio=max((verdict.ratio for verdict in gate.verdicts), default=float("nan")),
            memory=loop.memory(),
        )
        return figures(result), figures_of_loop
    finally:
        if gating is not None:
            gating.cancel()
            await asyncio.gather(gating, return_exceptions=True)
        if bus is not None:
            await bus.drain()
        await loop.stop()


async def _watch(options: DemoOptions, plan: Plan, loop: Loop, view: LiveView, gate: Gate, console: Console) -> None:
    """Show what happens until every node is done; services that end are started again. ChildDied for a node."""
    steps = int(-(-plan.duration_s // STEP_S))
    live = console.is_terminal and not options.plain
    began_s = time.monotonic()
    told_s = began_s

    def headline() -> str:
        rate = max(view.step, 0) / max(time.monotonic() - began_s, 1e-9)
        judged = len(gate.verdicts)
        return (
            f"simulated {max(view.step, 0) * STEP_S:,.0f} of {plan.duration_s:,.0f} s, "
            f"step {max(view.step, 0)}/{steps}, {rate:.0f} steps/s; acting: {view.acting}; candidates judged: {judged}"
            + (f"; examining {gate.examining}" if gate.examining else "")
        )

    with _screen(console, live) as screen:
        while not loop.finished:
            for name in await loop.revive():
                console.print(f"{name} ended and was started again; its log is {loop.processes.children[name].log}")
            await asyncio.sleep(REFRESH_S)
            if screen is not None:
                screen.update(view.render(headline()))
            elif time.monotonic() - told_s >= PLAIN_EVERY_S:
                told_s = time.monotonic()
                console.print(headline())
        if screen is None:
            console.print(view.render(headline()))
        else:
            screen.update(view.render(headline()))


@contextlib.contextmanager
def _screen(console: Console, live: bool) -> Iterator[Live | None]:
    if not live:
        yield None
        return
    with Live(console=console, refresh_per_second=4, transient=False) as screen:
        yield screen


def _conclude(
    options: DemoOptions, plan: Plan, rows: dict[str, dict[str, float]], loop: report.LoopFigures, console: Console
) -> None:
    console.print()
    console.print(report.comparison(rows))
    console.print(
        f"loop: {loop.steps} steps, {loop.missed_steps} missed; sample to last command "
        f"p50 {loop.latency_p50_ms:.1f} ms, p99 {loop.latency_p99_ms:.1f} ms; {loop.dropped} messages dropped"
    )
    console.print(loop.memory.told())
    if options.policy == "champion":
        if loop.promoted:
            console.print(f"the network {loop.promoted[-1]} beat the heuristic on the fixed workloads and took over")
        else:
            best = f" (best: {loop.best_candidate_ratio:.3f} of its goodput)" if loop.candidates else ""
            console.print(
                f"{len(loop.candidates)} networks were judged on the fixed workloads, none beat the heuristic{best}: "
                "the heuristic acted, the newest network decided in shadow"
            )
    console.print(
        "The baselines depend on the seed alone; the live row can differ slightly between machines: it is the real "
        "loop, and when a network is taken up depends on how fast it was learned."
    )
    if options.trace_out is not None:
        console.print(f"spans: {options.trace_out}")
    if options.json is not None:
        context = {
            "workload": {"name": plan.workload.name, "statement": plan.statement(options)},
            "load": {"L": options.load, "unit_factor": plan.unit.factor, "unit_share": plan.unit.share},
            "options": {"seed": options.seed, "duration_s": options.duration_s, "policy": options.policy},
        }
        report.write_json(options.json, report.as_json(rows, loop, context))
        console.print(f"written: {options.json}")
    sys.stdout.flush()
