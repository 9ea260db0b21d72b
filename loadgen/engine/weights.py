"""Weights that leave the card while nobody asks their model, and come back: vLLM's sleep mode, level 1.

As vLLM 0.32 does it (``device_allocator/cumem.py``): every sleep copies all weights into pinned host memory, for waking
gives that copy up; nothing counts as free before the copy is done; the KV on the card is gone with it; requests that
come meanwhile wait until the worker is awake. Waking takes the room first, then copies back. The link is the card's
one link: loads that a running neighbour waits for go first, then returning weights, prefetches and swap-outs, then
leaving weights.
"""

from __future__ import annotations

import enum
from typing import Final

from loadgen.engine.host import host_room
from loadgen.engine.jit import entry, kernel
from loadgen.engine.link import cancel, fails, pump_lanes
from loadgen.engine.pages import premap, release, unmap_group
from loadgen.engine.records import (
    ASLEEP,
    AWAKE,
    LANE_LOAD,
    LANE_PREFETCH,
    LANE_WRITE,
    LANES_END,
    LEAVING,
    RETURNING,
    State,
)
from loadgen.engine.room import idle_remove


class Answer(enum.IntEnum):
    """What a worker says to an order about its weights; all but the first two change nothing."""

    STARTED = 0
    ALREADY = 1
    """They are there, or on their way."""
    BUSY = 2
    """It has requests, or it starts."""
    OTHER_WAY = 3
    """A copy the other way is under way."""
    HOST_FULL = 4
    NO_ROOM = 5
    """On the card: somebody has mapped it."""


STARTED: Final = int(Answer.STARTED)
ALREADY: Final = int(Answer.ALREADY)
BUSY: Final = int(Answer.BUSY)
OTHER_WAY: Final = int(Answer.OTHER_WAY)
HOST_FULL: Final = int(Answer.HOST_FULL)
NO_ROOM: Final = int(Answer.NO_ROOM)


@entry
def lacking_bytes(s: State, w: int) -> float:
    """What neighbours have to unmap before the worker's weights, and a pool that it maps at its start, fit."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.asleep != ASLEEP:
        return 0.0
    needed = worker.weights + worker.premapped * worker.group_bytes
    return float(max(0.0, card.mapped_bytes + needed - card.capacity))


@kernel
def _kept_bytes(s: State, c: int, drops: bool) -> float:
    """Host space that nobody gives up for weights: asked before anybody is dropped in vain."""
    card = s.card[c]
    kept = card.host_used
    q = card.h_head
    while q >= 0:
        seq = s.sequence[q]
        if seq.lane < 0 and (drops or seq.blocks > 0):
            kept -= seq.host_blocks * s.worker[seq.worker].block_bytes
        q = seq.h_next
    return float(kept)


@entry
def send_off(s: State, w: int) -> int:
    """Start copying the worker's weights to the host; an ``Answer``."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.asleep != AWAKE:
        return OTHER_WAY if worker.asleep == RETURNING else ALREADY
    if worker.n_dec + worker.n_pre + worker.q_len > 0 or card.substeps * card.substep < worker.starting_until:
        return BUSY
    drops = card.silent == 1  # as a swap-out has it
    if _kept_bytes(s, worker.card, drops) + worker.weights > card.host_capacity:
        return HOST_FULL
    if not host_room(s, worker.card, worker.weights, drops):
        return HOST_FULL
    card.host_used += worker.weights
    card.asleep += 1
    worker.asleep = LEAVING
    worker.w_left = worker.weights
    return STARTED


@entry
def call_back(s: State, w: int) -> int:
    """Take the room for the worker's weights and start copying them back; an ``Answer``. Without the guard nobody
    asks for room."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.asleep != ASLEEP:
        return OTHER_WAY if worker.asleep == LEAVING else ALREADY
    if card.guard == 1 and lacking_bytes(s, w) > 0.0:
        return NO_ROOM
    card.weights += worker.weights
    card.capacity -= worker.weights
    card.last_mapper = w
    worker.asleep = RETURNING
    worker.w_left = worker.weights
    premap(s, w)
    return STARTED


@kernel
def _gone(s: State, w: int) -> None:
    """The copy is complete: weights and KV leave the card."""
    worker = s.worker[w]
    card = s.card[worker.card]
    for q in range(worker.seq_at, worker.seq_end):
        seq = s.sequence[q]
        if seq.blocks > 0:
            cancel(s, q)
            if seq.idle == 1:
                idle_remove(s, w, q)
            release(s, w, q)
    for g in range(worker.group_at, worker.group_at + worker.groups):
        if s.group[g].mapped == 1:
            unmap_group(s, w, g)
    worker.asleep = ASLEEP
    card.weights -= worker.weights
    card.capacity += worker.weights


@kernel
def _back(s: State, w: int) -> None:
    """All of the weights are on the card; the host's copy is given up."""
    worker = s.worker[w]
    card = s.card[worker.card]
    card.host_used -= worker.weights
    card.asleep -= 1
    worker.asleep = AWAKE
    worker.w_left = 0.0
    worker.quiet_since = card.substeps * card.substep


@kernel
def restarted(s: State, w: int) -> None:
    """A worker that crashed starts with its weights on the card, whichever way they were going."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.asleep == ASLEEP:
        card.weights += worker.weights
        card.capacity -= worker.weights
    if worker.asleep != AWAKE:
        _back(s, w)


@kernel
def _carry(s: State, c: int, budget: float, way: int) -> float:
    """Move weights that go ``way`` with at most ``budget`` bytes; returns what is left of it."""
    card = s.card[c]
    for w in range(card.first, card.first + card.workers):
        worker = s.worker[w]
        if worker.asleep == way and budget > 0.0:
            moved = min(budget, worker.w_left)
            worker.w_left -= moved
            budget -= moved
            card.moved += moved
            if worker.w_left <= 0.0:
                if fails(s, c):
                    worker.w_left = worker.weights
                elif way == LEAVING:
                    _gone(s, w)
                else:
                    _back(s, w)
    return budget


@kernel
def pump(s: State, c: int, dt: float) -> None:
    """Move what the link can in ``dt`` seconds."""
    card = s.card[c]
    budget = card.link * dt
    if card.asleep == 0:
        pump_lanes(s, c, budget, LANE_LOAD, LANES_END)
        return
    budget = pump_lanes(s, c, budget, LANE_LOAD, LANE_PREFETCH)
    budget = _carry(s, c, budget, RETURNING)
    budget = pump_lanes(s, c, budget, LANE_PREFETCH, LANE_WRITE)
    budget = _carry(s, c, budget, LEAVING)
    pump_lanes(s, c, budget, LANE_WRITE, LANES_END)
