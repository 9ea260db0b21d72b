"""What every mover must do, whatever its backend: test_mover.py runs it on the CPU, tests/gpu on a GPU.

A test class that inherits :class:`MoverContract` has a fixture ``machine``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.errors import BadGeometry, BadMoves
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import Mover

I8 = NDArray[np.int64]


class Machine:
    """A mover, and arenas of the kind that it moves."""

    def __init__(self, mover: Mover, card: Callable[[Geometry], Arena], host: Callable[[Geometry], Arena]) -> None:
        self.mover = mover
        self.card = card
        self.host = host


def filled(arena: Arena, seed: int) -> NDArray[np.uint8]:
    """Fill an arena with noise and return what every block now holds."""
    geometry = arena.geometry
    noise = np.random.default_rng(seed).integers(0, 256, (geometry.blocks, geometry.block_bytes), dtype=np.uint8)
    arena.write(np.arange(geometry.blocks), noise)
    return noise


def everything(arena: Arena) -> NDArray[np.uint8]:
    return arena.read(np.arange(arena.geometry.blocks))


def plan(geometry: Geometry, count: int, seed: int) -> I8:
    order = np.random.default_rng(seed).permutation(geometry.blocks)[: 2 * count]
    return np.ascontiguousarray(order.reshape(2, count).T, np.int64)


class MoverContract:
    @pytest.mark.parametrize("block_bytes", [1, 3, 4, 12, 16, 48, 100, 4096, 16400, 65536, 65540])
    def test_moves_bring_each_block_to_its_destination_and_touch_no_other(
        self, machine: Machine, block_bytes: int
    ) -> None:
        geometry = Geometry(block_bytes, 4, 11)
        arena = machine.card(geometry)
        expected = filled(arena, 1)
        moves = plan(geometry, 17, 2)
        done = machine.mover.move(arena, moves, asked_by="a test")
        expected[moves[:, 1]] = expected[moves[:, 0]]
        np.testing.assert_array_equal(everything(arena), expected)
        assert (done.kind, done.asked_by, done.pieces, done.bytes) == ("move", "a test", 17, 17 * block_bytes)
        assert done.path
        assert done.seconds > 0

    @pytest.mark.parametrize("block_bytes", [1, 12, 16, 1000, 4096, 65536])
    def test_what_goes_out_comes_back_the_same_into_other_blocks(self, machine: Machine, block_bytes: int) -> None:
        geometry = Geometry(block_bytes, 1, 40)
        arena, host = machine.card(geometry), machine.host(Geometry(block_bytes, 1, 31))
        card_bytes, host_bytes = filled(arena, 3), filled(host, 4)
        rng = np.random.default_rng(5)
        blocks, slots, later = rng.permutation(40)[:23], rng.permutation(31)[:23], rng.permutation(40)[:23]
        kept = arena.checksum(blocks)
        machine.mover.out(arena, blocks, host, slots)
        host_bytes[slots] = card_bytes[blocks]
        np.testing.assert_array_equal(everything(host), host_bytes)
        machine.mover.back(arena, later, host, slots, asked_by="a return")
        card_bytes[later] = host_bytes[slots]
        np.testing.assert_array_equal(everything(arena), card_bytes)
        np.testing.assert_array_equal(arena.checksum(later), kept, "a checksum belongs to bytes, not to their place")
        np.testing.assert_array_equal(host.checksum(slots), kept, "both sides of the link compute the same checksum")

    def test_neighbours_go_together_and_the_receipt_still_counts_blocks(self, machine: Machine) -> None:
        geometry = Geometry(4096, 1, 64)
        arena, host = machine.card(geometry), machine.host(geometry)
        expected = filled(arena, 6)
        blocks = np.arange(20, 60)
        done = machine.mover.out(arena, blocks, host, np.arange(40))
        np.testing.assert_array_equal(host.read(np.arange(40)), expected[20:60])
        assert done.pieces == 40

    def test_an_empty_plan_is_nothing(self, machine: Machine) -> None:
        geometry = Geometry(64, 1, 4)
        arena, none = machine.card(geometry), np.empty(0, np.int64)
        assert machine.mover.move(arena, np.empty((0, 2), np.int64)).bytes == 0
        assert machine.mover.out(arena, none, machine.host(geometry), none).bytes == 0

    @pytest.mark.parametrize(
        ("moves", "reason"),
        [
            ([[0, 5], [1, 5]], "destinations used twice"),
            ([[0, 5], [5, 6]], "sources that are destinations too"),
            ([[0, 0]], "sources that are destinations too"),
            ([[0, 5], [0, 6]], "sources moved twice"),
            ([[0, 8]], "destinations outside the arena"),
            ([[-1, 5]], "sources outside the arena"),
        ],
    )
    def test_moves_that_overlap_or_leave_the_arena_touch_nothing(
        self, machine: Machine, moves: list[list[int]], reason: str
    ) -> None:
        arena = machine.card(Geometry(32, 2, 4))
        before = filled(arena, 7)
        with pytest.raises(BadMoves, match=reason) as raised:
            machine.mover.move(arena, np.array(moves, np.int64))
        assert raised.value.count >= 1
        np.testing.assert_array_equal(everything(arena), before)

    def test_a_plan_of_another_shape_is_refused(self, machine: Machine) -> None:
        arena = machine.card(Geometry(32, 2, 4))
        with pytest.raises(BadMoves, match=r"int64 \[n, 2\]"):
            machine.mover.move(arena, np.array([0, 5], np.int64))

    def test_transfers_check_both_sides(self, machine: Machine) -> None:
        arena, host = machine.card(Geometry(32, 1, 4)), machine.host(Geometry(32, 1, 4))
        one, two = np.array([1], np.int64), np.array([1, 1], np.int64)
        with pytest.raises(BadMoves, match="differ in number"):
            machine.mover.out(arena, one, host, two)
        with pytest.raises(BadMoves, match="written twice"):
            machine.mover.back(arena, two, host, np.array([0, 2], np.int64))
        with pytest.raises(BadMoves, match="outside the host arena"):
            machine.mover.out(arena, one, host, np.array([4], np.int64))
        with pytest.raises(BadGeometry, match="block_bytes"):
            machine.mover.out(arena, one, machine.host(Geometry(64, 1, 4)), one)
