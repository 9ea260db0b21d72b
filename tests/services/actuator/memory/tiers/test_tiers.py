"""Host and file together: where a session's KV is, and that nothing is lost on its way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from services.actuator.memory.disk_tier import DiskTier
from services.actuator.memory.errors import IllegalTransition
from services.actuator.memory.states import SessionState
from services.actuator.memory.tier_errors import TierFull, TornSlot, UnknownEntry
from services.actuator.memory.tiers import Tiers
from tests.services.actuator.memory.tiers.places import BLOCK_BYTES, blocks, card, host

DISK_BYTES = 2 * 4096 + 9 * 8192


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier.open(tmp_path / "tier", BLOCK_BYTES, DISK_BYTES)
    yield tier
    tier.close()


def put(tiers: Tiers, key: int, *numbers: int) -> int:
    passage = tiers.prepare_put(key, len(numbers))
    tiers.write(passage, card(), blocks(*numbers))
    tiers.commit_put(passage)
    return passage.tier


def served(tiers: Tiers, key: int, count: int) -> np.ndarray:
    arena, rows = card(seed=1), np.arange(count, dtype=np.int64)
    passage = tiers.prepare_get(key)
    tiers.read(passage, arena, rows)
    tiers.commit_get(passage, keep=True)
    return arena.read(rows)


def test_what_does_not_fit_the_host_goes_to_the_disk_and_then_nowhere(disk: DiskTier) -> None:
    tiers = Tiers([host(4), disk])
    assert [put(tiers, 1, 0, 1, 2), put(tiers, 2, 3, 4, 5)] == [0, 1]
    room = disk.account.free + 1
    assert not tiers.accepts(room + 1)
    with pytest.raises(TierFull) as full:
        tiers.prepare_put(3, room + 1)
    assert full.value.free == room
    assert tiers.refused == 1
    for key, numbers in ((1, (0, 1, 2)), (2, (3, 4, 5))):
        assert np.array_equal(served(tiers, key, 3), card().read(blocks(*numbers)))


def test_a_session_is_leaving_then_away_then_returning(disk: DiskTier) -> None:
    tiers = Tiers([host(4), disk])
    assert tiers.place(1) is None
    passage = tiers.prepare_put(1, 2)
    states = [tiers.place(1)]
    with pytest.raises(IllegalTransition):
        tiers.prepare_put(1, 2)
    tiers.write(passage, card(), blocks(0, 1))
    tiers.commit_put(passage)
    states.append(tiers.place(1))
    passage = tiers.prepare_get(1)
    states.append(tiers.place(1))
    tiers.commit_get(passage, keep=False)
    assert [place.state for place in states if place] == [
        SessionState.LEAVING,
        SessionState.AWAY,
        SessionState.RETURNING,
    ]
    assert tiers.place(1) is None


def test_demotion_makes_room_and_keeps_the_bytes(disk: DiskTier) -> None:
    tiers = Tiers([host(4), disk])
    put(tiers, 1, 6, 7, 8)
    tiers.demote(1)
    place = tiers.place(1)
    assert place
    assert (place.tier, place.slots) == (1, 3)
    assert tiers.tiers[0].accepts(4)
    assert np.array_equal(served(tiers, 1, 3), card().read(blocks(6, 7, 8)))
    with pytest.raises(UnknownEntry):
        tiers.demote(1)


def test_a_newer_copy_replaces_older_ones_everywhere(disk: DiskTier) -> None:
    tiers = Tiers([host(4), disk])
    put(tiers, 1, 0, 1)
    tiers.demote(1)
    assert put(tiers, 1, 9, 10) == 0
    assert disk.account.held(1) is None
    assert np.array_equal(served(tiers, 1, 2), card().read(blocks(9, 10)))


def test_a_session_that_grew_adds_its_new_blocks_in_the_host(disk: DiskTier) -> None:
    tiers = Tiers([host(4), disk])
    put(tiers, 1, 0, 1)
    passage = tiers.prepare_put(1, 3, keep=2)
    assert (passage.ticket.first, len(passage.ticket.slots)) == (2, 1)
    tiers.abort(passage)
    assert np.array_equal(served(tiers, 1, 2), card().read(blocks(0, 1)))


@pytest.mark.parametrize("step", ["prepare_put", "write", "commit_put"])
def test_a_demotion_that_fails_anywhere_leaves_it_in_the_host(
    disk: DiskTier, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    tiers = Tiers([host(4), disk])
    put(tiers, 1, 0, 1)

    def fails(*_: object, **__: object) -> Callable[[], None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, step, fails)
    with pytest.raises(KeyboardInterrupt):
        tiers.demote(1)
    assert disk.account.free == disk.account.capacity
    assert np.array_equal(served(tiers, 1, 2), card().read(blocks(0, 1)))


def test_damaged_bytes_are_not_carried_on(disk: DiskTier) -> None:
    memory = host(4)
    tiers = Tiers([memory, disk])
    put(tiers, 1, 0, 1)
    memory.arena.write(blocks(0), np.zeros((1, BLOCK_BYTES), dtype=np.uint8))
    with pytest.raises(TornSlot):
        tiers.demote(1)
    assert tiers.place(1) is None


def test_a_demotion_into_a_full_disk_changes_nothing(disk: DiskTier) -> None:
    tiers = Tiers([host(16), disk])
    put(tiers, 1, *range(12))
    with pytest.raises(TierFull):
        tiers.demote(1)
    assert np.array_equal(served(tiers, 1, 12), card().read(np.arange(12)))


def test_tiers_need_blocks_of_one_size(disk: DiskTier) -> None:
    disk.block_bytes = 4096
    with pytest.raises(ValueError, match="one size"):
        Tiers([host(4), disk])
