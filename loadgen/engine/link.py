"""Host tier and link of a card: copies that take time before they free or bring anything.

One link, both directions share its bandwidth, four lanes served in order: loads that an admitted request waits
for, prefetches, swap-outs, write-through copies. Host space is taken when a copy starts; the card's blocks are
free only when it is done.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.engine.host import SILENT_SEARCH, blocks_of, host_resize, host_room
from loadgen.engine.jit import kernel
from loadgen.engine.pages import release, take
from loadgen.engine.records import (
    AWAKE,
    FINISHED,
    LANE_LOAD,
    LANE_PREFETCH,
    LANE_SWAP,
    LANE_WRITE,
    LOADING,
    PREFILL,
    State,
)
from loadgen.engine.room import idle_push, idle_remove, make_room, mappable_groups

_MIX_1: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_2: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_3: Final = np.uint64(0x94D049BB133111EB)
_S11: Final = np.uint64(11)
_S27: Final = np.uint64(27)
_S30: Final = np.uint64(30)
_S31: Final = np.uint64(31)
PREFETCH_SEARCH = 64
PREFETCH_MARGIN_S = 1.0
PREFETCH_FREE_SHARE = 0.05
"""Share of Q0 that a prefetch leaves free."""


@kernel
def lane_push(s: State, q: int, lane: int, tokens: int, size: float) -> None:
    """Queue the transfer of ``size`` bytes that brings the other side to ``tokens``."""
    seq = s.sequence[q]
    c = s.worker[seq.worker].card
    seq.lane = lane
    seq.x_tokens = tokens
    seq.x_left = size
    seq.x_size = size
    seq.x_next = -1
    seq.x_prev = s.lane[c, lane, 1]
    if seq.x_prev >= 0:
        s.sequence[seq.x_prev].x_next = q
    else:
        s.lane[c, lane, 0] = q
    s.lane[c, lane, 1] = q


@kernel
def lane_remove(s: State, q: int) -> None:
    """Take a sequence out of its lane."""
    seq = s.sequence[q]
    c = s.worker[seq.worker].card
    if seq.x_prev >= 0:
        s.sequence[seq.x_prev].x_next = seq.x_next
    else:
        s.lane[c, seq.lane, 0] = seq.x_next
    if seq.x_next >= 0:
        s.sequence[seq.x_next].x_prev = seq.x_prev
    else:
        s.lane[c, seq.lane, 1] = seq.x_prev
    seq.lane = -1


@kernel
def start_copy(s: State, q: int, lane: int) -> bool:
    """Start copying what the host tier lacks of the sequence's tokens; False when the tier is full.

    A swap-out (``LANE_SWAP``) whose copy is complete already frees the card at once.
    """
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    blocks = blocks_of(seq.tokens, worker.block_tokens)
    more = blocks - seq.host_blocks
    if seq.host_tokens >= seq.tokens:
        if lane == LANE_SWAP:
            leave_card(s, q)
        return True
    size = max(more, 1) * worker.block_bytes
    seq.lane = lane  # pinned while the tier makes room
    # A tier that cannot know who has ended is a cache: the oldest makes room.
    drops = lane == LANE_WRITE or s.card[worker.card].silent == 1
    fits = host_room(s, worker.card, max(more, 0) * worker.block_bytes, drops)
    seq.lane = -1
    if not fits:
        return False
    host_resize(s, q, max(blocks, seq.host_blocks))
    lane_push(s, q, lane, seq.tokens, size)
    return True


@kernel
def cancel(s: State, q: int) -> None:
    """Call a transfer off; what was there before stays."""
    seq = s.sequence[q]
    if seq.lane < 0:
        return
    outward = seq.lane >= LANE_SWAP
    lane_remove(s, q)
    if outward:
        host_resize(s, q, blocks_of(seq.host_tokens, s.worker[seq.worker].block_tokens))


@kernel
def leave_card(s: State, q: int) -> None:
    """The session's KV is in the host tier, or it has ended: its blocks on the card are free."""
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    worker.e_evicted += seq.blocks * worker.block_bytes
    if seq.idle == 1:
        idle_remove(s, seq.worker, q)
    release(s, seq.worker, q)


@kernel
def _complete(s: State, q: int, size: float) -> None:
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    lane = seq.lane
    lane_remove(s, q)
    if lane >= LANE_SWAP:
        seq.host_tokens = seq.x_tokens
        seq.copies += 1
        worker.evicted_bytes += size
        if lane == LANE_SWAP:
            leave_card(s, q)
        return
    seq.tokens = seq.x_tokens
    seq.loads += 1
    worker.loaded_bytes += size
    worker.e_loaded += size
    if lane == LANE_PREFETCH:
        idle_push(s, seq.worker, q)
        return
    request = s.request[seq.request]
    if request.phase == LOADING:
        request.phase = PREFILL
        request.computed = float(min(seq.tokens, request.target - 1))


@kernel
def fails(s: State, c: int) -> bool:
    """Whether the transfer that just ended has to be done again: a fixed share, drawn by a hash of its number."""
    card = s.card[c]
    card.transfers += 1
    if card.failures <= 0.0:
        return False
    x = np.uint64(card.transfers) * _MIX_1 + np.uint64(c + 1) * _MIX_2
    x = (x ^ (x >> _S30)) * _MIX_2
    x = (x ^ (x >> _S27)) * _MIX_3
    x ^= x >> _S31
    if float(x >> _S11) * 2.0**-53 >= card.failures:
        return False
    card.failed += 1
    return True


@kernel
def pump_lanes(s: State, c: int, budget: float, first: int, last: int) -> float:
    """Move at most ``budget`` bytes of the lanes ``first`` to ``last`` - 1; returns what is left of it."""
    card = s.card[c]
    for lane in range(first, last):
        while budget > 0.0:
            q = s.lane[c, lane, 0]
            if q < 0:
                break
            seq = s.sequence[q]
            moved = min(budget, seq.x_left)
            seq.x_left -= moved
            budget -= moved
            card.moved += moved
            if seq.x_left > 0.0:
                break
            if fails(s, c):
                lane_remove(s, q)
                lane_push(s, q, lane, seq.x_tokens, seq.x_size)
                continue
            tokens = seq.x_tokens
            worker = s.worker[seq.worker]
            held = seq.host_tokens if lane >= LANE_SWAP else 0
            _complete(s, q, max(tokens - held, 1) * worker.kv_token_bytes)
    return budget


@kernel
def backlog_bytes(s: State, c: int, lane: int) -> float:
    """Bytes queued in one lane."""
    total = 0.0
    q = s.lane[c, lane, 0]
    while q >= 0:
        total += s.sequence[q].x_left
        q = s.sequence[q].x_next
    return total


@kernel
def may_return(s: State, q: int) -> bool:
    """Whether a session could be brought back ahead of its next turn: it is only in the host tier, and there is
    memory for it that nobody needs."""
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    away = seq.blocks == 0 and seq.lane < 0 and seq.host_tokens > 0 and s.request[seq.request].phase >= FINISHED
    if not away or worker.q_len > 0 or worker.asleep != AWAKE:
        return False
    spare = worker.free + mappable_groups(s, seq.worker) * worker.bpg
    spare -= int(PREFETCH_FREE_SHARE * worker.q0 / worker.block_bytes)
    return bool(blocks_of(seq.host_tokens, worker.block_tokens) <= spare)


@kernel
def bring_back(s: State, q: int) -> float:
    """Start loading a session that :func:`may_return`; returns the bytes on their way, 0 when room was not found."""
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    need = blocks_of(seq.host_tokens, worker.block_tokens)
    if not make_room(s, seq.worker, need):
        return 0.0
    size = float(seq.host_tokens * worker.kv_token_bytes)
    take(s, seq.worker, q, need)
    lane_push(s, q, LANE_PREFETCH, seq.host_tokens, size)
    return size


@kernel
def prefetch(s: State, c: int, t: float) -> None:
    """Bring sessions back that are expected soon: only over an idle link into memory that nobody needs."""
    card = s.card[c]
    if s.lane[c, LANE_LOAD, 0] >= 0 or s.lane[c, LANE_PREFETCH, 0] >= 0:
        return
    q = card.h_head
    for _ in range(SILENT_SEARCH if card.silent == 1 else PREFETCH_SEARCH):
        if q < 0:
            return
        seq = s.sequence[q]
        worker = s.worker[seq.worker]
        lead = seq.host_tokens * worker.kv_token_bytes / card.link + PREFETCH_MARGIN_S
        if worker.prefetch == 1 and seq.due - lead <= t <= seq.due + lead and may_return(s, q):
            bring_back(s, q)
            return
        q = seq.h_next
