"""`tidegate evaluate --adversarial STEPS`: can any command run a card out of memory? The check is armed throughout.

Half of the fleets get random actions through the shield and the actuator's planning, the other half random commands
straight to the engines: any rho, any ceiling, evictions and compactions of any size, hard quotas, named evictions and
prefetches. With the guard off the same commands do run out (``tests/loadgen/evaluate``), so the check can fire.
"""

from __future__ import annotations

import math
import time
from typing import Final

import msgspec
import numpy as np

from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode
from loadgen.evaluate import bootstrap, pool
from loadgen.fleets import held_out_configurations, tables_for, unit_factor
from loadgen.joint import JointFleet
from loadgen.policies import ADMISSIONS, admission_named
from loadgen.requests import RequestTable
from schemas.identity import STEP_S
from services.decision.heuristic import random_masked

CARDS: Final = 24
"""Of each fleet."""
FLEETS: Final = 8
EPISODE_STEPS: Final = 300
LOAD: Final = 1.3
"""Beside a configuration's own load, so that memory is short."""
FIRST_SEED: Final = 4_000_001
NAMED_EVERY: Final = 2


class Episode(msgspec.Struct, frozen=True, kw_only=True):
    """Some fleets for a while."""

    seed: int
    guard: bool = True
    fleets: int = FLEETS
    cards: int = CARDS
    steps: int = EPISODE_STEPS


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What happened."""

    worker_steps: int = 0
    masked_worker_steps: int = 0
    """Of them, those under random actions that the shield allowed."""
    oom: int = 0
    preemptions: int = 0
    commands: int = 0
    evictions: int = 0
    """Sessions evicted by name."""
    prefetches: int = 0
    hard_quotas: int = 0
    cpu_s: float = 0.0
    oom_upper_bound_per_week: float = math.inf
    """95 % bound on crashes a week of one worker."""


def run(episode: Episode) -> Tally:
    """One episode; deterministic given its seed but for ``cpu_s``."""
    began_s = time.process_time()
    rng = np.random.default_rng([0xADF, episode.seed])
    duration_s = episode.steps * STEP_S
    masked, raw = [], []
    given = []
    for number in range(episode.fleets):
        fleet, tables = _fleet(episode, number, rng, duration_s)
        if number % 2:
            raw.append(fleet)
        else:
            masked.append(fleet)
            given += tables
    joint = JointFleet(masked)
    control = Control(joint, joint.config, given)
    counts = dict.fromkeys(("commands", "evictions", "prefetches", "hard_quotas"), 0)
    for step in range(episode.steps):
        seen = control.observe(step)
        control.act(random_masked(seen.mask, rng))
        counts["commands"] += joint.workers
        joint.advance(STEP_S)
        for fleet in raw:
            _harass(fleet, rng, counts, step)
            fleet.advance(STEP_S)
    results = [fleet.results() for fleet in (*masked, *raw)]
    workers = joint.workers + sum(fleet.workers for fleet in raw)
    return Tally(
        worker_steps=workers * episode.steps,
        masked_worker_steps=joint.workers * episode.steps,
        oom=int(sum(one.oom.sum() for one in results)),
        preemptions=int(sum(one.preemption_events.sum() for one in results)),
        cpu_s=time.process_time() - began_s,
        **counts,
    )


def run_all(steps: int, seed: int, jobs: int, tell: pool.Tell) -> Tally:
    """Episodes until at least ``steps`` worker-steps are done."""
    least = FLEETS * CARDS * EPISODE_STEPS
    episodes = [Episode(seed=FIRST_SEED + 1_000_003 * seed + k) for k in range(-(-steps // least))]
    whole = Tally()
    for _, found in pool.results(run, episodes, jobs):
        whole = added(whole, found)
        tell(f"{whole.worker_steps:,} of {steps:,} worker-steps, {whole.oom} OOM, {whole.cpu_s:,.0f} s of CPU")
        if whole.worker_steps >= steps:
            break
    return whole


def added(one: Tally, other: Tally) -> Tally:
    """Both together."""
    sums = {
        name: getattr(one, name) + getattr(other, name)
        for name in Tally.__struct_fields__
        if name != "oom_upper_bound_per_week"
    }
    weeks = sums["worker_steps"] * STEP_S / bootstrap.WEEK_S
    return Tally(**sums, oom_upper_bound_per_week=bootstrap.upper_rate(int(sums["oom"]), weeks))


def lines(found: Tally) -> list[str]:
    """For a terminal."""
    return [
        f"{found.worker_steps:,} worker-steps under random commands, {found.masked_worker_steps:,} of them masked: "
        f"{found.oom} OOM (95 % bound {found.oom_upper_bound_per_week:.4f} a worker-week), "
        f"{found.preemptions:,} preemptions",
        f"{found.commands:,} commands, {found.hard_quotas:,} hard quotas, {found.evictions:,} sessions evicted and "
        f"{found.prefetches:,} prefetched by name; {found.cpu_s:,.0f} s of CPU",
    ]


def _fleet(
    episode: Episode, number: int, rng: np.random.Generator, duration_s: float
) -> tuple[Fleet, list[RequestTable]]:
    """A held-out configuration, overloaded, under some admission."""
    every = held_out_configurations()
    configuration = every[int(rng.integers(len(every)))]
    admission = str(rng.choice(ADMISSIONS))
    mode = EngineMode(
        admission="physical" if number % 4 == 3 else "reserve",
        reservation="expected" if rng.integers(2) else "max_tokens",
        offload=bool(rng.integers(2)),
        watermark=bool(rng.integers(2)),
        page_aware=bool(rng.integers(4)),
        **admission_named(admission),
    )
    fleet = msgspec.structs.replace(
        configuration.fleet,
        cards=episode.cards,
        mode=mode,
        guard=episode.guard,
        transfer_failures=float(rng.choice([0.0, 0.02, 0.2])),
        client_timeouts=bool(rng.integers(2)),
    )
    wide = msgspec.structs.replace(configuration, fleet=fleet)
    tables = tables_for(
        wide, int(rng.integers(FIRST_SEED, 2 * FIRST_SEED)), duration_s, LOAD * unit_factor(configuration)
    )
    return Fleet(fleet, tables), tables


def _harass(fleet: Fleet, rng: np.random.Generator, counts: dict[str, int], step: int) -> None:
    """Commands that no shield saw."""
    n = fleet.workers
    capacity = fleet.config.kv_capacity_bytes()
    told = rng.random((5, n)) < np.array([0.5, 0.5, 0.2, 0.2, 0.1])[:, None]
    absent = math.nan
    hard = np.where(rng.random(n) < 0.3, math.inf, rng.uniform(0.0, 1.5 * capacity, n))
    fleet.command(
        rho=np.where(told[0], rng.uniform(-1.0, 4.0, n), absent),
        max_running=np.where(told[1], rng.choice([0, 1, 4, 64, 1024, 10**6], n), -1),
        evict_bytes=np.where(told[2], rng.choice([1.0, 1e9, 1e12], n), absent),
        compact_bytes=np.where(told[3], rng.choice([1.0, 1e9, 1e12], n), absent),
        hard_bytes=np.where(told[4], hard, absent),
    )
    counts["commands"] += n
    counts["hard_quotas"] += int(told[4].sum())
    if step % NAMED_EVERY:
        return
    worker = int(rng.integers(n))
    idle = fleet.snapshot(worker).idle
    if idle:
        chosen = rng.choice([one.sequence for one in idle], min(len(idle), 8), replace=False)
        counts["evictions"] += int((fleet.evict_sessions(worker, chosen) > 0).sum())
    away = fleet.away(worker, math.inf)
    if away:
        chosen = rng.choice([one.sequence for one in away], min(len(away), 8), replace=False)
        counts["prefetches"] += int((fleet.prefetch_sessions(worker, chosen) > 0).sum())
