"""Allocation orders: which free blocks a request gets. Pure; they see counts and masks and change nothing.

Page-aware orders (DESIGN section 5, measured to take most of the gain for nothing) fill holes before they open an
empty group; the LIFO free list is the baseline, as serving engines have it.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import FREE, NO_WAITER, Blocks

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


class Order(Enum):
    """How a pool allocates."""

    FULLEST = "fullest"
    """From the group with the fewest free blocks, the lowest address among equals."""
    LOWEST = "lowest"
    """The lowest addresses."""
    LIFO = "lifo"
    """What was freed last, wherever it is; knows neither groups nor pins."""


def open_groups(blocks: Blocks, waiter: int | None) -> Bool:
    """Groups that a request may use, bool [groups]: mapped and not protected for another waiter."""
    mine = blocks.protected == NO_WAITER
    if waiter is not None:
        mine |= blocks.protected == waiter
    usable: Bool = blocks.mapped & mine
    return usable


def rank(blocks: Blocks, usable: Bool, order: Order, pinned: bool, count: int, mixed: bool = False) -> I8:
    """Groups with a free block in the order in which a page-aware allocation of ``count`` blocks fills them.

    Pinned blocks keep to groups of their own: those that hold pins, then empty ones; ordinary blocks to those
    without. ``mixed`` gives the others, which are the last resort, after mapping another group.
    """
    free = blocks.free_in_group
    own = blocks.pinned_in_group > 0
    if pinned:
        own |= free == blocks.geometry.blocks_per_group
    groups: I8 = np.flatnonzero(usable & (free > 0) & (own if pinned != mixed else ~own))
    if order is not Order.FULLEST or len(groups) <= 1:
        return groups
    if count == 1:
        fullest = int(free[groups].argmin())
        return groups[fullest : fullest + 1]
    short = np.uint16 if blocks.geometry.blocks_per_group < 1 << 16 else np.int64  # NumPy sorts 16 bits by radix
    return np.take(groups, np.argsort(free[groups].astype(short), kind="stable"))


def fill(blocks: Blocks, groups: I8, count: int) -> I8:
    """The first ``count`` free blocks of ``groups`` int64 [g], group by group, ascending inside; fewer if those
    hold fewer."""
    if count == 0 or len(groups) == 0:
        return np.zeros(0, np.int64)
    per_group = blocks.geometry.blocks_per_group
    if len(groups) > 1:
        held = blocks.free_in_group[groups].cumsum()
        groups = groups[: int(held.searchsorted(count)) + 1]
    if len(groups) == 1:
        at = int(groups[0]) * per_group
        chosen: I8 = at + (blocks.state[at : at + per_group] == FREE).nonzero()[0]
        return chosen[:count]
    row, column = np.nonzero(blocks.state.reshape(-1, per_group)[groups] == FREE)
    chosen = groups[row] * per_group + column
    return chosen[:count]


class FreeList:
    """A LIFO free list over blocks: what was pushed last is taken first; entries that are no longer free are
    skipped, protected ones stay."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._stack: I8 = np.zeros(2 * blocks.geometry.blocks + 64, np.int64)
        self._place: I8 = np.full(blocks.geometry.blocks, -1, np.int64)
        """Newest entry of each block; older ones are void."""
        self._top = 0

    def push(self, freed: I8) -> None:
        """Blocks int64 [n] that are free now, the last of them on top."""
        if self._top + len(freed) > len(self._stack):
            self._settle(0)
        at = np.arange(self._top, self._top + len(freed))
        self._stack[at] = freed
        self._place[freed] = at
        self._top += len(freed)

    def take(self, count: int, usable: Bool) -> I8:
        """The ``count`` newest free blocks in ``usable`` groups, bool [groups], newest first; fewer if there are
        fewer. They are off the list only once they are no longer free."""
        window = max(64, 2 * count)
        while True:
            low = max(0, self._top - window)
            entries = self._settle(low)
            found = entries[usable[entries // self._blocks.geometry.blocks_per_group]]
            if len(found) >= count or low == 0:
                return found[::-1][:count]
            window *= 4

    def _settle(self, low: int) -> I8:
        """Drop void entries from ``low`` up; gives what is left of them."""
        entries = self._stack[low : self._top]
        blocks = self._blocks
        valid = self._place[entries] == np.arange(low, self._top)
        valid &= (blocks.state[entries] == FREE) & blocks.mapped[entries // blocks.geometry.blocks_per_group]
        kept: I8 = entries[valid]
        self._top = low + len(kept)
        self._stack[low : self._top] = kept
        self._place[kept] = np.arange(low, self._top)
        return kept
