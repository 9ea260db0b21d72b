"""The tier in host memory: bytes come back as they left, or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from services.actuator.memory.errors import BadMoves, UnknownTicket
from services.actuator.memory.tier import Rate
from services.actuator.memory.tier_errors import TornSlot, UnknownEntry
from tests.services.actuator.memory.tiers.places import blocks, card, host


def test_bytes_come_back_as_they_left() -> None:
    arena, tier = card(), host()
    put = tier.prepare_put(1, 3)
    tier.write(put, arena, blocks(5, 2, 9))
    tier.commit_put(put)
    before = arena.read(blocks(5, 2, 9))
    get = tier.prepare_get(1)
    tier.read(get, arena, blocks(20, 21, 22))
    tier.commit_get(get, keep=False)
    assert np.array_equal(arena.read(blocks(20, 21, 22)), before)
    with pytest.raises(UnknownEntry):
        tier.prepare_get(1)


def test_a_session_that_grew_copies_only_its_new_blocks() -> None:
    arena, tier = card(), host()
    put = tier.prepare_put(1, 2)
    tier.write(put, arena, blocks(0, 1))
    tier.commit_put(put)
    grown = tier.prepare_put(1, 4, keep=2)
    assert tier.write(grown, arena, blocks(2, 3)).pieces == 2
    tier.commit_put(grown)
    get = tier.prepare_get(1)
    tier.read(get, arena, blocks(10, 11, 12, 13))
    assert np.array_equal(arena.read(blocks(10, 11, 12, 13)), arena.read(blocks(0, 1, 2, 3)))


def test_changed_bytes_are_found_and_never_served_again() -> None:
    arena, tier = card(), host()
    put = tier.prepare_put(1, 2)
    tier.write(put, arena, blocks(0, 1))
    tier.commit_put(put)
    one, other = tier.prepare_get(1), tier.prepare_get(1)
    tier.arena.write(blocks(put.slots[1]), np.zeros((1, tier.block_bytes), dtype=np.uint8))
    with pytest.raises(TornSlot) as torn:
        tier.read(one, arena, blocks(10, 11))
    assert (torn.value.slot, torn.value.torn) == (put.slots[1], 1)
    tier.commit_get(other, keep=True)
    assert tier.account.held(1) is None, "a torn entry goes with its last reader, asked to keep or not"
    assert tier.account.free == tier.account.capacity


def test_blocks_and_slots_must_be_as_many() -> None:
    arena, tier = card(), host()
    put = tier.prepare_put(1, 2)
    with pytest.raises(BadMoves):
        tier.write(put, arena, blocks(0))
    tier.abort(put)
    with pytest.raises(UnknownTicket):
        tier.write(put, arena, blocks(0, 1))


def test_a_rate_follows_what_was_measured() -> None:
    rate = Rate(25e9)
    rate.saw(1000, 1.0)
    assert rate.bytes_per_s == 25e9, "small transfers tell of latency"
    rate.saw(10**9, 0.1)
    assert rate.bytes_per_s == pytest.approx(10e9)
    for _ in range(20):
        rate.saw(10**9, 1.0)
    assert rate.bytes_per_s == pytest.approx(1e9, rel=0.02)
