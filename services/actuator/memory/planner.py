"""Which blocks to move so that whole page groups become empty, with the fewest bytes (DESIGN section 5).

Groups are emptied emptiest first into the holes of the fullest. That is optimal, not a heuristic: let F be the free
blocks of all partly filled groups and B the blocks of a group. Emptying a set S of k groups without stuck blocks needs
holes elsewhere for sum(live of S), and of F the groups in S themselves hold kB - sum(live of S), so the condition
is kB <= F *whichever* groups S has; the cheapest S are the k with the fewest live blocks. Filling a group that is
empty already never helps: keeping the fullest source instead empties as many groups with fewer moves.

The planner returns moves; it reserves nothing and copies nothing. Pure.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import Blocks
from services.actuator.memory.errors import BadGeometry
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.occupancy import Occupancy
from services.actuator.memory.occupancy import occupancy as occupancy_of

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

INF: Final = math.inf
COPY_BYTES_PER_S: Final = 400e9
"""Payload rate of in-card copies, bytes/s: about a quarter of an A100's HBM (the actuator's EffectSettings)."""

Limit = Literal["", "holes", "stuck", "bytes", "time"]
"""What kept a plan from more groups: free blocks, groups without stuck blocks, the byte or the time budget."""


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Groups to empty, from counts alone: what compaction would bring, without a look at single blocks."""

    sources: I8
    """[k] group numbers, emptiest first."""
    blocks: int
    """Blocks to move: the live blocks of the sources."""
    lower_bound_blocks: int
    """No method whatever empties k more groups with fewer, not even one that could move stuck blocks."""
    empty: int
    """Groups that are mapped, empty and unprotected as it is."""
    limit: Limit


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Moves in the order in which they empty group after group."""

    moves: I8
    """[n, 2] source and destination block numbers; a prefix that ends with a group is a plan itself."""
    sources: I8
    """[groups_freed] group numbers in that order."""
    groups_freed: int
    """Groups that the moves empty."""
    groups_empty: int
    """Groups that are empty without a move and can go at once."""
    bytes: int
    lower_bound_bytes: int
    seconds: float
    """Copying time at the stated rate."""
    limit: Limit
    """Why not more groups; empty when every wanted group is had."""


def choose(
    occupancy: Occupancy,
    geometry: Geometry,
    *,
    want_groups: int | None = None,
    budget_blocks: float = INF,
) -> Choice:
    """The groups that are emptied for the fewest blocks moved.

    ``want_groups``: empty groups wanted in all, those that are empty already included, since holes come first; None:
    as many as possible. A waiter's protected groups are neither source nor destination. BadGeometry for an occupancy
    of another number of groups; ValueError for a negative amount.
    """
    if not budget_blocks >= 0 or (want_groups is not None and want_groups < 0):
        raise ValueError(f"budget of {budget_blocks} blocks, {want_groups} groups wanted: expected 0 or more")
    usable = _usable(occupancy, geometry)
    live, stuck, free = occupancy.live, occupancy.stuck, occupancy.free
    used = usable & (live + stuck > 0)
    empty = int(np.count_nonzero(usable & (live + stuck == 0)))
    by_holes = int(free[used].sum()) // geometry.blocks_per_group
    candidates = np.flatnonzero(used & (stuck == 0))
    # Among equals the highest address goes first, so that what is kept gathers at the low end.
    order = candidates[np.lexsort((-candidates, live[candidates]))]
    moved = np.cumsum(live[order])
    by_budget = int(np.searchsorted(moved, budget_blocks, side="right"))
    wanted = len(order) if want_groups is None else max(want_groups - empty, 0)
    count = min(wanted, by_holes, by_budget, len(order))
    limit: Limit = ""
    if count < wanted:
        limit = "stuck" if count == len(order) else "holes" if count == by_holes else "bytes"
    least = np.sort((live + stuck)[used])[:count]
    return Choice(order[:count], int(moved[count - 1]) if count else 0, int(least.sum()), empty, limit)


def plan(
    occupancy: Occupancy,
    geometry: Geometry,
    *,
    movable: Bool,
    holes: Bool,
    want_groups: int | None = None,
    budget_bytes: float = INF,
    budget_s: float = INF,
    copy_bytes_per_s: float = COPY_BYTES_PER_S,
) -> Plan:
    """Moves that empty whole groups within both budgets; never a move whose group would not become empty.

    ``movable`` and ``holes`` bool [blocks]: what ``occupancy`` counts as live and free. The other arguments as in
    :func:`choose`. ValueError for a negative budget or a rate that is not positive.
    """
    if not (budget_bytes >= 0 and budget_s >= 0 and copy_bytes_per_s > 0):
        raise ValueError(
            f"budgets {budget_bytes} bytes, {budget_s} s at {copy_bytes_per_s} bytes/s: expected 0 or more"
        )
    for name, array in (("movable", movable), ("holes", holes)):
        if array.shape != (geometry.blocks,):
            raise BadGeometry(f"{name} blocks", array.size, str(geometry.blocks))
    by_time = budget_s * copy_bytes_per_s
    budget_blocks = min(budget_bytes, by_time) // geometry.block_bytes if min(budget_bytes, by_time) < INF else INF
    chosen = choose(occupancy, geometry, want_groups=want_groups, budget_blocks=budget_blocks)
    limit: Limit = "time" if chosen.limit == "bytes" and by_time < budget_bytes else chosen.limit
    sources = _blocks(movable, geometry, chosen.sources)
    destinations = _blocks(holes, geometry, _destinations(occupancy, geometry, chosen))[: len(sources)]
    for name, found in (("movable blocks", len(sources)), ("holes", len(destinations))):
        if found != chosen.blocks:
            raise BadGeometry(f"{name} of the chosen groups", found, f"{chosen.blocks} as the occupancy counts")
    size = chosen.blocks * geometry.block_bytes
    return Plan(
        moves=np.stack((sources, destinations), axis=1),
        sources=chosen.sources,
        groups_freed=len(chosen.sources),
        groups_empty=chosen.empty,
        bytes=size,
        lower_bound_bytes=chosen.lower_bound_blocks * geometry.block_bytes,
        seconds=size / copy_bytes_per_s,
        limit=limit,
    )


def plan_blocks(
    blocks: Blocks,
    *,
    want_groups: int | None = None,
    budget_bytes: float = INF,
    budget_s: float = INF,
    copy_bytes_per_s: float = COPY_BYTES_PER_S,
) -> Plan:
    """:func:`plan` for a pool's blocks as they are now."""
    return plan(
        occupancy_of(blocks),
        blocks.geometry,
        movable=blocks.movable_mask(),
        holes=blocks.free_mask(),
        want_groups=want_groups,
        budget_bytes=budget_bytes,
        budget_s=budget_s,
        copy_bytes_per_s=copy_bytes_per_s,
    )


def deficit_blocks(occupancy: Occupancy, geometry: Geometry, groups: int) -> int:
    """Blocks that must be freed before compaction can leave ``groups`` groups empty; 0 when the holes suffice."""
    usable = _usable(occupancy, geometry)
    return max(groups * geometry.blocks_per_group - int(occupancy.free[usable].sum()), 0)


def _usable(occupancy: Occupancy, geometry: Geometry) -> Bool:
    """Mapped and unprotected, bool [groups]."""
    if len(occupancy.mapped) != geometry.groups:
        raise BadGeometry("groups of the occupancy", len(occupancy.mapped), str(geometry.groups))
    usable: Bool = occupancy.mapped & ~occupancy.protected
    return usable


def _destinations(occupancy: Occupancy, geometry: Geometry, chosen: Choice) -> I8:
    """Groups to fill, fullest first, as many as the moves need; never one that is empty or to be emptied."""
    open_groups = _usable(occupancy, geometry) & (occupancy.live + occupancy.stuck > 0)
    open_groups[chosen.sources] = False
    groups = np.flatnonzero(open_groups & (occupancy.free > 0))
    groups = groups[np.argsort(occupancy.free[groups], kind="stable")]
    room = np.cumsum(occupancy.free[groups])
    return groups[: int(np.searchsorted(room, chosen.blocks)) + 1] if chosen.blocks else groups[:0]


def _blocks(chosen: Bool, geometry: Geometry, groups: I8) -> I8:
    """Block numbers that ``chosen`` bool [blocks] marks in these groups, group after group."""
    rows, columns = np.nonzero(chosen.reshape(geometry.groups, geometry.blocks_per_group)[groups])
    return groups[rows] * geometry.blocks_per_group + columns
