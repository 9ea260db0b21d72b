"""Time: what happens in a sub-step, in which order, and how workers share a card.

Workers of a card are time-sliced as CUDA does it without MPS: those that have something to compute get equal parts
of each sub-step. Order within a sub-step: quotas (every 2 s), link, arrivals, clients that give up, admission,
computing, and at its end the check whether the card ran out of memory, which is armed whether the guard is on or not.
"""

from __future__ import annotations

import math

from loadgen.engine.admission import admit
from loadgen.engine.batch import crash
from loadgen.engine.compaction import compact
from loadgen.engine.eviction import evict
from loadgen.engine.host import blocks_of, expire
from loadgen.engine.iterate import prefill_gives_up, ready, run
from loadgen.engine.jit import entry, kernel
from loadgen.engine.link import backlog_bytes, prefetch
from loadgen.engine.pages import empty_group, premap, unmap_group
from loadgen.engine.records import ASLEEP, F8, LANE_SWAP, LANE_WRITE, LANES, State
from loadgen.engine.room import hard_groups
from loadgen.engine.rules import next_cap, offload_bytes, smoothed_gap_s
from loadgen.engine.waiting import arrivals, give_up
from loadgen.engine.weights import pump, restarted
from schemas.actions import MAX_RUNNING_HIGH, MAX_RUNNING_LOW, RHO_MIN


@entry
def refresh_floors(s: State, c: int) -> None:
    """Floor of each worker: its largest running or next request and one scheduling step; empty groups beyond
    the hard quota go back."""
    card = s.card[c]
    for w in range(card.first, card.first + card.workers):
        worker = s.worker[w]
        largest = 0
        for i in range(worker.n_dec):
            largest = max(largest, s.request[s.dec_request[w, i]].reserved)
        for i in range(worker.n_pre):
            largest = max(largest, s.request[s.pre_request[w, i]].reserved)
        if worker.q_head >= 0:
            largest = max(largest, s.request[worker.q_head].need)
        worker.floor_blocks = min(worker.pool, largest + blocks_of(worker.batch_tokens, worker.block_tokens))
    for w in range(card.first, card.first + card.workers):
        worker = s.worker[w]
        if worker.physical == 0:
            quota = hard_groups(s, w)
            while worker.mapped > quota:
                g = empty_group(s, w)
                if g < 0:
                    break
                unmap_group(s, w, g)


@kernel
def _check_memory(s: State, c: int, t: float) -> None:
    """Did the card run out? Then the engine that mapped last hits the error and starts anew; where that one is
    starting already, the one that holds most."""
    card = s.card[c]
    used = card.weights + card.runtime + card.mapped_bytes
    for w in range(card.first, card.first + card.workers):
        used += s.worker[w].activation
    if used <= card.hbm:
        return
    w = card.last_mapper
    if s.worker[w].starting_until > t or s.worker[w].asleep == ASLEEP:
        for n in range(card.first, card.first + card.workers):
            if s.worker[n].mapped * s.worker[n].group_bytes > s.worker[w].mapped * s.worker[w].group_bytes:
                w = n
    worker = s.worker[w]
    crash(s, w, t, card.restart_s)
    restarted(s, w)
    for g in range(worker.group_at, worker.group_at + worker.groups):
        if s.group[g].mapped == 1:
            unmap_group(s, w, g)
    worker.stall = 0.0
    worker.activation = 0.0
    premap(s, w)


@kernel
def _account(s: State, c: int) -> None:
    """Sum the card's use for its time mean: weights, KV of running requests (and of idle ones), activation."""
    card = s.card[c]
    live = card.weights
    idle = 0.0
    for w in range(card.first, card.first + card.workers):
        worker = s.worker[w]
        held = worker.mapped * worker.bpg - worker.free - worker.aside
        live += (held - worker.idle_blocks) * worker.block_bytes + worker.activation
        idle += worker.idle_blocks * worker.block_bytes
    card.utilisation += live / card.hbm
    card.utilisation_idle += (live + idle) / card.hbm


@kernel
def _look(s: State, w: int, t: float) -> None:
    """The fast control's look at a worker, once a second: its running cap, and idle KV to copy ahead of need."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.capped == 1 and worker.n_dec > 0:
        limit = math.inf
        for i in range(worker.n_dec):
            limit = min(limit, s.request[s.dec_request[w, i]].tpot_limit)
        if worker.gap_iterations > 0.0:
            worker.gap = smoothed_gap_s(worker.gap, worker.gap_time / worker.gap_iterations)
        running = float(worker.n_dec + worker.n_pre)
        worker.cap = next_cap(worker.cap, float(worker.max_running), running, worker.gap, limit)
    worker.gap_time = 0.0
    worker.gap_iterations = 0.0
    if worker.watermark == 1 and worker.n_idle > 0:
        held = (worker.mapped * worker.bpg - worker.free - worker.aside) * worker.block_bytes
        backlog = 0.0
        for lane in range(LANES):
            backlog += backlog_bytes(s, worker.card, lane)
        idle = worker.idle_blocks * worker.block_bytes
        size = offload_bytes(held, hard_groups(s, w) * worker.group_bytes, idle, backlog, card.link)
        if size > 0.0:
            evict(s, w, size, t, LANE_WRITE)


@kernel
def step_card(s: State, c: int, count: int) -> None:
    """Advance one card by ``count`` sub-steps."""
    card = s.card[c]
    first = card.first
    last = card.first + card.workers
    dt = card.substep
    for _ in range(count):
        t = card.substeps * dt
        if card.substeps % card.control_every == 0:
            refresh_floors(s, c)
        pump(s, c, dt)
        if card.substeps % card.prefetch_every == 0:
            prefetch(s, c, t)
            if card.silent == 1:
                expire(s, c, t)
            for w in range(first, last):
                _look(s, w, t)
        busy = 0
        for w in range(first, last):
            worker = s.worker[w]
            arrivals(s, w, t)
            if card.substeps % card.timeout_every == 0:
                prefill_gives_up(s, w, t)
                give_up(s, w, t)
            admit(s, w, t)
            if worker.n_dec + worker.n_pre + worker.q_len > 0:
                worker.quiet_since = t + dt
            worker.credit = min(worker.credit + dt, worker.premap_s)
            if ready(s, w):
                busy += 1
        stall = min(card.stall, dt)
        card.stall -= stall
        for w in range(first, last):
            worker = s.worker[w]
            if not ready(s, w):
                worker.activation = worker.act_base if t >= worker.starting_until else 0.0
                worker.stall = 0.0
                continue
            late = min(worker.stall, dt - stall)
            worker.stall -= late
            device_s = (dt - stall - late) / busy
            if device_s > 0.0:
                run(s, w, t, dt, device_s)
        _check_memory(s, c, t + dt)
        _account(s, c)
        card.substeps += 1


@entry
def advance(s: State, count: int) -> None:
    """Advance all cards by ``count`` sub-steps, one card after another: they share nothing."""
    for c in range(len(s.card)):
        card = s.card[c]
        card.moved = 0.0
        for w in range(card.first, card.first + card.workers):
            s.worker[w].recent_iterations = 0.0
            s.worker[w].recent_time = 0.0
        step_card(s, c, count)


@entry
def obey(s: State, orders: F8, rho_max: float) -> None:
    """Act on all workers: ``orders`` float64 [6, W] is rho, max_running, bytes to evict, bytes to compact, generation
    and hard quota; NaN, a negative cap or generation and no bytes leave things as they are."""
    for w in range(len(s.worker)):
        worker = s.worker[w]
        changed = 0
        if not math.isnan(orders[0, w]):
            rho = min(max(orders[0, w], RHO_MIN), rho_max)
            changed += rho != worker.rho
            worker.rho = rho
        if orders[1, w] >= 0.0:
            cap = int(min(max(orders[1, w], MAX_RUNNING_LOW), MAX_RUNNING_HIGH))
            changed += cap != worker.max_running
            worker.max_running = cap
        if worker.physical == 0 and not math.isnan(orders[5, w]):
            groups = worker.groups
            if orders[5, w] < groups * worker.group_bytes:
                groups = int(max(orders[5, w], 0.0) / worker.group_bytes)
            changed += groups != worker.quota_groups
            worker.quota_groups = groups
        if orders[4, w] >= 0.0:
            worker.generation = int(orders[4, w])
        elif changed > 0:
            worker.generation += 1
        card = s.card[worker.card]
        if orders[2, w] > 0.0:
            evict(s, w, orders[2, w], card.substeps * card.substep, LANE_SWAP)
        if orders[3, w] > 0.0:
            compact(s, w, orders[3, w])
