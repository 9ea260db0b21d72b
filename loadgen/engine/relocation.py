"""Blocks by address: who holds which, keeping destinations, and moving as a planner outside the engine decided.

``compaction`` plans and moves in one, for the training form. The live node's blocks have bytes: there the plan
travels over the engine protocol, :func:`reserve` keeps its destinations from being taken while somebody copies, and
:func:`relocate` re-points what was copied.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from loadgen.engine.compaction import COPY_SHARE, PAUSE_BLOCK_US, PAUSE_US
from loadgen.engine.jit import entry, kernel
from loadgen.engine.pages import ONE, ZERO, full_mask, new_chunk, set_free, unmap_group
from loadgen.engine.records import I8, State

FREE = -1
UNMAPPED = -2
RESERVED = -3
"""Kept as the destination of a move: no sequence gets it."""


@entry
def owners(s: State, w: int, out: I8, pinned: npt.NDArray[np.uint8]) -> None:
    """Fill ``out`` int64 [groups x bpg] with the sequence that holds each block of the worker (-1 free, -2 not
    mapped, -3 reserved) and ``pinned`` uint8 [groups x bpg] with 1 for blocks of a sequence in a transfer."""
    worker = s.worker[w]
    bpg = worker.bpg
    for g in range(worker.groups):
        state = FREE if s.group[worker.group_at + g].mapped == 1 else UNMAPPED
        aside = s.group[worker.group_at + g].aside
        for k in range(bpg):
            out[g * bpg + k] = RESERVED if aside & (ONE << np.uint64(k)) != ZERO else state
            pinned[g * bpg + k] = 0
    for q in range(worker.seq_at, worker.seq_end):
        seq = s.sequence[q]
        c = seq.head
        while c >= 0:
            at = (s.chunk[c].group - worker.group_at) * bpg
            mask = s.chunk[c].mask
            for k in range(bpg):
                if mask & (ONE << np.uint64(k)) != ZERO:
                    out[at + k] = q
                    pinned[at + k] = 1 if seq.lane >= 0 else 0
            c = s.chunk[c].next


@kernel
def _give_back(s: State, w: int, blocks: I8, count: int) -> None:
    """Make the first ``count`` of ``blocks`` free again, those of them that are reserved."""
    worker = s.worker[w]
    for i in range(count):
        g = worker.group_at + blocks[i] // worker.bpg
        bit = ONE << np.uint64(blocks[i] % worker.bpg)
        if s.group[g].aside & bit != ZERO:
            s.group[g].aside &= ~bit
            set_free(s, w, g, s.group[g].free | bit)
            worker.free += 1
            worker.aside -= 1


@entry
def reserve(s: State, w: int, blocks: I8) -> int:
    """Take free blocks, numbers of the worker inside its address space, out of the free ones; returns -1, or the
    place in ``blocks`` of the first that is not free, with nothing changed."""
    worker = s.worker[w]
    for i in range(len(blocks)):
        g = worker.group_at + blocks[i] // worker.bpg
        bit = ONE << np.uint64(blocks[i] % worker.bpg)
        if s.group[g].free & bit == ZERO:
            _give_back(s, w, blocks, i)
            return i
        set_free(s, w, g, s.group[g].free & ~bit)
        s.group[g].aside |= bit
        worker.free -= 1
        worker.aside += 1
    return -1


@entry
def unreserve(s: State, w: int, blocks: I8) -> None:
    """Make reserved blocks free again; those that are not reserved any more are left as they are."""
    _give_back(s, w, blocks, len(blocks))


@kernel
def _repoint(s: State, w: int, q: int, source: int, destination: int) -> None:
    """Take one block out of the sequence's chunk of group and bit ``source`` and put ``destination`` in."""
    worker = s.worker[w]
    seq = s.sequence[q]
    from_group = worker.group_at + source // worker.bpg
    to_group = worker.group_at + destination // worker.bpg
    bit = ONE << np.uint64(source % worker.bpg)
    to_bit = ONE << np.uint64(destination % worker.bpg)
    before = -1
    c = seq.head
    while not (s.chunk[c].group == from_group and s.chunk[c].mask & bit != ZERO):
        before = c
        c = s.chunk[c].next
    s.chunk[c].mask &= ~bit
    if s.chunk[c].mask == ZERO:
        after = s.chunk[c].next
        if before >= 0:
            s.chunk[before].next = after
        else:
            seq.head = after
        if after < 0:
            seq.tail = before
        s.chunk[c].next = worker.chunk_free
        worker.chunk_free = c
    set_free(s, w, from_group, s.group[from_group].free | bit)
    if s.group[to_group].aside & to_bit != ZERO:
        s.group[to_group].aside &= ~to_bit
        worker.aside -= 1
        worker.free += 1  # the source; the destination was taken out when it was reserved
    else:
        set_free(s, w, to_group, s.group[to_group].free & ~to_bit)
    c = seq.head
    while c >= 0 and s.chunk[c].group != to_group:
        c = s.chunk[c].next
    if c >= 0:
        s.chunk[c].mask |= to_bit
        return
    c = new_chunk(s, w, to_group, to_bit)
    if seq.tail >= 0:
        s.chunk[seq.tail].next = c
    else:
        seq.head = c
    seq.tail = c


@entry
def relocate(s: State, w: int, moves: I8, holders: I8) -> int:
    """Re-point ``moves`` int64 [n, 2] (source, destination block numbers of the worker), each held by sequence
    ``holders[i]``, give emptied groups back, charge the copy; returns the groups freed.

    The caller made sure that sources are held by those sequences and in no transfer, and that destinations are free
    or reserved blocks of mapped groups.
    """
    worker = s.worker[w]
    card = s.card[worker.card]
    for i in range(len(moves)):
        _repoint(s, w, holders[i], moves[i, 0], moves[i, 1])
    freed = 0
    full = full_mask(worker.bpg)
    for i in range(len(moves)):
        g = worker.group_at + moves[i, 0] // worker.bpg
        if s.group[g].mapped == 1 and s.group[g].free == full:
            unmap_group(s, w, g)
            freed += 1
    size_bytes = len(moves) * worker.block_bytes
    card.stall += 2.0 * size_bytes / (COPY_SHARE * card.hbm_rate)
    worker.compacted_bytes += size_bytes
    worker.e_compacted += size_bytes
    worker.e_groups += freed
    worker.e_pause_us += PAUSE_US + PAUSE_BLOCK_US * len(moves)
    return freed
