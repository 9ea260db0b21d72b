"""Moving named blocks: accounts stay true, destinations are kept, owners keep their blocks, emptied groups go back."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.relocation import FREE, RESERVED, UNMAPPED
from loadgen.engine.specs import FleetConfig
from loadgen.load import tables_at
from loadgen.workload import builtin
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import plain


@pytest.fixture
def fleet() -> Fleet:
    workload = builtin("agent", duration_s=200.0, seed=2).within_context(131_072)
    fleet = Fleet(FleetConfig(workers_per_card=1), tables_at(workload, 0.5, 1, 200.0, 2))
    for _ in range(50):
        fleet.advance()
    return fleet


def _moves(fleet: Fleet, count: int) -> np.ndarray:
    """The last blocks that may move, into the first free ones."""
    held, pinned = fleet.owners(0)
    sources = np.flatnonzero((held >= 0) & (pinned == 0))[::-1][:count]
    return np.stack([sources, np.flatnonzero(held == FREE)[:count]], axis=1)


def test_owners_are_the_blocks_that_the_accounts_know(fleet: Fleet) -> None:
    held, _ = fleet.owners(0)
    snapshot = fleet.snapshot(0)
    assert (held >= 0).sum() == snapshot.blocks_live + snapshot.blocks_idle
    assert (held == FREE).sum() == snapshot.blocks_free


def test_moved_blocks_keep_their_owner_and_the_accounts_add_up(fleet: Fleet) -> None:
    before, _ = fleet.owners(0)
    moves = _moves(fleet, 40)
    fleet.relocate(0, moves)
    after, _ = fleet.owners(0)
    assert (after[moves[:, 1]] == before[moves[:, 0]]).all()
    assert (after[moves[:, 0]] < 0).all()
    assert (np.bincount(after[after >= 0]) == np.bincount(before[before >= 0])).all(), "nobody gained or lost a block"
    check_accounts(fleet)
    fleet.advance()
    check_accounts(fleet)


def test_a_group_emptied_by_moves_goes_back_to_the_card(fleet: Fleet) -> None:
    held, pinned = fleet.owners(0)
    bpg = int(fleet.state.worker[0]["bpg"])
    by_group = held.reshape(-1, bpg)
    live = (by_group >= 0).sum(axis=1)
    movable = (live > 0) & (pinned.reshape(-1, bpg).sum(axis=1) == 0)
    group = int(np.flatnonzero(movable)[np.argmin(live[movable])])
    sources = group * bpg + np.flatnonzero(by_group[group] >= 0)
    free = np.flatnonzero(held == FREE)
    free = free[free // bpg != group][: len(sources)]
    mapped = fleet.snapshot(0).groups_mapped
    assert fleet.relocate(0, np.stack([sources, free], axis=1)) == 1
    assert fleet.snapshot(0).groups_mapped == mapped - 1
    check_accounts(fleet)


def test_what_cannot_be_moved_changes_nothing(fleet: Fleet) -> None:
    held, _ = fleet.owners(0)
    live, free = np.flatnonzero(held >= 0), np.flatnonzero(held == FREE)
    for bad in ([[free[0], free[1]]], [[live[0], live[1]]], [[live[0], free[0]], [live[1], free[0]]], [[0, 10**9]]):
        with pytest.raises(ValueError, match="move"):
            fleet.relocate(0, np.array(bad, np.int64))
    assert (fleet.owners(0)[0] == held).all()


def test_reserved_destinations_are_nobodys_until_the_moves_take_them(fleet: Fleet) -> None:
    moves = _moves(fleet, 40)
    before, free = fleet.snapshot(0), fleet.owners(0)[0] == FREE
    fleet.reserve(0, moves[:, 1])
    held, _ = fleet.owners(0)
    assert (held[moves[:, 1]] == RESERVED).all()
    assert ((held == FREE) | (held == RESERVED) == free).all(), "nothing else changed"
    kept = fleet.snapshot(0)
    assert (kept.blocks_free, kept.blocks_reserved) == (before.blocks_free - 40, 40)
    assert (kept.blocks_live, kept.blocks_idle) == (before.blocks_live, before.blocks_idle), "they hold no KV"
    check_accounts(fleet)
    for _ in range(5):
        fleet.advance()
    held, pinned = fleet.owners(0)
    assert (held[moves[:, 1]] == RESERVED).all(), "10 s of growth took other blocks"
    still = (held[moves[:, 0]] >= 0) & (pinned[moves[:, 0]] == 0)
    assert still.any()
    fleet.relocate(0, moves[still])
    after, _ = fleet.owners(0)
    assert (after[moves[still, 1]] == held[moves[still, 0]]).all()
    fleet.unreserve(0, moves[:, 1])
    after, _ = fleet.owners(0)
    assert not (after == RESERVED).any()
    assert (after[moves[~still, 1]] == FREE).all()
    assert (after[moves[still, 1]] >= 0).all(), "what the moves took stays taken"
    check_accounts(fleet)


def test_what_cannot_be_reserved_changes_nothing(fleet: Fleet) -> None:
    held, _ = fleet.owners(0)
    free, live = np.flatnonzero(held == FREE), np.flatnonzero(held >= 0)
    unmapped = np.flatnonzero(held == UNMAPPED)
    fleet.reserve(0, free[:1])
    held, _ = fleet.owners(0)
    for bad in (free[0], live[0], unmapped[0], free[1], -1, len(held)):
        with pytest.raises(ValueError, match=str(bad)):
            fleet.reserve(0, np.array([free[1], free[2], bad]))
        assert (fleet.owners(0)[0] == held).all(), f"block {bad}"
        check_accounts(fleet)
    with pytest.raises(ValueError, match="blocks"):
        fleet.unreserve(0, np.array([len(held)]))


def test_a_group_with_reserved_blocks_is_not_empty(fleet: Fleet) -> None:
    held, _ = fleet.owners(0)
    bpg = int(fleet.state.worker[0]["bpg"])
    empty = np.flatnonzero((held.reshape(-1, bpg) == FREE).all(axis=1))
    if not len(empty):
        fleet.command(compact_bytes=0.0, evict_bytes=1e12)
        fleet.advance()
        held, _ = fleet.owners(0)
        empty = np.flatnonzero((held.reshape(-1, bpg) == FREE).all(axis=1))
    block = int(empty[-1]) * bpg + 3
    fleet.reserve(0, np.array([block]))
    assert fleet.snapshot(0).groups_empty == len(empty) - 1
    fleet.command(hard_bytes=0.0, compact_bytes=1e12)
    fleet.advance()
    held, _ = fleet.owners(0)
    assert held[block] == RESERVED, "neither quota nor compaction takes the group away"
    check_accounts(fleet)
    fleet.unreserve(0, np.array([block]))
    fleet.advance()
    check_accounts(fleet)


def test_compaction_by_the_engine_leaves_reserved_blocks_where_they_are(fleet: Fleet) -> None:
    held, _ = fleet.owners(0)
    bpg = int(fleet.state.worker[0]["bpg"])
    partly = ((held.reshape(-1, bpg) >= 0).any(axis=1)) & ((held.reshape(-1, bpg) == FREE).any(axis=1))
    group = int(np.flatnonzero(partly)[-1])
    blocks = group * bpg + np.flatnonzero(held.reshape(-1, bpg)[group] == FREE)[:1]
    fleet.reserve(0, blocks)
    fleet.command(compact_bytes=1e12)
    assert (fleet.owners(0)[0][blocks] == RESERVED).all()
    check_accounts(fleet)


def test_a_crash_ends_reservations_and_keeps_the_accounts() -> None:
    table = plain(np.arange(200) * 0.05, prompt=3000, output=4000, max_tokens=4000)
    fleet = Fleet(FleetConfig(guard=False, client_timeouts=False, restart_s=4.0), [table, table])
    fleet.command(rho=1.6)
    kept: list[list[int]] = [[], []]
    while not fleet.state.worker["oom"].sum():
        for w in range(2):
            free = np.flatnonzero(fleet.owners(w)[0] == FREE)[::7][:3]
            fleet.reserve(w, free)
            kept[w] += free.tolist()
        fleet.advance()
        assert fleet.t_s < 400, "the case crashes"
    crashed = int(np.flatnonzero(fleet.state.worker["oom"])[0])
    assert not (fleet.owners(crashed)[0] != UNMAPPED).any()
    assert fleet.snapshot(crashed).blocks_reserved == 0 < fleet.snapshot(1 - crashed).blocks_reserved
    check_accounts(fleet)
    fleet.advance(20.0)
    for w in range(2):
        fleet.unreserve(w, kept[w])
        assert fleet.snapshot(w).blocks_reserved == 0
    check_accounts(fleet)
