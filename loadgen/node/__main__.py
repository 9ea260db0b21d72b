"""``python -m loadgen.node --config FILE``: one emulated node as a process."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import uvloop

from loadgen.engine.fleet import Fleet
from loadgen.engine.warm import warm
from loadgen.node import memory
from loadgen.node.emulation import Emulation
from loadgen.node.files import arrays_of, classes_of, load_tables, read_config
from loadgen.node.process import live
from services import logs
from services.errors import UserError
from services.lifetime import die_with_parent


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done or stopped, 2 the caller's mistake, told in one line."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.node", description="Run one emulated node.")
    parser.add_argument("--config", type=Path, required=True, help="configuration file (JSON)")
    options = parser.parse_args(argv)
    try:
        config = read_config(options.config)
        if config.parent_pid:
            die_with_parent(config.parent_pid)
        logs.configure("node", f"{config.node}-{os.getpid()}", config.log_level, "text")
        Path(config.sockets).mkdir(parents=True, exist_ok=True, mode=0o700)
        tables = load_tables(Path(config.tables), len(config.workers()))
        # Kernels are compiled or loaded here, before anybody waits for a step.
        warm()
        fleet = Fleet(config.fleet, tables)
        fetches = config.fleet.mode.prefetch
        classes = classes_of(config, tables)
        emulation = Emulation(fleet, config.workers(), classes, config.fleet.limits, fetches=fetches)
        emulation.memory = memory.create(
            fleet, config.sockets, emulation.base_receipt, emulation.asker, budget_bytes=config.arena_bytes
        )
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(live(config, emulation, lambda: arrays_of(fleet.results())))
        finally:
            emulation.memory.close()
    except UserError as error:
        print(f"tidegate node: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
