"""A node as a process: signals, sockets, replay, results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadgen.node.emulation import Emulation
from loadgen.node.files import NodeConfig, save_arrays
from loadgen.node.replay import Replay
from services.lifetime import on_stop_signals

log = logging.getLogger(__name__)


async def live(config: NodeConfig, emulation: Emulation, results: Callable[[], Mapping[str, NDArray[Any]]]) -> None:
    """Serve and replay until the end of the replay plus ``linger_s``, or until SIGTERM or SIGINT.

    The results file appears when the replay has ended; a replay that was stopped leaves none.
    """
    stopping = asyncio.Event()
    on_stop_signals(asyncio.get_running_loop(), lambda _: stopping.set())
    replay = Replay(emulation, duration_s=config.duration_s, step_timeout_s=config.step_timeout_s, speed=config.speed)
    work = stop = None
    try:
        await replay.open(Path(config.sockets))
        log.info("serving", extra={"fields": {"folder": config.sockets, "workers": len(emulation.workers)}})
        work = asyncio.ensure_future(replay.run())
        stop = asyncio.ensure_future(stopping.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            save_arrays(Path(config.results), {**results(), **_account(replay)})
            log.info("replay over", extra={"fields": {"steps": emulation.step, "missed": replay.missed_steps}})
            await asyncio.wait({stop}, timeout=config.linger_s)
    finally:
        tasks = [task for task in (work, stop) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await replay.close()


def _account(replay: Replay) -> dict[str, NDArray[Any]]:
    """What the node itself counted, beside the requests' outcomes."""
    memory = replay.emulation.memory.figures() if replay.emulation.memory is not None else {}
    return {
        "node.steps": np.array(replay.emulation.step),
        "node.missed_steps": np.array(replay.missed_steps),
        "node.latency_ms": np.array(replay.latencies_ms, np.float64),
        "node.expired_leases": np.array(sum(one.expired for one in replay.emulation.quotas)),
        **{f"node.memory_{name}": np.array(value) for name, value in memory.items()},
    }
