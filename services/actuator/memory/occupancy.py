"""What a pool looks like from outside: blocks per group, and how scattered its free memory is."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import Blocks

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Occupancy:
    """Per group, arrays [groups]; in a mapped group live + stuck + free = blocks per group.

    ``live`` int64: blocks that relocation may take. ``stuck`` int64: blocks that it may not (pinned, being written,
    in transfer, in their grace period). ``free`` int64: free blocks, 0 where not mapped. ``mapped`` bool.
    ``protected`` bool: gathered by a waiter, neither to be filled nor given back.
    """

    live: I8
    stuck: I8
    free: I8
    mapped: Bool
    protected: Bool


def occupancy(blocks: Blocks) -> Occupancy:
    """Occupancy of every group now."""
    per_group = blocks.geometry.blocks_per_group
    live = blocks.movable_mask().reshape(-1, per_group).sum(axis=1, dtype=np.int64)
    free = np.where(blocks.mapped, blocks.free_in_group, 0)
    stuck = np.where(blocks.mapped, per_group - free - live, 0)
    return Occupancy(live, stuck, free, blocks.mapped.copy(), blocks.protected >= 0)


def fragmentation(free: Bool) -> float:
    """f_frag of DESIGN section 3: entropy of the runs of a free mask, bool [blocks], 0 to 1.

    Runs r_i, F = sum r_i, p_i = r_i / F: H = -sum p_i ln p_i / ln F; 0 for F <= 1 and for one run, 1 when every run
    is a single block. A run goes on from a mapped group into the next.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], free, [False])).view(np.int8)))
    runs = (edges[1::2] - edges[::2]).astype(np.float64)
    total = float(runs.sum())
    if total <= 1.0 or len(runs) == 1:
        return 0.0
    entropy = math.log(total) - float((runs * np.log(runs)).sum()) / total
    return min(1.0, max(0.0, entropy / math.log(total)))
