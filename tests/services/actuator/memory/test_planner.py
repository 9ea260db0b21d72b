"""The planner against brute force, against a greedy tail compaction, and on the case that was reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from services.actuator.memory.errors import BadGeometry
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.occupancy import Occupancy
from services.actuator.memory.planner import Plan, choose, deficit_blocks, plan

BLOCK_BYTES = 64
FREE, LIVE, STUCK = 0, 1, 2
SHAPES = [(g, b) for g in range(1, 8) for b in range(1, 8) if 2 <= g * b <= 14]


class Small:
    """A pool as the planner sees it: one kind per block, and which groups are mapped and protected."""

    def __init__(self, kinds: list[int], mapped: list[bool], protected: list[bool]) -> None:
        groups = len(mapped)
        self.geometry = Geometry(BLOCK_BYTES, len(kinds) // groups, groups)
        self.mapped = np.array(mapped)
        self.protected = np.array(protected) & self.mapped
        per_group = np.where(self.mapped[:, None], np.array(kinds).reshape(groups, -1), FREE)
        self.kinds = per_group.reshape(-1)
        free = np.where(self.mapped, (per_group == FREE).sum(1), 0)
        self.occupancy = Occupancy(
            (per_group == LIVE).sum(1), (per_group == STUCK).sum(1), free, self.mapped, self.protected
        )
        self.holes = (per_group == FREE).reshape(-1) & np.repeat(self.mapped, self.geometry.blocks_per_group)

    def plan(self, want_groups: int | None = None, budget_blocks: float = np.inf) -> Plan:
        return plan(
            self.occupancy,
            self.geometry,
            movable=self.kinds == LIVE,
            holes=self.holes,
            want_groups=want_groups,
            budget_bytes=budget_blocks * BLOCK_BYTES,
        )

    def empty(self, kinds: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Mapped, unprotected groups without a block in use."""
        used = (kinds.reshape(self.geometry.groups, -1) != FREE).any(1)
        return self.mapped & ~self.protected & ~used

    def after(self, moves: NDArray[np.int64]) -> NDArray[np.int64]:
        kinds = self.kinds.copy()
        for source, destination in moves.tolist():
            assert kinds[source] == LIVE, f"block {source} is {kinds[source]}: only live unpinned blocks move"
            assert kinds[destination] == FREE, f"block {destination} is taken: a destination must be free"
            assert self.holes[destination], f"block {destination} lies in no mapped group"
            kinds[source], kinds[destination] = FREE, LIVE
        return kinds

    def fewest(self) -> dict[int, int]:
        """Brute force: for each number of empty groups in the end, the fewest blocks moved, over every way to
        lay the live blocks out anew among the movable and free blocks of unprotected mapped groups."""
        block_group = np.arange(self.geometry.blocks) // self.geometry.blocks_per_group
        places = np.flatnonzero((self.mapped & ~self.protected)[block_group] & (self.kinds != STUCK))
        was = self.kinds[places] == LIVE
        masks = (np.arange(1 << len(places))[:, None] >> np.arange(len(places))) & 1 == 1
        masks = masks[masks.sum(1) == was.sum()]
        moved = (masks & ~was).sum(1)
        empties = np.zeros(len(masks), dtype=np.int64)
        for group in np.flatnonzero(self.mapped & ~self.protected):
            if not (self.kinds[block_group == group] == STUCK).any():
                empties += ~masks[:, block_group[places] == group].any(1)
        best: dict[int, int] = {}
        for count in range(int(empties.max()) + 1):
            if (empties >= count).any():
                best[count] = int(moved[empties >= count].min())
        return best


@st.composite
def pools(draw: st.DrawFn) -> Small:
    groups, per_group = draw(st.sampled_from(SHAPES))
    kinds = draw(st.lists(st.sampled_from([FREE, FREE, LIVE, LIVE, LIVE, STUCK]), min_size=groups * per_group,
                          max_size=groups * per_group))  # fmt: skip
    rarely = st.sampled_from([False, False, False, True])
    return Small(
        kinds,
        [not draw(rarely) for _ in range(groups)],
        [draw(rarely) for _ in range(groups)],
    )


def tail_compaction(small: Small) -> list[tuple[int, int]]:
    """Greedy: whole groups from the highest address down, into the lowest holes below them."""
    moves: list[tuple[int, int]] = []
    kinds = small.kinds.copy()
    per_group = small.geometry.blocks_per_group
    usable = small.mapped & ~small.protected
    for group in reversed(range(small.geometry.groups)):
        members = range(group * per_group, (group + 1) * per_group)
        live = [block for block in members if kinds[block] == LIVE]
        if not usable[group] or not live or any(kinds[block] == STUCK for block in members):
            continue
        used = ~small.empty(kinds)
        holes = [
            block
            for block in range(group * per_group)
            if kinds[block] == FREE and usable[block // per_group] and used[block // per_group]
        ]
        if len(holes) < len(live):
            continue
        for source, destination in zip(live, holes, strict=False):
            kinds[source], kinds[destination] = FREE, LIVE
            moves.append((source, destination))
    return moves


@settings(max_examples=200, deadline=None)
@given(pools(), st.integers(0, 7))
def test_moves_the_fewest_bytes_that_any_layout_with_as_many_empty_groups_needs(small: Small, want: int) -> None:
    found = small.plan(want)
    best = small.fewest()
    reachable = min(want, max(best))
    assert found.groups_empty + found.groups_freed >= reachable, "fewer groups than a layout exists for"
    assert found.bytes == best[reachable] * BLOCK_BYTES, "more bytes than the best layout needs"
    assert found.lower_bound_bytes <= found.bytes


@settings(max_examples=200, deadline=None)
@given(pools(), st.integers(0, 14))
def test_a_byte_budget_is_kept_and_used_as_well_as_any_layout_could(small: Small, budget_blocks: int) -> None:
    found = small.plan(None, budget_blocks)
    best = small.fewest()
    most = max(count for count, moved in best.items() if moved <= budget_blocks)
    assert found.bytes <= budget_blocks * BLOCK_BYTES
    assert found.groups_empty + found.groups_freed == most, "the budget would have emptied another number of groups"
    assert found.bytes == best[most] * BLOCK_BYTES


@settings(max_examples=200, deadline=None)
@given(pools(), st.one_of(st.none(), st.integers(0, 7)), st.one_of(st.just(np.inf), st.integers(0, 14)))
def test_every_move_is_valid_and_every_group_touched_becomes_empty(
    small: Small, want: int | None, budget_blocks: float
) -> None:
    found = small.plan(want, budget_blocks)
    sources, destinations = found.moves[:, 0], found.moves[:, 1]
    assert len(set(found.moves.reshape(-1).tolist())) == 2 * len(found.moves), "a block occurs twice"
    before, after = small.empty(small.kinds), small.empty(small.after(found.moves))
    per_group = small.geometry.blocks_per_group
    assert after[sources // per_group].all(), "a move whose group is not emptied is wasted"
    assert set(np.flatnonzero(after & ~before).tolist()) == set(found.sources.tolist())
    assert not before[destinations // per_group].any(), "an empty group was filled"
    assert not small.protected[found.moves.reshape(-1) // per_group].any(), "a waiter's group was touched"
    for end in np.flatnonzero(np.diff(sources // per_group, append=-1)):
        done = small.empty(small.after(found.moves[: end + 1]))
        assert done[sources[: end + 1] // per_group].all(), "a prefix of whole groups must stand for itself"


@settings(max_examples=200, deadline=None)
@given(pools())
def test_is_never_worse_than_a_greedy_tail_compaction(small: Small) -> None:
    greedy = np.array(tail_compaction(small), dtype=np.int64).reshape(-1, 2)
    emptied = int((small.empty(small.after(greedy))).sum())
    found = small.plan(emptied)
    assert found.groups_empty + found.groups_freed == max(emptied, found.groups_empty)
    assert len(found.moves) <= len(greedy)
    assert small.plan().groups_freed + found.groups_empty >= emptied


@settings(max_examples=200, deadline=None)
@given(pools(), st.integers(0, 7))
def test_evicting_exactly_the_deficit_makes_the_groups_reachable(small: Small, want: int) -> None:
    freeable = small.mapped & ~small.protected & (small.occupancy.stuck == 0)
    want = min(want, int(freeable.sum()))
    deficit = deficit_blocks(small.occupancy, small.geometry, want)
    usable = np.repeat(small.mapped & ~small.protected, small.geometry.blocks_per_group)
    live = np.flatnonzero((small.kinds == LIVE) & usable)
    if deficit > len(live):
        return  # stuck blocks fill the rest
    for gone, enough in ((deficit, True), (deficit - 1, False)):
        if gone < 0:
            continue
        kinds = small.kinds.copy()
        kinds[live[:gone]] = FREE
        rest = Small(kinds.tolist(), small.mapped.tolist(), small.protected.tolist()).plan(want)
        assert (rest.groups_empty + rest.groups_freed >= want) is enough, f"{gone} of a deficit of {deficit} blocks"


def test_all_freed_but_every_40th_block_of_6400_gives_97_of_100_groups_and_none_without_compaction() -> None:
    kinds = np.where(np.arange(6400) % 40 == 0, LIVE, FREE)
    small = Small(kinds.tolist(), [True] * 100, [False] * 100)
    without = choose(small.occupancy, small.geometry, want_groups=0)
    found = small.plan()
    assert without.empty == 0, "every group still holds one or two blocks"
    assert found.groups_empty + found.groups_freed == 97, "160 blocks fill three groups of 64"
    assert small.empty(small.after(found.moves)).sum() == 97
    assert found.bytes == found.lower_bound_bytes


@pytest.mark.parametrize(
    ("kinds", "want", "budget_blocks", "limit"),
    [
        ([LIVE, FREE, LIVE, FREE, LIVE, LIVE], 1, np.inf, ""),
        ([LIVE, FREE, LIVE, FREE, LIVE, LIVE], 2, np.inf, "holes"),
        ([LIVE, FREE, LIVE, FREE, LIVE, LIVE], 1, 0, "bytes"),
        ([STUCK, FREE, STUCK, FREE, LIVE, FREE], 2, np.inf, "stuck"),
    ],
)
def test_says_what_kept_it_from_more_groups(kinds: list[int], want: int, budget_blocks: float, limit: str) -> None:
    small = Small(kinds, [True] * 3, [False] * 3)
    assert small.plan(want, budget_blocks).limit == limit


def test_a_time_budget_counts_the_copying_rate() -> None:
    small = Small([LIVE, FREE, FREE, FREE] * 3, [True] * 3, [False] * 3)
    arguments = {"movable": small.kinds == LIVE, "holes": small.holes, "copy_bytes_per_s": BLOCK_BYTES / 1e-3}
    found = plan(small.occupancy, small.geometry, budget_s=1.5e-3, **arguments)
    assert (found.groups_freed, found.limit) == (1, "time")
    assert found.seconds == pytest.approx(1e-3)
    assert plan(small.occupancy, small.geometry, budget_s=2.5e-3, **arguments).groups_freed == 2


def test_fills_the_fullest_groups_first() -> None:
    small = Small([LIVE, FREE, FREE, FREE, LIVE, LIVE, FREE, FREE, LIVE, LIVE, LIVE, FREE], [True] * 3, [False] * 3)
    assert small.plan(1).moves.tolist() == [[0, 11]]


def test_wrong_sizes_and_amounts_are_refused_with_their_numbers() -> None:
    small = Small([LIVE, FREE] * 3, [True] * 3, [False] * 3)
    with pytest.raises(BadGeometry, match="movable blocks: found 4, expected 6"):
        plan(small.occupancy, small.geometry, movable=small.kinds[:4] == LIVE, holes=small.holes)
    with pytest.raises(BadGeometry, match="groups of the occupancy: found 3, expected 4"):
        choose(small.occupancy, Geometry(BLOCK_BYTES, 2, 4))
    with pytest.raises(BadGeometry):
        plan(small.occupancy, small.geometry, movable=small.kinds == STUCK, holes=small.holes)
    with pytest.raises(ValueError, match="-64 bytes"):
        small.plan(None, -1)
