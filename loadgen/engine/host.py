"""The host tier of a card: its space, who gives way in it, and who is given up."""

from __future__ import annotations

import math

from loadgen.engine.jit import kernel
from loadgen.engine.records import FINISHED, State

SILENT_SEARCH = 256
"""How many sequences are looked at, oldest first, where ended sessions lie about."""
EXPIRE_SEARCH = 32
EXPIRE_FACTOR = 6.0
EXPIRE_LEAST_S = 30.0
EXPIRE_MOST_S = 600.0
"""A host tier gives up who stays away for this many times the expected time, which counts as within the two."""


@kernel
def blocks_of(tokens: int, block_tokens: int) -> int:
    """Blocks that hold ``tokens``."""
    return (tokens + block_tokens - 1) // block_tokens


@kernel
def host_resize(s: State, q: int, blocks: int) -> None:
    """Set the host space of a sequence and keep the tier's list, oldest first."""
    seq = s.sequence[q]
    worker = s.worker[seq.worker]
    card = s.card[worker.card]
    card.host_used += (blocks - seq.host_blocks) * worker.block_bytes
    seq.host_blocks = blocks
    if blocks > 0 and seq.hosted == 0:
        seq.hosted = 1
        card.n_hosted += 1
        worker.n_away += seq.blocks == 0
        seq.h_next = -1
        seq.h_prev = card.h_tail
        if card.h_tail >= 0:
            s.sequence[card.h_tail].h_next = q
        else:
            card.h_head = q
        card.h_tail = q
    elif blocks == 0 and seq.hosted == 1:
        seq.hosted = 0
        card.n_hosted -= 1
        worker.n_away -= seq.blocks == 0
        if seq.h_prev >= 0:
            s.sequence[seq.h_prev].h_next = seq.h_next
        else:
            card.h_head = seq.h_next
        if seq.h_next >= 0:
            s.sequence[seq.h_next].h_prev = seq.h_prev
        else:
            card.h_tail = seq.h_prev


@kernel
def host_truncate(s: State, q: int, tokens: int) -> None:
    """Keep at most ``tokens`` of the host copy."""
    seq = s.sequence[q]
    if seq.host_tokens > tokens:
        seq.host_tokens = tokens
        host_resize(s, q, blocks_of(tokens, s.worker[seq.worker].block_tokens))


@kernel
def host_room(s: State, c: int, size: float, drop_away: bool) -> bool:
    """Make ``size`` bytes free in the host tier: copies of what is on the card go first, then, if
    ``drop_away``, sessions that are nowhere else; never those in a transfer."""
    card = s.card[c]
    if size > card.host_capacity:
        return False
    for only_copies in (True, False):
        if not only_copies and not drop_away:
            break
        q = card.h_head
        looked = 0
        while q >= 0 and card.host_used + size > card.host_capacity:
            seq = s.sequence[q]
            after = seq.h_next
            looked += 1
            if only_copies and card.silent == 1 and looked > SILENT_SEARCH:
                break
            if seq.lane < 0 and (seq.blocks > 0 or not only_copies):
                host_truncate(s, q, 0)
            q = after
    return bool(card.host_used + size <= card.host_capacity)


@kernel
def expire(s: State, c: int, t: float) -> None:
    """Give up copies of sessions that are long overdue, the oldest first."""
    q = s.card[c].h_head
    for _ in range(EXPIRE_SEARCH):
        if q < 0:
            return
        seq = s.sequence[q]
        after = seq.h_next
        expected_s = min(max(seq.due - seq.idle_since, EXPIRE_LEAST_S), EXPIRE_MOST_S)
        gone = math.isinf(seq.due) or t - seq.idle_since > EXPIRE_FACTOR * expected_s
        if gone and seq.lane < 0 and s.request[seq.request].phase >= FINISHED:
            host_truncate(s, q, 0)
        q = after
