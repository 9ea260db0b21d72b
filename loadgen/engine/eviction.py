"""Which idle sessions leave the card, or are copied ahead of need: by expected absence and size."""

from __future__ import annotations

import math

from loadgen.engine.jit import kernel
from loadgen.engine.link import PREFETCH_MARGIN_S, leave_card, start_copy
from loadgen.engine.records import LANE_SWAP, WAITING, State
from loadgen.engine.room import return_in_s


@kernel
def may_leave(s: State, q: int) -> bool:
    """Whether an idle session may be swapped out: its class allows it, no transfer has it, no turn of it waits."""
    seq = s.sequence[q]
    return bool(seq.lane < 0 and s.swap_allowed[seq.klass] == 1 and s.request[seq.request].phase != WAITING)


@kernel
def _sift(s: State, at: int, i: int, count: int) -> None:
    """Let the entry at place ``i`` of a heap of ``count`` sink."""
    q = s.pick[at + i]
    score = s.score[at + i]
    while True:
        child = 2 * i + 1
        if child >= count:
            break
        if child + 1 < count and s.score[at + child + 1] > s.score[at + child]:
            child += 1
        if s.score[at + child] <= score:
            break
        s.pick[at + i] = s.pick[at + child]
        s.score[at + i] = s.score[at + child]
        i = child
    s.pick[at + i] = q
    s.score[at + i] = score


@kernel
def _pop_best(s: State, at: int, count: int) -> int:
    """Take the best off a heap of ``count`` entries."""
    best = int(s.pick[at])
    s.pick[at] = s.pick[at + count - 1]
    s.score[at] = s.score[at + count - 1]
    _sift(s, at, 0, count - 1)
    return best


@kernel
def _candidates(s: State, w: int, t: float, lane: int) -> int:
    """Make a heap of the idle sequences that may leave, the best on top; returns how many."""
    worker = s.worker[w]
    at = worker.seq_at
    count = 0
    q = worker.l_head
    while q >= 0:
        seq = s.sequence[q]
        if t - seq.idle_since >= s.idle_before[seq.klass] and may_leave(s, q):
            away_s = return_in_s(s, q, t)
            trip_s = 2.0 * seq.blocks * worker.block_bytes / s.card[worker.card].link + PREFETCH_MARGIN_S
            wanted = lane == LANE_SWAP or (seq.host_tokens < seq.tokens and not math.isinf(seq.due))
            if wanted and away_s > trip_s:
                s.pick[at + count] = q
                s.score[at + count] = away_s * seq.blocks
                count += 1
        q = seq.l_next
    for i in range(count // 2 - 1, -1, -1):
        _sift(s, at, i, count)
    return count


@kernel
def evict(s: State, w: int, size: float, t: float, lane: int) -> None:
    """Start swapping idle sessions out (``LANE_SWAP``), or only copying them (``LANE_WRITE``), until ``size`` bytes
    are on their way or none may go. One that is known to have ended leaves at once.

    The victim is the one with the greatest expected absence x size. Classes that forbid swapping, sessions whose
    next turn waits or is expected before they could be out and back, and those idle for too short are left alone;
    a full host tier ends it.
    """
    worker = s.worker[w]
    count = _candidates(s, w, t, lane)
    while size > 0.0 and count > 0:
        q = _pop_best(s, worker.seq_at, count)
        count -= 1
        seq = s.sequence[q]
        held = seq.blocks * worker.block_bytes
        size -= held
        if lane == LANE_SWAP and math.isinf(seq.due):
            worker.e_started += held
            leave_card(s, q)
            continue
        if not start_copy(s, q, lane):
            return
        if lane == LANE_SWAP:
            worker.e_started += held
