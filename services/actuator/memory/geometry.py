"""How one worker's arena is cut: blocks, and page groups that are mapped and given back whole."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import BadGeometry

I8 = NDArray[np.int64]


class Geometry(msgspec.Struct, frozen=True):
    """``block_bytes`` per block, ``blocks_per_group`` per page group, ``groups`` in the address space.

    Block b lies at byte b x block_bytes and in group b // blocks_per_group. Raises BadGeometry unless all three
    are at least 1.
    """

    block_bytes: int
    blocks_per_group: int
    groups: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise BadGeometry(name, getattr(self, name), "1 or more")

    @property
    def blocks(self) -> int:
        """Blocks of the whole address space, mapped or not."""
        return self.groups * self.blocks_per_group

    @property
    def group_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_group

    @property
    def arena_bytes(self) -> int:
        return self.group_bytes * self.groups

    def group_of(self, blocks: I8) -> I8:
        """Groups of blocks: int64 of the same shape. Raises BadGeometry for a block outside the arena."""
        if blocks.size and (blocks.min() < 0 or blocks.max() >= self.blocks):
            worst = int(blocks.min()) if blocks.min() < 0 else int(blocks.max())
            raise BadGeometry("block", worst, f"0 to {self.blocks - 1}")
        return blocks // self.blocks_per_group

    def groups_for(self, blocks: int) -> int:
        """Fewest groups that hold ``blocks`` blocks."""
        return -(-blocks // self.blocks_per_group)
