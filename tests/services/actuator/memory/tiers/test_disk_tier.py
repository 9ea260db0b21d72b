"""The tier in a file: torn writes, full disks, restarts, other people's files."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest

from services.actuator.memory.disk_file import SlotFile
from services.actuator.memory.disk_format import PAGE, Layout, layout_within
from services.actuator.memory.disk_tier import DiskTier
from services.actuator.memory.errors import BadGeometry, BadMoves
from services.actuator.memory.slots import Entry
from services.actuator.memory.tier_errors import NotATier, TierFailed, TierFull, TornSlot, UnknownEntry
from tests.services.actuator.memory.tiers.places import BLOCK_BYTES, blocks, card

LIMIT_BYTES = 200_000


class LimitedFile(SlotFile):
    """A file on a disk that is full beyond ``limit`` bytes, or broken."""

    limit = 1 << 60
    broken = 0

    def write_at(self, offset: int, data: memoryview) -> None:
        if self.broken:
            raise OSError(self.broken, "as the test wants")
        if offset + len(data) > self.limit:
            raise OSError(errno.ENOSPC, "as the test wants")
        super().write_at(offset, data)

    def free_bytes(self) -> int:
        return 1 << 40 if self.limit == 1 << 60 else 0


class Hours:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def put(tier: DiskTier, key: int, *numbers: int) -> Entry:
    ticket = tier.prepare_put(key, len(numbers))
    tier.write(ticket, card(), blocks(*numbers))
    return tier.commit_put(ticket)


def served(tier: DiskTier, key: int, count: int) -> np.ndarray:
    arena = card(seed=1)
    places = np.arange(count, dtype=np.int64)
    ticket = tier.prepare_get(key)
    tier.read(ticket, arena, places)
    tier.commit_get(ticket, keep=True)
    return arena.read(places)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


def test_bytes_come_back_as_they_left_also_after_a_restart(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    entry = put(tier, 1, 3, 1, 2)
    assert np.array_equal(served(tier, 1, 3), card().read(blocks(3, 1, 2)))
    tier.close()
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known={1: entry.sequence})
    assert again.recovered.kept == (1,)
    assert np.array_equal(served(again, 1, 3), card().read(blocks(3, 1, 2)))
    again.account.check()


def test_the_file_stays_within_its_limit(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    for key in range(tier.account.capacity):
        put(tier, key, 0)
    assert path.stat().st_size <= LIMIT_BYTES
    assert not tier.accepts(1)
    with pytest.raises(TierFull):
        tier.prepare_put(99, 1)
    with pytest.raises(BadGeometry):
        layout_within(BLOCK_BYTES, 3 * PAGE)


def test_what_nobody_knows_any_more_is_reclaimed(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    old = put(tier, 1, 1, 2)
    put(tier, 1, 3, 4)  # a newer copy under the same key
    other = put(tier, 2, 5)
    tier.close()
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known={1: old.sequence})
    assert again.recovered.kept == ()
    assert again.recovered.reclaimed_slots == 3
    assert again.account.free == again.account.capacity
    assert put(again, 3, 6).sequence > other.sequence, "no sequence is used twice"


def test_a_put_that_was_not_committed_is_not_there_after_a_restart(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    ticket = tier.prepare_put(1, 3)
    tier.write(ticket, card(), blocks(0, 1, 2))
    tier.close()
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known={1: ticket.sequence})
    assert again.recovered.kept == ()
    assert again.recovered.torn_slots == 2
    assert again.account.free == again.account.capacity


def test_what_was_dropped_stays_dropped(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    entry = put(tier, 1, 0, 1)
    tier.drop(1)
    tier.close()
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known={1: entry.sequence})
    assert again.recovered.kept == ()
    assert put(again, 1, 0).sequence > entry.sequence


@pytest.mark.parametrize("damage", ["payload", "header", "cut short"])
def test_torn_slots_are_never_served(path: Path, damage: str) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    entry = put(tier, 1, 0, 1)
    whole = put(tier, 2, 5)
    layout = tier.layout
    with path.open("r+b") as file:
        slot = entry.slots[1]
        if damage == "cut short":
            file.truncate(layout.slot_at(slot) + 100)
        else:
            file.seek(layout.slot_at(slot) + 4500 if damage == "payload" else layout.header_at(slot) + 20)
            file.write(b"torn")
    if damage != "header":
        with pytest.raises(TornSlot) as torn:
            served(tier, 1, 2)
        assert torn.value.slot == slot
        assert tier.account.held(1) is None
    tier.close()
    known = {1: entry.sequence, 2: whole.sequence}
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, known=known)
    assert again.account.held(1) is None
    with pytest.raises(UnknownEntry):
        again.prepare_get(1)
    if damage != "cut short":
        assert np.array_equal(served(again, 2, 1), card().read(blocks(5)))


def test_a_full_disk_is_back_pressure_and_what_has_its_space_still_serves(path: Path) -> None:
    clock = Hours()
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, retry_s=30, clock=clock, open_file=LimitedFile.open)
    file = tier._file
    assert isinstance(file, LimitedFile)
    put(tier, 1, 0, 1)
    file.limit = tier.layout.slot_at(4)
    with pytest.raises(TierFull) as full:
        put(tier, 2, 2, 3, 4, 5)
    assert full.value.reason == "disk full"
    tier.account.check()
    assert not tier.account.filling(2), "the put was aborted"
    assert not tier.accepts(1), "evict is masked until something changes"
    assert np.array_equal(served(tier, 1, 2), card().read(blocks(0, 1)))
    tier.drop(1)
    assert tier.accepts(2), "slots that have their space can be used again"
    assert not tier.accepts(3)
    put(tier, 3, 7, 8)
    clock.now_s = 31.0
    assert not tier.accepts(1), "the disk is still full"
    file.limit = 1 << 60
    clock.now_s = 40.0
    assert not tier.accepts(1), "asked at most every 30 s"
    clock.now_s = 62.0
    assert tier.accepts(4)
    put(tier, 2, 2, 3, 4, 5)


def test_other_refusals_of_the_system_carry_their_number(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES, open_file=LimitedFile.open)
    assert isinstance(tier._file, LimitedFile)
    tier._file.broken = errno.EIO
    with pytest.raises(TierFailed) as failed:
        put(tier, 1, 0)
    assert failed.value.number == errno.EIO
    assert tier.account.free == tier.account.capacity


def test_a_commit_needs_its_bytes(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    ticket = tier.prepare_put(1, 1)
    with pytest.raises(BadMoves):
        tier.commit_put(ticket)
    with pytest.raises(BadGeometry):
        tier.prepare_put(2, 2, keep=1)


def test_other_peoples_files_are_not_touched(path: Path) -> None:
    path.write_bytes(b"a letter to my mother")
    with pytest.raises(NotATier):
        DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    assert path.read_bytes() == b"a letter to my mother"


def test_a_file_serves_one_process(path: Path) -> None:
    DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES).close()
    held = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    with pytest.raises(NotATier):
        DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    held.close()


def test_a_file_of_another_layout_is_begun_anew(path: Path) -> None:
    tier = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES)
    entry = put(tier, 1, 0)
    tier.close()
    again = DiskTier.open(path, BLOCK_BYTES, LIMIT_BYTES // 2, known={1: entry.sequence})
    assert again.recovered.rebuilt
    assert again.account.held(1) is None


def test_the_layout_uses_its_limit() -> None:
    layout = layout_within(65536, 1 << 30)
    assert layout.file_bytes <= 1 << 30 < Layout(65536, layout.slots + 1).file_bytes
