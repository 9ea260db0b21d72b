"""Idle sessions on the card, the hard quota, and the guard that finds room or says no (DESIGN section 4.1).

The order of giving way: free blocks in mapped groups; a new group if the card's account allows it; idle KV with a copy
in the host tier; the least recently used idle KV; a neighbour's empty group, which costs both engines an unmapping and
two mappings; where the worker is below its own share, idle KV of a neighbour above his. Preempting is the batch's
business, because only it knows who runs.
"""

from __future__ import annotations

import math

from loadgen.engine.jit import kernel
from loadgen.engine.pages import empty_group, map_group, release, unmap_group
from loadgen.engine.records import WAITING, State

COPY_SEARCH = 32
"""Among so many of the least recently used, one with a copy is preferred, and one that has ended before all."""
FOREVER_S = 3600.0
"""Nobody expects anything beyond this."""


@kernel
def idle_push(s: State, w: int, q: int) -> None:
    """The sequence is between turns: most recently used of the worker's idle ones."""
    worker = s.worker[w]
    seq = s.sequence[q]
    seq.idle = 1
    seq.l_next = -1
    seq.l_prev = worker.l_tail
    if worker.l_tail >= 0:
        s.sequence[worker.l_tail].l_next = q
    else:
        worker.l_head = q
    worker.l_tail = q
    worker.n_idle += 1
    worker.idle_blocks += seq.blocks


@kernel
def idle_remove(s: State, w: int, q: int) -> None:
    """The sequence runs again or leaves the card."""
    worker = s.worker[w]
    seq = s.sequence[q]
    seq.idle = 0
    if seq.l_prev >= 0:
        s.sequence[seq.l_prev].l_next = seq.l_next
    else:
        worker.l_head = seq.l_next
    if seq.l_next >= 0:
        s.sequence[seq.l_next].l_prev = seq.l_prev
    else:
        worker.l_tail = seq.l_prev
    worker.n_idle -= 1
    worker.idle_blocks -= seq.blocks


@kernel
def return_in_s(s: State, q: int, t: float) -> float:
    """Expected seconds until the session's next turn; one that is overdue is expected to be as late again."""
    return float(min(abs(s.sequence[q].due - t), FOREVER_S))


@kernel
def drop_idle(s: State, w: int) -> bool:
    """Drop one idle sequence from the card; False when there is none that may go.

    Copies stay in the host tier. Sequences in a transfer are pinned. Those whose next turn waits go last.
    """
    chosen = -1
    fallback = -1
    seen = 0
    q = s.worker[w].l_head
    while q >= 0:
        seq = s.sequence[q]
        if seq.lane < 0:
            if s.request[seq.request].phase == WAITING:
                if fallback < 0:
                    fallback = q
            else:
                if math.isinf(seq.due):
                    chosen = q
                    break
                if chosen < 0:
                    chosen = q
                if seq.host_tokens >= seq.tokens:
                    chosen = q
                    break
                seen += 1
                if seen >= COPY_SEARCH:
                    break
        q = seq.l_next
    if chosen < 0:
        chosen = fallback
    if chosen < 0:
        return False
    idle_remove(s, w, chosen)
    release(s, w, chosen)
    return True


@kernel
def hard_groups(s: State, w: int) -> int:
    """Hard quota in groups: card capacity - neighbours' max(mapped, floor) - reserve, at most what was commanded;
    fixed when vLLM-like."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.physical == 1:
        return int(worker.premapped)
    if card.guard == 0:
        return int(worker.quota_groups)
    room = card.capacity
    for n in range(card.first, card.first + card.workers):
        if n != w:
            other = s.worker[n]
            room -= max(other.mapped * other.group_bytes, other.floor_blocks * other.block_bytes)
    if card.workers > 1:
        room -= card.reserve
    return max(0, min(int(worker.quota_groups), int(room / worker.group_bytes)))


@kernel
def over_quota_blocks(s: State, w: int) -> int:
    """Free blocks that admission leaves alone. Beside weights that are off the card, a commanded quota below what is
    mapped is an order to shrink, for they are to come back: room that ends up in new requests never becomes theirs."""
    worker = s.worker[w]
    if s.card[worker.card].asleep == 0 or worker.physical == 1:
        return 0
    return int(max(0, worker.mapped - worker.quota_groups) * worker.bpg)


@kernel
def _may_map(s: State, w: int) -> bool:
    """The guard's question: does everything fit the HBM with one more group mapped?"""
    worker = s.worker[w]
    card = s.card[worker.card]
    return bool(card.guard == 0 or card.mapped_bytes + worker.group_bytes <= card.capacity)


@kernel
def _neighbour_gives(s: State, w: int) -> bool:
    """Unmap one empty group of a neighbour; False when none has one to give.

    A neighbour below its share keeps a few, or the two would take the same groups from each other all the time; below
    its floor its groups are no room for anybody else.
    """
    worker = s.worker[w]
    card = s.card[worker.card]
    for n in range(card.first, card.first + card.workers):
        other = s.worker[n]
        if n != w and other.physical == 0:
            kept = 0 if other.mapped * other.group_bytes > other.q0 else other.spare
            above = other.mapped * other.group_bytes > other.floor_blocks * other.block_bytes
            g = empty_group(s, n) if above and other.free >= kept + other.bpg else -1
            if g >= 0:
                unmap_group(s, n, g)
                worker.stall += s.worker[n].unmap_s + worker.guard_s
                return True
    return False


@kernel
def _neighbour_drops(s: State, w: int) -> bool:
    """Drop idle KV of a neighbour above his share for a worker below its own."""
    worker = s.worker[w]
    card = s.card[worker.card]
    if worker.physical == 1 or worker.mapped >= worker.quota_groups or worker.mapped * worker.group_bytes >= worker.q0:
        return False
    for n in range(card.first, card.first + card.workers):
        other = s.worker[n]
        if n != w and other.mapped * other.group_bytes > other.q0 and drop_idle(s, n):
            return True
    return False


@kernel
def make_room(s: State, w: int, need: int) -> bool:
    """Bring the worker's free blocks to ``need`` without touching a running request; False when it cannot."""
    worker = s.worker[w]
    while worker.free < need:
        maps = worker.physical == 0 and worker.mapped < worker.quota_groups
        if (maps and _map_free(s, w)) or drop_idle(s, w):
            continue
        if not (maps and _map_neighbours(s, w)) and not _neighbour_drops(s, w):
            return False
    return True


@kernel
def _map_free(s: State, w: int) -> bool:
    """Map a group that the account has left."""
    return s.worker[w].mapped < hard_groups(s, w) and _may_map(s, w) and map_group(s, w)


@kernel
def _map_neighbours(s: State, w: int) -> bool:
    """Map a group, taking neighbours' empty ones."""
    while s.card[s.worker[w].card].guard == 1 and _neighbour_gives(s, w):
        if _map_free(s, w):
            return True
    return False


@kernel
def mappable_groups(s: State, w: int) -> int:
    """Groups the worker could map now without anybody giving way."""
    worker = s.worker[w]
    if worker.physical == 1:
        return 0
    card = s.card[worker.card]
    room = int((card.capacity - card.mapped_bytes) / worker.group_bytes)
    return max(0, min(room, hard_groups(s, w) - int(worker.mapped)))
