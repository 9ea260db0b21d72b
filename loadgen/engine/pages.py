"""KV memory of one worker: page groups, the blocks in them, and the chunks by which sequences hold blocks.

A group's ``free`` mask is the whole truth about what may be taken; ``open`` has a bit per group with a free one.
Allocation is page-aware by taking the lowest address (DESIGN section 5), or goes where blocks were freed last, as a
LIFO free list does. A sequence that grows takes from the group of its last block first.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.engine.jit import entry, kernel
from loadgen.engine.records import State

ZERO: Final = np.uint64(0)
ONE: Final = np.uint64(1)
ALL: Final = np.uint64(0xFFFFFFFFFFFFFFFF)
_M1: Final = np.uint64(0x5555555555555555)
_M2: Final = np.uint64(0x3333333333333333)
_M4: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_H01: Final = np.uint64(0x0101010101010101)
_S1: Final = np.uint64(1)
_S2: Final = np.uint64(2)
_S4: Final = np.uint64(4)
_S56: Final = np.uint64(56)


@kernel
def popcount(x: np.uint64) -> int:
    """Set bits of a uint64."""
    x = x - ((x >> _S1) & _M1)
    x = (x & _M2) + ((x >> _S2) & _M2)
    x = (x + (x >> _S4)) & _M4
    return np.int64((x * _H01) >> _S56)  # type: ignore[return-value]


@kernel
def lowest_bits(mask: np.uint64, count: int) -> np.uint64:
    """The ``count`` lowest set bits of a mask that has at least as many."""
    rest = mask
    for _ in range(count):
        rest &= rest - ONE
    return mask ^ rest


@kernel
def full_mask(blocks: int) -> np.uint64:
    """``blocks`` low bits, 1 to 64."""
    return ALL if blocks >= 64 else (ONE << np.uint64(blocks)) - ONE


@kernel
def set_free(s: State, w: int, g: int, free: np.uint64) -> None:
    """Give group ``g`` a new free mask."""
    if (s.group[g].free == ZERO) != (free == ZERO):
        local = g - s.worker[w].group_at
        s.open[w, local >> 6] ^= ONE << np.uint64(local & 63)
    s.group[g].free = free


@kernel
def open_group(s: State, w: int) -> int:
    """A group with a free block: the lowest, or the one freed into last; the worker has one."""
    worker = s.worker[w]
    if worker.page_aware == 0 and s.group[worker.freed_last].free != ZERO:
        return int(worker.freed_last)
    word = 0
    while s.open[w, word] == ZERO:
        word += 1
    bits = s.open[w, word]
    return int(worker.group_at + (word << 6) + popcount((bits & (~bits + ONE)) - ONE))


@kernel
def new_chunk(s: State, w: int, g: int, mask: np.uint64) -> int:
    """A chunk of the worker's pool; there are as many as blocks, so it never runs out."""
    worker = s.worker[w]
    c = worker.chunk_free
    if c >= 0:
        worker.chunk_free = s.chunk[c].next
    else:
        c = worker.chunk_new
        worker.chunk_new = c + 1
    chunk = s.chunk[c]
    chunk.group = g
    chunk.mask = mask
    chunk.next = -1
    return int(c)


@kernel
def take(s: State, w: int, q: int, count: int) -> None:
    """Give sequence ``q`` ``count`` of the worker's free blocks; the caller made sure that they are there."""
    worker = s.worker[w]
    seq = s.sequence[q]
    worker.free -= count
    if seq.blocks == 0 and count > 0 and seq.hosted == 1:
        worker.n_away -= 1
    seq.blocks += count
    while count > 0:
        c = seq.tail
        g = -1
        if c >= 0 and s.group[s.chunk[c].group].free != ZERO:
            g = s.chunk[c].group
        else:
            c = -1
            g = open_group(s, w)
        free = s.group[g].free
        here = popcount(free)
        bits = free
        if here > count:
            bits = lowest_bits(free, count)
            here = count
        set_free(s, w, g, free & ~bits)
        count -= here
        if c >= 0:
            s.chunk[c].mask |= bits
            continue
        c = new_chunk(s, w, g, bits)
        if seq.tail >= 0:
            s.chunk[seq.tail].next = c
        else:
            seq.head = c
        seq.tail = c


@kernel
def release(s: State, w: int, q: int) -> None:
    """Free all blocks of sequence ``q`` on the card."""
    worker = s.worker[w]
    seq = s.sequence[q]
    c = seq.head
    while c >= 0:
        chunk = s.chunk[c]
        set_free(s, w, chunk.group, s.group[chunk.group].free | chunk.mask)
        worker.freed_last = chunk.group
        after = chunk.next
        chunk.next = worker.chunk_free
        worker.chunk_free = c
        c = after
    worker.free += seq.blocks
    if seq.blocks > 0 and seq.hosted == 1:
        worker.n_away += 1
    seq.blocks = 0
    seq.tokens = 0
    seq.head = -1
    seq.tail = -1


@kernel
def map_group(s: State, w: int) -> bool:
    """Map the lowest unmapped group; False when the address space is used up. Asks no guard.

    A group mapped ahead in the background costs nothing now; beyond those the engine waits for the account's owner
    and for the driver.
    """
    worker = s.worker[w]
    local = worker.hint
    while local < worker.groups and s.group[worker.group_at + local].mapped == 1:
        local += 1
    worker.hint = local
    if local >= worker.groups:
        return False
    worker.top = max(worker.top, local + 1)
    g = worker.group_at + local
    s.group[g].mapped = 1
    set_free(s, w, g, full_mask(worker.bpg))
    worker.mapped += 1
    worker.free += worker.bpg
    card = s.card[worker.card]
    card.mapped_bytes += worker.group_bytes
    card.last_mapper = w
    if worker.credit >= worker.map_s:
        worker.credit -= worker.map_s
    else:
        worker.stall += worker.map_s - worker.credit + worker.guard_s
        worker.credit = 0.0
    return True


@kernel
def unmap_group(s: State, w: int, g: int) -> None:
    """Give back a group none of whose blocks is held by a sequence; blocks kept for a move are gone with it.

    The driver does it in the background, in the time that it would else map ahead in.
    """
    worker = s.worker[w]
    worker.credit = max(worker.credit - worker.unmap_s, -worker.premap_s)
    kept = popcount(s.group[g].aside)
    worker.free -= worker.bpg - kept
    worker.aside -= kept
    s.group[g].aside = ZERO
    set_free(s, w, g, ZERO)
    s.group[g].mapped = 0
    worker.mapped -= 1
    worker.hint = min(worker.hint, g - worker.group_at)
    s.card[worker.card].mapped_bytes -= worker.group_bytes


@kernel
def empty_group(s: State, w: int) -> int:
    """The highest mapped group whose blocks are all free, or -1."""
    worker = s.worker[w]
    full = full_mask(worker.bpg)
    if worker.free < worker.bpg:
        return -1
    for g in range(worker.group_at + worker.top - 1, worker.group_at - 1, -1):
        if s.group[g].free == full:
            return int(g)
    return -1


@entry
def premap(s: State, w: int) -> None:
    """An engine maps its share of the card while it starts, as vLLM maps its whole pool; the check is armed by then."""
    worker = s.worker[w]
    card = s.card[worker.card]
    while worker.mapped < worker.premapped and card.mapped_bytes + worker.group_bytes <= card.capacity:
        if not map_group(s, w):
            break
    worker.stall = 0.0
