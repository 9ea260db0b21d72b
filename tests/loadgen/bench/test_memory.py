"""The memory benchmark's keys and what it compares. Its figures are not tested: a benchmark is no timed test."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.bench.memory import bench_memory, scattered_moves
from loadgen.bench.memory_machines import NumpyMachine, machine
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import checked_moves
from services.errors import UserError


def test_every_key_of_the_contract_is_there_with_a_number() -> None:
    figures = bench_memory(backend="numpy", size_bytes=16 << 20, rounds=1, planning_rounds=1)
    assert figures["backend"] == "numpy"
    numbers = [figures[key] for key in ("compaction_ratio", "plan_ms_100k_blocks", "pause_us", "step_delta_pct")]
    for direction in ("d2h", "h2d", "bidir"):
        assert set(figures["swap"][direction]) == {"4KiB", "16KiB", "64KiB", "2MiB"}
        numbers.extend(piece["ratio"] for piece in figures["swap"][direction].values())
    assert np.isfinite(numbers).all()
    assert (np.array(numbers[:3]) > 0).all()


def test_the_moves_are_a_plan_that_no_mover_refuses() -> None:
    moves = scattered_moves(256, 0)
    checked_moves(moves, Geometry(65536, 64, 4))
    assert len(moves) == 128


def test_plain_copies_of_both_directions_do_not_meet() -> None:
    on = NumpyMachine(1 << 20)
    whole = Geometry(1 << 19, 1, 2)
    card, host, both = on.card(whole), on.host(whole), np.arange(2)
    card.write(both, np.stack((np.full(1 << 19, 1, np.uint8), np.full(1 << 19, 2, np.uint8))))
    host.write(both, np.stack((np.full(1 << 19, 3, np.uint8), np.full(1 << 19, 4, np.uint8))))
    on.plain_link(1 << 19, ("out", "back"))
    assert host.read(both)[:, 0].tolist() == [1, 4]
    assert card.read(both)[:, 0].tolist() == [1, 4]


def test_an_unknown_backend_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="expected auto, numpy or cupy"):
        machine("tpu", 1 << 20)
