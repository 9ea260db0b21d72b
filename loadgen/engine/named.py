"""Sessions by name: what a planner outside the engine chose to swap out or to bring back.

The engine's own order (``eviction.evict``, ``link.prefetch``) is for those who send bytes. A named session is not asked
how long it has been idle or when it is due: whoever chose it weighed that. What would harm somebody is refused here.
"""

from __future__ import annotations

from loadgen.engine.eviction import may_leave
from loadgen.engine.jit import entry
from loadgen.engine.link import bring_back, may_return, start_copy
from loadgen.engine.records import F8, I8, LANE_SWAP, State


@entry
def evict_named(s: State, w: int, sequences: I8, started: F8) -> None:
    """Start swapping the worker's idle ``sequences`` out; ``started`` float64 [n] is filled with the bytes of each,
    0 where it may not go or the host tier is full. One whose copy is complete leaves at once."""
    worker = s.worker[w]
    for i in range(len(sequences)):
        seq = s.sequence[sequences[i]]
        started[i] = 0.0
        if seq.worker == w and seq.idle == 1 and may_leave(s, sequences[i]):
            held = float(seq.blocks * worker.block_bytes)
            if start_copy(s, sequences[i], LANE_SWAP):
                worker.e_started += held
                started[i] = held


@entry
def prefetch_named(s: State, w: int, sequences: I8, started: F8) -> None:
    """Start bringing the worker's ``sequences`` back; ``started`` float64 [n] is filled with the bytes of each, 0
    where it may not come."""
    for i in range(len(sequences)):
        started[i] = 0.0
        if s.sequence[sequences[i]].worker == w and may_return(s, sequences[i]):
            started[i] = bring_back(s, sequences[i])
