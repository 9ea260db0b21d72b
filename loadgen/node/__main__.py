"""``python -m loadgen.node --config FILE``: one emulated node as a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path

import numpy as np
import uvloop

from loadgen.engine.fleet import Fleet
from loadgen.node.emulation import Emulation
from loadgen.node.files import NodeConfig, arrays_of, classes_of, load_tables, read_config, save_arrays
from loadgen.node.replay import Replay
from loadgen.requests import empty_table
from schemas.identity import STEP_S
from services import logs
from services.errors import UserError
from services.lifetime import die_with_parent, on_stop_signals

log = logging.getLogger(__name__)


async def replay(config: NodeConfig) -> int:
    """Serve and replay until the end or a signal; the exit code."""
    stopping = asyncio.Event()
    on_stop_signals(asyncio.get_running_loop(), lambda _: stopping.set())
    tables = load_tables(Path(config.tables), len(config.workers()))
    Fleet(config.fleet, [empty_table() for _ in tables]).advance(STEP_S)  # compiles before anybody waits for a step
    fleet = Fleet(config.fleet, tables)
    emulation = Emulation(fleet, config.workers(), classes_of(config, tables), config.fleet.limits)
    run = Replay(emulation, duration_s=config.duration_s, step_timeout_s=config.step_timeout_s, speed=config.speed)
    try:
        await run.open(Path(config.sockets))
        log.info("serving", extra={"fields": {"folder": config.sockets, "workers": len(tables)}})
        work = asyncio.ensure_future(run.run())
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            extra = {
                "node.steps": np.array(emulation.step),
                "node.missed_steps": np.array(run.missed_steps),
                "node.expired_leases": np.array(sum(one.expired for one in emulation.quotas)),
            }
            save_arrays(Path(config.results), arrays_of(fleet.results()) | extra)
            log.info("replay over", extra={"fields": {"steps": emulation.step, "missed": run.missed_steps}})
            await asyncio.wait({stop}, timeout=config.linger_s)
        for task in (work, stop):
            task.cancel()
        await asyncio.gather(work, stop, return_exceptions=True)
    finally:
        await run.close()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped, 2 the caller's mistake, told in one line."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.node", description="Run one emulated node.")
    parser.add_argument("--config", type=Path, required=True, help="configuration file (JSON)")
    options = parser.parse_args(argv)
    try:
        config = read_config(options.config)
        Path(config.sockets).mkdir(parents=True, exist_ok=True, mode=0o700)
        if config.parent_pid:
            die_with_parent(config.parent_pid)
        logs.configure("node", f"{config.node}-{os.getpid()}", config.log_level, "text")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(replay(config))
    except UserError as error:
        print(f"tidegate node: {error}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
