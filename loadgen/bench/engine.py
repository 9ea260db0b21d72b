"""How fast the emulated engine is: worker-steps per second of one core, and how true its timing is.

A worker-step is one worker over 2 s in sub-steps of 0.1 s, metrics and commands included, on workers that are
loaded (a queue, tens of requests running, sessions that come back), after the kernels were compiled.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from loadgen.engine.calibration import errors as measured_errors
from loadgen.engine.fleet import Fleet
from loadgen.engine.records import MAX_BATCH
from loadgen.engine.specs import FleetConfig
from loadgen.requests import RequestTable
from schemas.identity import STEP_S
from schemas.metrics import COLUMN

CONFIGURATIONS = (
    ("A100-80G", "Llama-3.1-8B", 2),
    ("H100-80G", "Llama-3.1-8B", 2),
    ("H200-141G", "Llama-3.1-8B", 3),
    ("A100-80G", "Llama-3.1-70B-4bit", 1),
)
"""Card, model, workers per card; the first is the one that has a target."""
LOAD_PER_S = {
    ("A100-80G", "Llama-3.1-8B"): 3.0,
    ("H100-80G", "Llama-3.1-8B"): 8.0,
    ("H200-141G", "Llama-3.1-8B"): 6.0,
    ("A100-80G", "Llama-3.1-70B-4bit"): 0.9,
}
"""Requests per second and worker that load a configuration: near what it can finish."""
WARM_UP_STEPS = 100
MEAN_TURNS = 2.0
COOL_DOWN_STEPS = 5
"""Between compactions, as the shield holds it."""


def chat_table(rate_per_s: float, duration_s: float, rng: np.random.Generator) -> RequestTable:
    """Chat-like requests (Azure chat's published medians and tails) in sessions of two turns on average."""
    sessions = max(1, int(rate_per_s * duration_s / MEAN_TURNS))
    turns = rng.geometric(1.0 / MEAN_TURNS, sessions)
    count = int(turns.sum())
    first = np.cumsum(turns) - turns
    session = np.repeat(np.arange(sessions), turns)
    place = np.arange(count) - first[session]
    added = np.clip(rng.lognormal(np.log(700), 0.9, count), 16, 6000).astype(np.int64)
    output = np.clip(rng.lognormal(np.log(150), 0.7, count), 2, 1500).astype(np.int64)
    arrival = np.full(count, np.nan)
    arrival[first] = np.sort(rng.uniform(0.0, duration_s, sessions))
    grown = np.cumsum(added + output)
    history = grown - (grown - added - output)[first][session] - added - output
    last = place == turns[session] - 1
    return RequestTable(
        arrival_s=arrival,
        prompt_tokens=history + added,
        cached_tokens=history,
        output_tokens=output,
        max_tokens=np.maximum(np.minimum(4096, 131_072 - history - added), output),
        service_class=np.zeros(count, np.uint8),
        session=session.astype(np.int64),
        next_turn=np.where(last, -1, np.arange(count) + 1),
        think_s=np.where(last, 0.0, rng.exponential(20.0, count)),
    )


def bench_engine(
    cards: int = 8,
    workers_per_card: int = 2,
    steps: int = 200,
    seed: int = 0,
    card: str = "A100-80G",
    model: str = "Llama-3.1-8B",
) -> dict[str, Any]:
    """Worker-steps per second of one core on a loaded fleet under random commands.

    Returns ``worker_steps_per_s`` (CPU time of this thread), ``wall_worker_steps_per_s``, ``mean_running``,
    ``mean_waiting``, ``preemptions`` and the configuration.
    """
    rng = np.random.default_rng(seed)
    workers = cards * workers_per_card
    duration_s = (WARM_UP_STEPS + steps) * STEP_S
    rate = LOAD_PER_S.get((card, model), 1.0)
    tables = [chat_table(rate, duration_s, rng) for _ in range(workers)]
    fleet = Fleet(FleetConfig(card=card, model=model, workers_per_card=workers_per_card, cards=cards), tables)
    fleet.command(rho=1.3)
    fleet.advance(WARM_UP_STEPS * STEP_S)
    fleet.metrics()
    compacted = np.full(workers, -COOL_DOWN_STEPS)
    running = np.zeros(workers)
    waiting = np.zeros(workers)
    began, began_cpu = time.perf_counter(), time.thread_time()
    for k in range(steps):
        action = rng.integers(0, 5, workers)
        rows = fleet.metrics()
        rho = rows[:, COLUMN["rho"]] + np.where(action == 1, 0.1, np.where(action == 2, -0.1, 0.0))
        cap = rows[:, COLUMN["max_running"]] * np.where(action == 1, 1.25, np.where(action == 2, 0.8, 1.0))
        idle = rows[:, COLUMN["kv_idle_bytes"]]
        fleet.command(
            rho=rho,
            max_running=np.clip(np.rint(cap), 32, MAX_BATCH),
            evict_bytes=np.where(action == 4, np.minimum(2e9, 0.5 * idle), 0.0),
            compact_bytes=np.where((action == 3) & (k - compacted >= COOL_DOWN_STEPS), 1e9, 0.0),
        )
        compacted[action == 3] = k
        fleet.advance(STEP_S)
        running += rows[:, COLUMN["running"]]
        waiting += rows[:, COLUMN["waiting"]]
    cpu_s, wall_s = time.thread_time() - began_cpu, time.perf_counter() - began
    return {
        "card": card,
        "model": model,
        "workers": workers,
        "workers_per_card": workers_per_card,
        "steps": steps,
        "worker_steps_per_s": workers * steps / cpu_s,
        "wall_worker_steps_per_s": workers * steps / wall_s,
        "mean_running": float(running.mean() / steps),
        "mean_waiting": float(waiting.mean() / steps),
        "preemptions": int(rows[:, COLUMN["preemptions"]].sum()),
    }


def bench_all(cards: int = 8, steps: int = 100, seed: int = 0, calibration: Path | None = None) -> dict[str, Any]:
    """:func:`bench_engine` of every configuration; the first one's speed stands on top, since it has the target.

    With ``calibration``, the folder of measured timings, also the iteration times' error per card, phase and batch
    (prompt tokens for a prefill). UserError when the folder does not hold them.
    """
    errors = [] if calibration is None else [msgspec.structs.asdict(one) for one in measured_errors(calibration)]
    runs = [bench_engine(cards, per_card, steps, seed, card, model) for card, model, per_card in CONFIGURATIONS]
    result: dict[str, Any] = {"worker_steps_per_s": runs[0]["worker_steps_per_s"], "configurations": runs}
    return result | ({"calibration_errors": errors} if errors else {})
