"""Moving named blocks: accounts stay true, owners keep as many blocks, emptied groups go back."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.relocation import FREE
from loadgen.engine.specs import FleetConfig
from loadgen.load import tables_at
from loadgen.workload import builtin
from tests.loadgen.engine.accounts import check_accounts


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
