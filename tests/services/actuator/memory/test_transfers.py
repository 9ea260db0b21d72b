"""Lanes, path tables and receipts."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.engine import Receipt
from schemas.movement import Moved
from services.actuator.memory.arrays import Arena, PrivateArena
from services.actuator.memory.errors import BadMoves
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.lanes import Lanes
from services.actuator.memory.mover import NumpyMover
from services.actuator.memory.paths import PathTable, fixed, measure, told
from services.actuator.memory.receipts import Ledger, Transfer

I8 = NDArray[np.int64]
GEOMETRY = Geometry(64, 1, 8)


class Meeting:
    """A mover whose outward transfer ends only when an inward one has started."""

    def __init__(self) -> None:
        self.back_runs = threading.Event()
        self.out_runs = threading.Event()
        self.names: list[str] = []

    def move(self, arena: Arena, moves: I8, *, asked_by: str = "") -> Transfer:
        raise NotImplementedError

    def out(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        self.out_runs.set()
        assert self.back_runs.wait(10), "the two directions do not run at the same time"
        self.names.append(asked_by)
        return Transfer("out", asked_by, 64, 1, "batch", 0.5)

    def back(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        self.back_runs.set()
        return Transfer("back", asked_by, 64, 1, "batch", 0.25)


def test_both_directions_of_the_link_run_at_once_and_each_in_order() -> None:
    mover = Meeting()
    lanes = Lanes(mover)
    lanes.start()
    arena, host, one = PrivateArena(GEOMETRY), PrivateArena(GEOMETRY), np.array([1], np.int64)
    outward = [lanes.out(arena, one, host, one, asked_by=name) for name in ("first", "second", "third")]
    lanes.back(arena, one, host, one).result(10)
    receipts = [future.result(10) for future in outward]
    lanes.close()
    assert mover.names == ["first", "second", "third"]
    assert [receipt.asked_by for receipt in receipts] == ["first", "second", "third"]


def test_a_receipt_tells_how_long_its_transfer_waited_behind_others() -> None:
    mover, now_s = Meeting(), [1.0]
    lanes = Lanes(mover, clock=lambda: now_s[0])
    lanes.start()
    arena, host, one = PrivateArena(GEOMETRY), PrivateArena(GEOMETRY), np.array([1], np.int64)
    first = lanes.out(arena, one, host, one)
    assert mover.out_runs.wait(10)
    second = lanes.out(arena, one, host, one)
    now_s[0] = 5.0
    mover.back_runs.set()
    assert (first.result(10).queue_s, second.result(10).queue_s) == (0.0, 4.0)
    lanes.close()


def test_an_error_reaches_who_asked_and_the_lane_goes_on() -> None:
    lanes = Lanes(NumpyMover(fixed("batch")))
    lanes.start()
    arena = PrivateArena(GEOMETRY)
    refused = lanes.move(arena, np.array([[0, 9]], np.int64))
    fine = lanes.move(arena, np.array([[0, 7]], np.int64), asked_by="a plan")
    with pytest.raises(BadMoves, match="outside"):
        refused.result(10)
    assert fine.result(10).asked_by == "a plan"
    lanes.close()


def test_closing_finishes_what_was_asked_for() -> None:
    lanes = Lanes(NumpyMover(fixed("batch")))
    with pytest.raises(RuntimeError, match="closed"):
        lanes.move(PrivateArena(GEOMETRY), np.array([[0, 7]], np.int64))
    lanes.start()
    futures = [lanes.move(PrivateArena(GEOMETRY), np.array([[0, 7]], np.int64)) for _ in range(20)]
    lanes.close()
    assert all(future.done() for future in futures)


def test_the_fastest_path_of_the_nearest_size_is_taken() -> None:
    table = PathTable((4096, 65536, 2 << 20), {"kernel": (9.0, 8.0, 7.0), "engine": (1.0, 7.9, 20.0)})
    assert table.best(100) == "kernel"
    assert table.best(65536) == "kernel"
    assert table.best(1 << 20) == "engine"
    assert table.rate(2 << 20) == 20.0
    assert told(table)["4096"] == "kernel 9.00 GB/s"


def test_paths_that_a_machine_lacks_are_not_chosen() -> None:
    def run(path: str, size: int) -> tuple[int, float]:
        if path == "absent":
            raise NotImplementedError
        return size, {"slow": 2.0, "fast": 1.0}[path] * size / 1e9

    table = measure(run, ("absent", "slow", "fast"), (4096, 65536))
    assert set(table.rates) == {"slow", "fast"}
    assert table.rates["slow"] == pytest.approx((0.5, 0.5))
    with pytest.raises(ValueError, match="absent"):
        measure(run, ("absent",))


def test_the_ledger_adds_up_by_kind_and_path() -> None:
    ledger = Ledger()
    for pieces in (10, 30):
        moved = Transfer("out", f"evict-{pieces}", 100_000 * pieces, pieces, "batch", 0.5, 0.25).moved()
        ledger.effect(Receipt(moved.asked_by, True, 0, 1.0, 0, 0, 0, 0, moved=(moved,)))
    out = ledger.transfers["out", "batch"]
    assert (out.transfers, out.bytes, out.pieces, out.seconds, out.queue_s) == (2, 4_000_000, 40, 1.0, 0.5)
    assert ledger.compactions == 0


def test_what_became_of_an_action_is_counted_with_its_transfers() -> None:
    ledger = Ledger()
    moved = (
        Transfer("move", "a@7.1", 4_096, 1, "batch", 0.5, 0.25).moved(scale=512),
        Moved("out", "batch", 8_192, 2, 0.5, 0.0, "engine", 512),
    )
    ledger.effect(
        Receipt("a@7.1", True, 0, 1.0, 0, 0, 0, 0, compacted_bytes=2 << 20, pages_freed=3, pause_us=9.0,
                lower_bound_bytes=1 << 20, dropped_moves=1, moved=moved)
    )  # fmt: skip
    ledger.effect(Receipt("b@7.1", True, 0, 1.0, 0, 0, 0, 0, evicted_bytes=4 << 20))
    assert {key: sums.bytes for key, sums in ledger.transfers.items()} == {
        ("move", "batch"): 4_096,
        ("out", "batch"): 8_192,
    }, "bytes of the arena, and no sum for each action there ever was"
    assert ledger.transfers["move", "batch"].queue_s == 0.25
    assert (ledger.compactions, ledger.groups_freed, ledger.moved_bytes) == (1, 3, 2 << 20)
    assert (ledger.lower_bound_bytes, ledger.dropped_moves, ledger.longest_pause_us) == (1 << 20, 1, 9.0)


def test_a_rate_is_payload_over_time() -> None:
    assert Transfer("out", "", 2_000_000_000, 1, "batch", 0.5).gb_per_s == 4.0
    assert Transfer("out", "", 0, 0, "batch", 0.0).gb_per_s == 0.0
