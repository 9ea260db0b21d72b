"""How to give back page groups by a deadline: which sessions go, which blocks move, and what that will take.

The order is DESIGN section 5's: empty groups first; where the free blocks do not suffice, idle KV of exactly the
deficit (what has a copy in a lower tier first, then in the caller's order); compaction; running requests last. Only a
deadline that would be missed otherwise makes it go further: swap-outs become drops that are recomputed on return, then
more sessions go than the deficit asks for. Pure: it decides and predicts, :mod:`shrink` does it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import Blocks
from services.actuator.memory.occupancy import Occupancy, occupancy
from services.actuator.memory.planner import choose, deficit_blocks
from services.actuator.memory.shrink_terms import (
    DEFAULT_LIMITS,
    DEFAULT_RATES,
    Limits,
    Rates,
    Reason,
    ShrinkPlan,
    Victim,
)
from services.actuator.memory.states import BlockState

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

MOST_SPARED: Final = 64
"""Extra sessions that are tried one by one for being spared; a longer list is taken as it is."""


def plan_shrink(
    blocks: Blocks,
    groups: int,
    *,
    within_s: float,
    idle: Sequence[Victim] = (),
    running: Sequence[int] = (),
    rates: Rates = DEFAULT_RATES,
    limits: Limits = DEFAULT_LIMITS,
) -> ShrinkPlan:
    """The plan that gives back ``groups`` page groups within ``within_s``, or as many of them as can be.

    ``idle``: sessions that may leave, the best victim first; ``running``: owners that may be preempted, the newest
    first. Pinned blocks stay, whoever owns them. ValueError for a negative number of groups or seconds.
    """
    if groups < 0 or not within_s >= 0:
        raise ValueError(f"{groups} groups within {within_s} s: expected 0 or more")
    draft = _Draft(blocks, within_s, idle, running, rates, limits)
    whole = draft.plan(groups)
    if draft.holds(whole, groups):
        return whole
    low, high, best = 0, groups, draft.plan(0)
    while high - low > 1:
        middle = (low + high) // 2
        tried = draft.plan(middle)
        if draft.holds(tried, middle):
            low, best = middle, tried
        else:
            high = middle
    return dataclasses.replace(best, wanted=groups, reason=draft.why(whole, groups))


class _Draft:
    """A pool's blocks, and what they would be without some of the candidates: idle sessions in the order in which
    they go, then running ones. ``chosen`` bool [candidates] says who goes."""

    def __init__(
        self,
        blocks: Blocks,
        within_s: float,
        idle: Sequence[Victim],
        running: Sequence[int],
        rates: Rates,
        limits: Limits,
    ) -> None:
        self._geometry = blocks.geometry
        self._now = occupancy(blocks)
        self._empty = choose(self._now, self._geometry, want_groups=0).empty
        self._within_s, self._rates, self._limits = within_s, rates, limits
        ordered = sorted(idle, key=lambda one: not one.has_copy)
        copies = {one.owner: one.has_copy for one in reversed(ordered)}
        self._owners = np.array(list(dict.fromkeys([*(one.owner for one in ordered), *running])), np.int64)
        self._idle = np.isin(self._owners, list(copies))
        self._copied = np.array([copies.get(owner, False) for owner in self._owners.tolist()], np.bool_)
        # The blocks that go with each candidate; what is pinned or under way stays.
        settled = ((blocks.state == BlockState.LIVE) | (blocks.state == BlockState.IDLE)) & ~blocks.pinned
        theirs = np.flatnonzero(settled & np.isin(blocks.owner, self._owners))
        order = np.argsort(self._owners)
        self._candidate = order[np.searchsorted(self._owners[order], blocks.owner[theirs])]
        self._group = theirs // self._geometry.blocks_per_group
        self._movable = blocks.movable_mask()[theirs]
        counted = ~self._now.protected[self._group]
        self._gives = np.bincount(self._candidate[counted], minlength=len(self._owners))
        self._bytes = np.bincount(self._candidate, minlength=len(self._owners)) * self._geometry.block_bytes
        self._eligible = self._who_may_go()

    def plan(self, groups: int) -> ShrinkPlan:
        """For that many groups, in time or not."""
        chosen = self._cover(deficit_blocks(self._now, self._geometry, groups))
        built = self._build(groups, chosen)
        if self.holds(built, groups) or groups == 0:
            return built
        return self._further(groups, chosen, built)

    def holds(self, plan: ShrinkPlan, groups: int) -> bool:
        return plan.groups >= groups and plan.seconds <= self._within_s

    def why(self, plan: ShrinkPlan, groups: int) -> Reason:
        """Why ``plan``, made for ``groups``, does not hold."""
        if groups > np.count_nonzero(self._now.mapped & ~self._now.protected):
            return "protected"
        if plan.groups < groups:
            return "stuck" if self._gives[self._going(plan)].sum() >= plan.deficit_blocks else "no_victims"
        if plan.seconds - plan.swap_s <= self._within_s:
            return "link"
        return "copy" if plan.seconds - plan.copy_s <= self._within_s else "time"

    def _going(self, plan: ShrinkPlan) -> Bool:
        going: Bool = np.isin(self._owners, [*plan.drops, *plan.swaps, *plan.forgets, *plan.preempts])
        return going

    def _who_may_go(self) -> Bool:
        limits = self._limits
        eligible = self._gives > 0
        eligible &= self._idle | limits.may_preempt
        if not limits.may_drop:
            fresh = eligible & self._idle & ~self._copied
            room = limits.host_free_bytes if self._rates.link_bytes_per_s > 0 else 0.0
            eligible &= ~fresh | (np.cumsum(np.where(fresh, self._bytes, 0)) <= room)
        return eligible

    def _cover(self, deficit: int) -> Bool:
        """Candidates in their order until the deficit is covered, less those that it is covered without."""
        chosen: Bool = np.zeros(len(self._owners), np.bool_)
        order = np.flatnonzero(self._eligible)
        given = np.cumsum(self._gives[order])
        order = order[: int(np.searchsorted(given, deficit)) + 1] if deficit else order[:0]
        chosen[order] = True
        spare = int(self._gives[order].sum()) - deficit
        for one in order[-2::-1].tolist():  # the last was needed; the less good a victim, the sooner it is spared
            if self._gives[one] <= spare:
                spare -= int(self._gives[one])
                chosen[one] = False
        return chosen

    def _without(self, chosen: Bool) -> Occupancy:
        gone = chosen[self._candidate]
        groups = self._geometry.groups
        live = np.bincount(self._group[gone & self._movable], minlength=groups)
        stuck = np.bincount(self._group[gone & ~self._movable], minlength=groups)
        now = self._now
        return dataclasses.replace(now, live=now.live - live, stuck=now.stuck - stuck, free=now.free + live + stuck)

    def _build(self, groups: int, chosen: Bool) -> ShrinkPlan:
        rates = self._rates
        choice = choose(self._without(chosen), self._geometry, want_groups=groups)
        moved_bytes = choice.blocks * self._geometry.block_bytes
        copy_s = moved_bytes / rates.copy_bytes_per_s
        # One after the idle sessions, one after the running ones, and two around the commit of the moves.
        left = int((chosen & self._idle).any()) + int((chosen & ~self._idle).any())
        boundaries = left + (2 if moved_bytes else 0)
        other_s = boundaries * rates.boundary_s + groups * rates.unmap_group_s
        swaps = self._swaps(chosen, self._within_s - copy_s - other_s)
        swap_bytes = int(self._bytes[swaps].sum())
        fresh = chosen & self._idle & ~self._copied
        return ShrinkPlan(
            wanted=groups,
            groups=min(groups, choice.empty + len(choice.sources)),
            empty=min(groups, self._empty),
            deficit_blocks=deficit_blocks(self._now, self._geometry, groups),
            drops=self._named(chosen & self._idle & self._copied),
            swaps=self._named(swaps),
            forgets=self._named(fresh & ~swaps),
            preempts=self._named(chosen & ~self._idle),
            moved_bytes=moved_bytes,
            swap_s=swap_bytes / rates.link_bytes_per_s if swap_bytes else 0.0,
            copy_s=copy_s,
            other_s=other_s,
            reason="",
        )

    def _swaps(self, chosen: Bool, within_s: float) -> Bool:
        """Those that are copied to the host: what the tier has room for and, where dropping is the alternative,
        what there is time for. The best victims are dropped first, they are the least likely to be missed."""
        fresh = chosen & self._idle & ~self._copied
        if self._rates.link_bytes_per_s <= 0:
            return np.zeros_like(fresh)
        room = self._limits.host_free_bytes
        if self._limits.may_drop:
            room = min(room, within_s * self._rates.link_bytes_per_s)
        behind = np.cumsum(np.where(fresh, self._bytes, 0)[::-1])[::-1]
        kept: Bool = fresh & (behind <= room)
        return kept

    def _further(self, groups: int, chosen: Bool, built: ShrinkPlan) -> ShrinkPlan:
        """The fewest sessions more that make the plan hold: running ones where written blocks are in the way, idle
        ones first where time is short, running ones alone where it is shorter still; ``built`` when none do."""
        more = self._eligible & ~chosen
        if built.groups < groups:
            more &= ~self._idle
        elif not self._limits.may_drop:
            more &= self._copied | ~self._idle
        order = np.flatnonzero(more)

        def with_first(count: int) -> tuple[Bool, ShrinkPlan]:
            wider = chosen.copy()
            wider[order[:count]] = True
            return wider, self._build(groups, wider)

        if not (len(order) and self.holds(with_first(len(order))[1], groups)):
            # Running ones alone spare the boundary after which idle ones are gone.
            order = np.flatnonzero(more & ~self._idle)
            if not (len(order) and self.holds(with_first(len(order))[1], groups)):
                return built
        low, high = 0, len(order)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.holds(with_first(middle)[1], groups) else (middle, high)
        wider, found = with_first(high)
        for one in order[: high - 1][::-1].tolist() if high <= MOST_SPARED else ():
            wider[one] = False
            tried = self._build(groups, wider)
            if self.holds(tried, groups):
                found = tried
            else:
                wider[one] = True
        return found

    def _named(self, who: Bool) -> tuple[int, ...]:
        return tuple(self._owners[who].tolist())
