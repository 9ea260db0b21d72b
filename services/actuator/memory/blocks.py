"""The arrays of a pool: what each block is, whose it is, and how full each page group is.

Every change of a block's state goes through :class:`Blocks`, which keeps the counts per group; the rules of who may
change what are with its callers. NumPy only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.states import BlockState

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
Bool = NDArray[np.bool_]

NO_OWNER: Final = -1
"""In ``Blocks.owner``: the block is nobody's. Owners are 0 or more."""
NO_CELL: Final = -1
"""In ``Blocks.cell``: the block is in no table."""
NO_WAITER: Final = -1
"""In ``Blocks.protected``: the group is anybody's."""
FREE: Final = int(BlockState.FREE)


class Blocks:
    """One worker's blocks. Arrays [blocks]: ``state`` uint8 BlockState; ``resting`` uint8, the state that a block
    under relocation goes back to; ``owner`` int64; ``cell`` int64, its place in ``Tables.cells``; ``epoch`` uint32,
    one more each time content or owner change; ``pinned`` and ``writing`` bool. Arrays [groups]: ``mapped`` bool;
    ``protected`` int64, the waiter who gathered it; ``free_in_group`` and ``pinned_in_group`` int64 counts.
    A block of an unmapped group is FREE.
    """

    def __init__(self, geometry: Geometry) -> None:
        count, groups = geometry.blocks, geometry.groups
        self.geometry = geometry
        self.state: U1 = np.zeros(count, np.uint8)
        self.resting: U1 = np.zeros(count, np.uint8)
        self.owner: I8 = np.full(count, NO_OWNER, np.int64)
        self.cell: I8 = np.full(count, NO_CELL, np.int64)
        self.epoch: NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.pinned: Bool = np.zeros(count, np.bool_)
        self.writing: Bool = np.zeros(count, np.bool_)
        self.mapped: Bool = np.zeros(groups, np.bool_)
        self.protected: I8 = np.full(groups, NO_WAITER, np.int64)
        self.free_in_group: I8 = np.full(groups, geometry.blocks_per_group, np.int64)
        self.pinned_in_group: I8 = np.zeros(groups, np.int64)
        self.mapped_groups = 0
        self.used = 0
        """Blocks in any state but FREE."""
        self.on_freed: Callable[[I8], None] | None = None
        """Told of blocks that became allocatable (the LIFO order keeps a list)."""

    def take(self, blocks: I8, owner: int, state: BlockState, pinned: bool) -> None:
        """FREE blocks [n] become ``owner``'s; the caller puts them in a table."""
        self.occupy(blocks, state)
        self.resting[blocks] = state
        self.owner[blocks] = owner
        self.epoch[blocks] += np.uint32(1)
        if pinned:
            self.pinned[blocks] = True
            self._count(self.pinned_in_group, blocks, 1)

    def drop(self, blocks: I8, state: BlockState) -> None:
        """Owned blocks [n] become nobody's in ``state`` (FREE, QUARANTINED, or MOVING when a copy still reads)."""
        held = self.pinned[blocks]
        if held.any():
            pins = blocks[held]
            self.pinned[pins] = False
            self._count(self.pinned_in_group, pins, -1)
        self.owner[blocks] = NO_OWNER
        self.cell[blocks] = NO_CELL
        self.epoch[blocks] += np.uint32(1)
        self.writing[blocks] = False
        self.resting[blocks] = FREE
        if state == BlockState.FREE:
            self.vacate(blocks)
        else:
            self.state[blocks] = state

    def hand_over(self, sources: I8, destinations: I8) -> None:
        """RESERVED destinations [n] become what MOVING sources [n] were; those are nobody's and QUARANTINED. What
        moves is neither pinned nor written. This is the pause of a relocation: keep it short."""
        self.owner[destinations] = self.owner[sources]
        resting = self.resting[sources]
        self.resting[destinations] = resting
        self.state[destinations] = resting
        self.epoch[destinations] += np.uint32(1)
        self.owner[sources] = NO_OWNER
        self.cell[sources] = NO_CELL
        self.resting[sources] = FREE
        self.state[sources] = BlockState.QUARANTINED
        self.epoch[sources] += np.uint32(1)

    def occupy(self, blocks: I8, state: BlockState) -> None:
        """FREE blocks [n] get another state, with no owner yet."""
        self.state[blocks] = state
        self._count(self.free_in_group, blocks, -1)
        self.used += len(blocks)

    def vacate(self, blocks: I8) -> None:
        """Nobody's blocks [n] are FREE."""
        self.state[blocks] = FREE
        self._count(self.free_in_group, blocks, 1)
        self.used -= len(blocks)
        if self.on_freed is not None:
            self.on_freed(blocks)

    def map(self, groups: I8) -> None:
        self.mapped[groups] = True
        self.mapped_groups += len(groups)
        if self.on_freed is not None:
            per_group = self.geometry.blocks_per_group
            self.on_freed((groups[:, None] * per_group + np.arange(per_group)).reshape(-1)[::-1])

    def unmap(self, groups: I8) -> None:
        self.mapped[groups] = False
        self.mapped_groups -= len(groups)

    def free_mask(self) -> Bool:
        """Allocatable blocks, bool [blocks]: FREE in a mapped group."""
        free: Bool = self.state == FREE
        if self.mapped_groups < self.geometry.groups:
            free = (free.reshape(self.geometry.groups, -1) & self.mapped[:, None]).reshape(-1)
        return free

    def movable_mask(self) -> Bool:
        """Blocks that relocation may take, bool [blocks]: full ones of live and idle sessions, not pinned."""
        settled = (self.state == BlockState.LIVE) | (self.state == BlockState.IDLE)
        movable: Bool = settled & ~self.pinned & ~self.writing
        return movable

    def free_blocks(self) -> int:
        """Allocatable blocks: free ones in mapped groups."""
        return self.mapped_groups * self.geometry.blocks_per_group - self.used

    def empty_groups(self) -> I8:
        """Mapped groups whose blocks are all free, ascending."""
        return np.flatnonzero(self.mapped & (self.free_in_group == self.geometry.blocks_per_group))

    def _count(self, counts: I8, blocks: I8, by: int) -> None:
        groups = blocks // self.geometry.blocks_per_group
        if len(blocks) > 64:
            counts += by * np.bincount(groups, minlength=len(counts))
        else:
            np.add.at(counts, groups, by)
