"""Compaction, accounting only: empty the emptiest page groups into the holes of the fullest (DESIGN section 5).

The emulated engine commits at the iteration boundary between two sub-steps, where no block is being written, so
every block outside a transfer is movable. The copy reads and writes HBM, which the decodes then lack.
"""

from __future__ import annotations

import numpy as np

from loadgen.engine.jit import kernel
from loadgen.engine.pages import ZERO, full_mask, popcount, set_free, take, unmap_group
from loadgen.engine.records import LANE_PREFETCH, State

COPY_SHARE = 0.82
"""What an SM copy kernel reaches of the HBM's peak (calibration README)."""
PAUSE_US = 100.0
PAUSE_BLOCK_US = 0.1
"""Swapping the block tables: an assumption, a fixed part and one per block moved."""
PINNED = -1
SOURCE = -2
EMPTY = -3


@kernel
def _pin(s: State, q: int) -> None:
    if s.sequence[q].lane >= 0:
        c = s.sequence[q].head
        while c >= 0:
            s.mark[s.chunk[c].group] = PINNED
            c = s.chunk[c].next


@kernel
def _mark(s: State, w: int) -> int:
    """Mark each mapped group with its live blocks, pinned or empty; returns the holes of the partly full."""
    worker = s.worker[w]
    while worker.top > 0 and s.group[worker.group_at + worker.top - 1].mapped == 0:
        worker.top -= 1
    holes = 0
    for g in range(worker.group_at, worker.group_at + worker.top):
        s.mark[g] = 0
        if s.group[g].mapped == 1:
            free = popcount(s.group[g].free)
            s.mark[g] = worker.bpg - free if free < worker.bpg else EMPTY
            holes += free if free < worker.bpg else 0
            if s.group[g].aside != ZERO:
                s.mark[g] = PINNED  # a destination of somebody else's move
    for i in range(worker.n_dec):
        _pin(s, s.request[s.dec_request[w, i]].seq)
    for i in range(worker.n_pre):
        _pin(s, s.request[s.pre_request[w, i]].seq)
    q = worker.l_head
    while q >= 0:
        _pin(s, q)
        q = s.sequence[q].l_next
    q = s.lane[worker.card, LANE_PREFETCH, 0]
    while q >= 0:
        if s.sequence[q].worker == w:
            _pin(s, q)
        q = s.sequence[q].x_next
    return holes


@kernel
def _move(s: State, w: int, q: int) -> int:
    """Move the sequence's blocks out of source groups; returns how many."""
    seq = s.sequence[q]
    worker = s.worker[w]
    moved = 0
    before = -1
    c = seq.head
    while c >= 0:
        after = s.chunk[c].next
        if s.mark[s.chunk[c].group] == SOURCE:
            moved += popcount(s.chunk[c].mask)
            if before >= 0:
                s.chunk[before].next = after
            else:
                seq.head = after
            if after < 0:
                seq.tail = before
            s.chunk[c].next = worker.chunk_free
            worker.chunk_free = c
        else:
            before = c
        c = after
    if moved > 0:
        seq.blocks -= moved
        worker.n_away += seq.blocks == 0 and seq.hosted == 1  # take() counts it back
        take(s, w, q, moved)
    return moved


@kernel
def compact(s: State, w: int, budget_bytes: float) -> None:
    """Free as many whole groups as moving at most ``budget_bytes`` allows and give them back to the card."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.physical == 1:
        return
    budget = int(budget_bytes / worker.block_bytes)
    holes = _mark(s, w)
    end = worker.group_at + worker.top
    for size in range(worker.bpg + 1):
        s.sizes[w, size] = 0
    for g in range(worker.group_at, end):
        if s.mark[g] > 0:
            s.sizes[w, s.mark[g]] += 1
    live = 0
    sources = 0
    for size in range(1, worker.bpg):
        # A source of this size moves ``size`` blocks and takes its own holes out of the destinations.
        here = min(s.sizes[w, size], (budget - live) // size, (holes - live) // worker.bpg)
        s.sizes[w, size] = max(0, here)
        live += size * s.sizes[w, size]
        holes -= (worker.bpg - size) * s.sizes[w, size]
        sources += s.sizes[w, size]
    for g in range(worker.group_at, end):
        size = s.mark[g]
        if 0 < size < worker.bpg and s.sizes[w, size] > 0:
            s.sizes[w, size] -= 1
            s.mark[g] = SOURCE
    if sources == 0:
        return
    # Sources and empty groups are no destinations: out of the lists until the moves are done.
    for g in range(worker.group_at, end):
        if s.mark[g] == SOURCE or s.mark[g] == EMPTY:
            worker.free -= popcount(s.group[g].free)
            set_free(s, w, g, ZERO)
    moved = 0
    for i in range(worker.n_dec):
        moved += _move(s, w, s.request[s.dec_request[w, i]].seq)
    for i in range(worker.n_pre):
        moved += _move(s, w, s.request[s.pre_request[w, i]].seq)
    q = worker.l_head
    while q >= 0:
        moved += _move(s, w, q)
        q = s.sequence[q].l_next
    for g in range(worker.group_at, end):
        if s.mark[g] == SOURCE or s.mark[g] == EMPTY:
            set_free(s, w, g, full_mask(worker.bpg))
            worker.free += worker.bpg
            if s.mark[g] == SOURCE:
                unmap_group(s, w, g)
    size_bytes = moved * worker.block_bytes
    card.stall += 2.0 * size_bytes / (COPY_SHARE * card.hbm_rate)
    worker.compacted_bytes += size_bytes
    worker.e_compacted += size_bytes
    worker.e_groups += sources
    worker.e_pause_us += PAUSE_US + PAUSE_BLOCK_US * moved


@kernel
def fragmentation(s: State, w: int) -> float:
    """f_frag of the worker: entropy of the free runs in its mapped groups over its address space, 0 to 1.

    r_i blocks free in a row, F their sum: -sum p_i ln p_i / ln F with p_i = r_i / F. Runs go on from one mapped
    group into the next at the next address; an unmapped group ends them.
    """
    worker = s.worker[w]
    free_blocks = worker.free
    if free_blocks <= 1:
        return 0.0
    total = 0.0  # sum of r ln r
    run = 0
    one = np.uint64(1)
    for g in range(worker.group_at, worker.group_at + worker.top):
        free = s.group[g].free
        full = full_mask(worker.bpg)
        if free == full:
            run += worker.bpg
            continue
        if free == ZERO:
            if run > 1:
                total += run * np.log(run)
            run = 0
            continue
        at = 0
        while at < worker.bpg:
            rest = free >> np.uint64(at)
            ones = popcount((rest ^ (rest + one)) >> one) if rest != ~ZERO else 64 - at
            run += ones
            at += ones
            if at >= worker.bpg:
                break
            if run > 1:
                total += run * np.log(run)
            run = 0
            rest = free >> np.uint64(at)
            if rest == ZERO:
                break
            at += popcount((rest & (~rest + one)) - one)
    if run > 1:
        total += run * np.log(run)
    # -sum (r/F) ln (r/F) = ln F - sum r ln r / F
    log_free = np.log(float(free_blocks))
    return float(max(0.0, (log_free - total / free_blocks) / log_free))
