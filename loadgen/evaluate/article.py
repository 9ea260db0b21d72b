"""Article 1's cluster: policies on a sample of it, at the loads that its table may stand for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Phase
from loadgen.evaluate import bootstrap, pool
from loadgen.evaluate.article_traffic import CARDS, CONFIG, LONG_TOKENS, Sample, tables
from loadgen.evaluate.entrants import Entrant, entrant
from loadgen.joint import JointFleet
from loadgen.load import TARGET_SHARE
from schemas.identity import STEP_S

BEFORE_TOKENS_PER_S: Final = 14_200.0
BEFORE_LONG_WAIT_S: Final = 3.8
SEED: Final = 3_000_001
_PRECISION: Final = 0.02
_SEARCHED: Final = Sample(segments=8, cards=4, seconds=600.0)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A policy on the sample at a rate."""

    entrant: Entrant
    admission: str
    rate_per_s: float
    """Mean requests a second and card."""
    sample: Sample
    guard: bool = True


class Brought(msgspec.Struct, frozen=True, kw_only=True):
    """What it brought; rates are those of 128 cards."""

    policy: str
    admission: str
    rate_per_s: float
    hbm_utilisation: float
    tokens_per_s: float
    goodput_tokens_per_s: float
    long_wait_p99_s: float
    """Of requests with 6,000 prompt tokens or more."""
    tpot_p99_ms: float
    slo_token_share: float
    preemptions: int
    oom: int
    oom_a_week: tuple[float, float]
    """Of 128 cards: what was counted, and its 95 % upper bound."""
    cpu_s: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Where the cluster stands before, and who was run there."""

    meaning: str
    rate_per_s: float
    brought: list[Brought]


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """The highest rate at which a policy keeps 85 % of tokens within the SLO."""

    policy: str
    admission: str
    rate_per_s: float
    goodput_tokens_per_s: float
    """Of 128 cards, there."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Everybody at every load, and how much each can take."""

    sample: Sample
    searched: Sample
    """For capacities; loads were searched on the whole sample."""
    loads: list[Load]
    capacities: list[Capacity]
    cpu_s: float

    @property
    def most(self) -> float:
        """Tokens/s of the cluster, the most that anybody made."""
        return max(one.tokens_per_s for load in self.loads for one in load.brought)

    @property
    def fullest(self) -> float:
        """HBM utilisation, the most that anybody reached."""
        return max(one.hbm_utilisation for load in self.loads for one in load.brought)


def run(job: Job) -> Brought:
    """Simulate; deterministic."""
    began_s = time.process_time()
    sample = job.sample
    config = msgspec.structs.replace(CONFIG, cards=sample.cards, mode=job.entrant.mode(job.admission), guard=job.guard)
    given = [tables(sample, job.rate_per_s, segment, SEED) for segment in range(sample.segments)]
    fleets = [Fleet(config, of_segment) for of_segment in given]
    joint = JointFleet(fleets)
    choose = control = None
    if job.entrant.acts:
        control = Control(joint, joint.config, [table for of_segment in given for table in of_segment])
        choose = job.entrant.rule(joint.rows, range(sample.segments))
    warm_steps, steps = round(sample.warm_up_s / STEP_S), round(sample.duration_s / STEP_S)
    tokens_before = used_before = 0.0
    for step in range(steps):
        if step == warm_steps:
            found = [fleet.results() for fleet in fleets]
            tokens_before = float(sum(one.produced_tokens.sum() for one in found))
            used_before = float(sum(one.hbm_utilisation.sum() for one in found)) * sample.warm_up_s
        if control is not None and choose is not None:
            control.act(choose(control.observe(step)), job.entrant.goal_rho)
        joint.advance(STEP_S)
    found = [fleet.results() for fleet in fleets]
    card_s = sample.seconds * joint.workers
    good = offered = 0.0
    waits, tpots = [], []
    for one in found:
        counted = (one.phase != int(Phase.FUTURE)) & (one.arrival_s >= sample.warm_up_s)
        good += float(one.output_tokens[counted & one.good].sum())
        offered += float(one.output_tokens[counted].sum())
        tpots.append(one.tpot_s[counted & np.isfinite(one.tpot_s)])
        waits.append(one.wait_s[counted & (one.prompt_tokens >= LONG_TOKENS)])
    used = float(sum(one.hbm_utilisation.sum() for one in found)) * sample.duration_s - used_before
    oom = int(sum(one.oom.sum() for one in found))
    weeks = sample.duration_s * joint.workers / bootstrap.WEEK_S
    return Brought(
        policy=job.entrant.name + ("" if job.guard else ", guard off"),
        admission=job.admission,
        rate_per_s=job.rate_per_s,
        hbm_utilisation=used / card_s,
        tokens_per_s=CARDS * (float(sum(one.produced_tokens.sum() for one in found)) - tokens_before) / card_s,
        goodput_tokens_per_s=CARDS * good / card_s,
        long_wait_p99_s=float(np.percentile(np.concatenate(waits), 99)),
        tpot_p99_ms=1e3 * float(np.percentile(np.concatenate(tpots), 99)),
        slo_token_share=good / offered,
        preemptions=int(sum(one.preemption_events.sum() for one in found)),
        oom=oom,
        oom_a_week=(CARDS * oom / weeks, CARDS * bootstrap.upper_rate(oom, weeks)),
        cpu_s=time.process_time() - began_s,
    )


def rate_where(reached: Callable[[Brought], bool], job: Job) -> float:
    """The rate at which ``reached`` first becomes true of ``job``, to 2 %."""

    def at(rate_per_s: float) -> bool:
        return reached(run(msgspec.structs.replace(job, rate_per_s=rate_per_s)))

    low, high = 0.02, 0.04
    while not at(high) and high < 6.4:
        low, high = high, high * 1.6
    while high / low > 1 + _PRECISION:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if at(middle) else (middle, high)
    return math.sqrt(low * high)


def capacity(job: Job) -> tuple[Capacity, float]:
    """Of the job's policy, and the CPU seconds that it took to find."""
    began_s = time.process_time()
    rate = rate_where(lambda brought: brought.slo_token_share < TARGET_SHARE, job)
    there = run(msgspec.structs.replace(job, rate_per_s=rate))
    found = Capacity(
        policy=there.policy, admission=there.admission, rate_per_s=rate, goodput_tokens_per_s=there.goodput_tokens_per_s
    )
    return found, time.process_time() - began_s


def compare(sample: Sample, policies: Sequence[Path], jobs: int, tell: pool.Tell) -> Comparison:
    """Everybody at every load."""
    network = [entrant("dqn", policies[0])] if policies else []
    who = [
        (entrant("static"), "fcfs"),
        (entrant("rho_1.0"), "fcfs"),
        (entrant("vllm_offload"), "fcfs"),
        (entrant("heuristic"), "fcfs"),
        (entrant("heuristic"), "deadline_cap_shed"),
        *((one, "deadline_cap_shed") for one in network),
    ]
    began_s = time.process_time()
    searched = min((_SEARCHED, sample), key=lambda one: one.card_hours)
    before = Job(entrant=who[0][0], admission="fcfs", rate_per_s=0.0, sample=sample)
    late = rate_where(lambda brought: brought.long_wait_p99_s >= BEFORE_LONG_WAIT_S, before)
    full = rate_where(lambda brought: brought.tokens_per_s >= BEFORE_TOKENS_PER_S, before)
    cpu_s = time.process_time() - began_s
    loads = []
    for meaning, rate in (
        ("where static's P99 queue wait of long requests is the article's 3.8 s", late),
        ("where static makes the article's 14,200 tokens/s", full),
        ("half as much again: more than anybody here can serve", 1.5 * full),
    ):
        tell(f"load {meaning}: {rate:.3f} requests/s a card")
        tasks = [Job(entrant=one, admission=name, rate_per_s=rate, sample=sample) for one, name in who]
        tasks.append(Job(entrant=entrant("fixed:1.6"), admission="fcfs", rate_per_s=rate, sample=sample, guard=False))
        found = {}
        for task, brought in pool.results(run, tasks, jobs):
            found[tasks.index(task)] = brought
            cpu_s += brought.cpu_s
            tell(f"{brought.policy} {brought.admission}: {brought.tokens_per_s:,.0f} tokens/s, {brought.cpu_s:.0f} s")
        loads.append(Load(meaning=meaning, rate_per_s=rate, brought=[found[k] for k in range(len(tasks))]))
    searches = [Job(entrant=one, admission=name, rate_per_s=0.0, sample=searched) for one, name in who]
    capacities = {}
    for task, (one, spent_s) in pool.results(capacity, searches, jobs):
        capacities[searches.index(task)] = one
        cpu_s += spent_s
        tell(f"{one.policy} {one.admission}: 85 % within the SLO up to {one.rate_per_s:.3f} requests/s a card")
    ordered = [capacities[k] for k in range(len(searches))]
    return Comparison(sample=sample, searched=searched, loads=loads, capacities=ordered, cpu_s=cpu_s)
