"""Mapping of page groups: on demand, ahead of need, and back; and the groups that a waiter has gathered."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import NO_WAITER, Blocks
from services.actuator.memory.errors import BadGeometry, IllegalTransition, OutOfBlocks
from services.actuator.memory.quota import Quota

I8 = NDArray[np.int64]


class MapCounters(msgspec.Struct):
    """Groups since the pool began: what waited for the driver, what was ready, what went back."""

    mapped_on_demand: int = 0
    """Inside an allocation, which had to wait for it."""
    mapped_ahead: int = 0
    """By ``map_groups`` or ``refill_reserve``, with nobody waiting."""
    given_back: int = 0


class Groups:
    """Which groups are mapped, within the quota. ``reserve_groups`` empty ones are kept mapped ahead of need."""

    def __init__(self, blocks: Blocks, quota: Quota, reserve_groups: int) -> None:
        if not 0 <= reserve_groups <= blocks.geometry.groups:
            raise BadGeometry("reserve_groups", reserve_groups, f"0 to {blocks.geometry.groups}")
        self.reserve_groups = reserve_groups
        self.counters = MapCounters()
        self._blocks = blocks
        self._quota = quota

    def mappable(self) -> int:
        """Groups that may still be mapped: within the hard quota and the arena."""
        return max(0, min(self._quota.hard_groups, self._blocks.geometry.groups) - self._blocks.mapped_groups)

    def next_unmapped(self, count: int) -> I8:
        """The lowest ``count`` groups that are not mapped, ascending; fewer if there are fewer."""
        return np.flatnonzero(~self._blocks.mapped)[:count]

    def map(self, count: int) -> I8:
        """Map the lowest ``count`` unmapped groups ahead of need; OutOfBlocks beyond quota or arena."""
        if count < 0 or count > self.mappable():
            raise OutOfBlocks(count, self.mappable(), "hard quota", "groups")
        groups = self.next_unmapped(count)
        self._blocks.map(groups)
        self.counters.mapped_ahead += len(groups)
        return groups

    def map_on_demand(self, groups: I8) -> None:
        """Map these for an allocation that was found to need them."""
        self._blocks.map(groups)
        self.counters.mapped_on_demand += len(groups)

    def refill_reserve(self) -> I8:
        """Map until ``reserve_groups`` unprotected groups are empty, as far as the quota goes; gives the groups."""
        return self.map(min(self.mappable(), max(0, self.reserve_groups - len(self.spare()))))

    def spare(self) -> I8:
        """Empty mapped groups that no waiter has gathered, ascending."""
        empty = self._blocks.empty_groups()
        spare: I8 = empty[self._blocks.protected[empty] == NO_WAITER]
        return spare

    def give_back(self, groups: int | I8, waiter: int | None, keep_reserve: bool) -> I8:
        """Unmap groups and give them: these, or up to a number of spare ones, highest first.

        A number leaves floor, reserve (unless told otherwise) and protected groups alone. Named groups must be
        mapped, free of any block, and unprotected or ``waiter``'s own: else IllegalTransition; OutOfBlocks below
        the floor. Nothing is unmapped then.
        """
        above_floor = max(0, self._blocks.mapped_groups - self._quota.floor_groups)
        if isinstance(groups, int):
            spare = self.spare()
            kept = self.reserve_groups if keep_reserve else 0
            count = max(0, min(groups, above_floor, len(spare) - kept))
            chosen = spare[len(spare) - count :][::-1]
        else:
            chosen = self._named(groups, waiter)
            if len(chosen) > above_floor:
                raise OutOfBlocks(len(chosen), above_floor, "floor", "groups")
        self._blocks.unmap(chosen)
        self._blocks.protected[chosen] = NO_WAITER
        self.counters.given_back += len(chosen)
        return chosen

    def protect(self, waiter: int, groups: I8) -> None:
        """Keep mapped groups for ``waiter`` (0 or more): only its allocations fill them, and no relocation.

        IllegalTransition for a group that is not mapped or is another waiter's.
        """
        groups = self._distinct(groups, waiter)
        self._blocks.protected[groups] = waiter

    def release(self, waiter: int) -> I8:
        """End the protection of ``waiter``'s groups; gives them, ascending."""
        groups = np.flatnonzero(self._blocks.protected == waiter) if waiter >= 0 else np.zeros(0, np.int64)
        self._blocks.protected[groups] = NO_WAITER
        return groups

    def _named(self, groups: I8, waiter: int | None) -> I8:
        groups = self._distinct(groups, waiter)
        used = groups[self._blocks.free_in_group[groups] < self._blocks.geometry.blocks_per_group]
        if len(used):
            held = self._blocks.geometry.blocks_per_group - int(self._blocks.free_in_group[used[0]])
            raise IllegalTransition("group", int(used[0]), f"in use by {held} blocks", "be given back", len(used))
        return groups

    def _distinct(self, groups: I8, waiter: int | None) -> I8:
        """Sorted, each once; all mapped and unprotected or ``waiter``'s."""
        groups = np.unique(np.asarray(groups, np.int64))
        count = self._blocks.geometry.groups
        if len(groups) and (groups[0] < 0 or groups[-1] >= count):
            raise BadGeometry("group", int(groups[0] if groups[0] < 0 else groups[-1]), f"0 to {count - 1}")
        if waiter is not None and waiter < 0:
            raise BadGeometry("waiter", waiter, "0 or more")
        unmapped = groups[~self._blocks.mapped[groups]]
        if len(unmapped):
            raise IllegalTransition("group", int(unmapped[0]), "not mapped", "be kept or given back", len(unmapped))
        holder = self._blocks.protected[groups]
        others = groups[(holder != NO_WAITER) & (holder != (NO_WAITER if waiter is None else waiter))]
        if len(others):
            found = f"protected for waiter {self._blocks.protected[others[0]]}"
            raise IllegalTransition("group", int(others[0]), found, "serve another", len(others))
        return groups
