"""``python -m loadgen.memory_engine --socket PATH --arena NAME``: the engine as a process.

It says ``ready`` on its standard output when it can be asked. A line ``report`` on its standard input has it read
every byte of every session and answer with one line of JSON; the end of its standard input ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
import uvloop

from loadgen.memory_engine import plans
from loadgen.memory_engine.engine import MemoryEngine
from loadgen.memory_engine.sessions import Mix
from services.actuator.engines.serving import Sockets
from services.actuator.memory.arrays import SharedArena
from services.actuator.memory.attachment import gate_path
from services.actuator.memory.gate import GateKeeper
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import Pool
from services.actuator.memory.tickets import Planner
from services.errors import TidegateError
from services.lifetime import on_stop_signals


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 stopped, 2 the caller's mistake or a machine without room, told in one line."""
    parser = argparse.ArgumentParser(prog="python -m loadgen.memory_engine", description="Run one memory engine.")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--arena", required=True, help="name of the shared segment")
    parser.add_argument("--worker", default="n0/0/w0")
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--blocks-per-group", type=int, default=16)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--order", default="lifo", choices=("fullest", "lowest", "lifo"))
    parser.add_argument("--plan", default="mixed", choices=("compact", "mixed", "shuffle"))
    parser.add_argument("--mix", default="{}", help="fields of Mix, JSON")
    parser.add_argument("--check-copies", action="store_true", help="compare source and destination before a commit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pace-s", type=float, default=0.0, help="rest while an iteration runs")
    options = parser.parse_args(argv)
    try:
        geometry = Geometry(options.block_bytes, options.blocks_per_group, options.groups)
        arena = SharedArena.create(options.arena, geometry)
    except TidegateError as error:
        print(f"memory engine: {error}", file=sys.stderr)  # noqa: T201
        return 2
    gate = GateKeeper.create(gate_path(arena.name))
    try:
        engine = MemoryEngine(
            options.worker,
            Pool(geometry, order=options.order),
            arena.view,
            handle=arena.name,
            fence=gate,
            first_ticket=time.time_ns() >> 10,  # no ticket of an earlier life
            clock_ns=time.monotonic_ns,
            rng=np.random.default_rng(options.seed),
            plan=_planner(options.plan, options.seed),
            mix=msgspec.json.decode(options.mix, type=Mix),
            check_copies=options.check_copies,
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(engine, options.socket, options.pace_s))
    finally:
        gate.remove()
        arena.unlink()
    return 0


def _planner(name: str, seed: int) -> Planner[Pool]:
    rng = np.random.default_rng([seed, 1])
    return {"compact": plans.compact, "mixed": plans.mixed(rng), "shuffle": plans.shuffled(rng)}[name]


async def _serve(engine: MemoryEngine, socket: Path, pace_s: float) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    on_stop_signals(loop, lambda _: stopped.set())
    sockets = Sockets(time.monotonic_ns)
    await sockets.serve(socket, engine.answer)
    orders = asyncio.ensure_future(_obey(engine, stopped))
    _say("ready")
    try:
        while not stopped.is_set():
            engine.begin()
            await asyncio.sleep(pace_s)
            engine.end()
            await asyncio.sleep(0)
    finally:
        orders.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await orders
        await sockets.close()


async def _obey(engine: MemoryEngine, stopped: asyncio.Event) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        if line.strip() == b"report":
            _say(msgspec.json.encode(engine.report()).decode())
    stopped.set()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
