"""Movers on the CPU: NumPy's, and the GPU's with its kernels compiled for the CPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from services.actuator.memory.arrays import PrivateArena
from services.actuator.memory.calibration import calibrate, fewest
from services.actuator.memory.device_mover import DeviceMover, Tables
from services.actuator.memory.errors import BadGeometry, SegmentGone
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import Mover, NumpyMover, measure_paths
from services.actuator.memory.paths import fixed
from tests.services.actuator.memory.cpu_device import CpuDevice, CpuDeviceArena, ScratchArena, compile_kernels
from tests.services.actuator.memory.moving import Machine, MoverContract, everything, filled


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(Path(tmp_path_factory.mktemp("kernels")))


def tables(path: str, in_card: str | None = None) -> Tables:
    return Tables(fixed(in_card or path), fixed(path), fixed(path), 3)


class TestNumpyMover(MoverContract):
    @pytest.fixture(params=["batch", "streamed", "copies"])
    def machine(self, request: pytest.FixtureRequest) -> Machine:
        return Machine(NumpyMover(fixed(request.param)), PrivateArena, PrivateArena)

    def test_a_closed_arena_is_not_touched(self) -> None:
        geometry = Geometry(64, 1, 4)
        arena, host = PrivateArena(geometry), PrivateArena(geometry)
        host.close()
        one = np.array([0], np.int64)
        with pytest.raises(SegmentGone, match="closed"):
            NumpyMover(fixed("batch")).out(arena, one, host, one)

    def test_blocks_that_do_not_fit_the_streaming_copy_go_another_way(self) -> None:
        mover, one = NumpyMover(fixed("streamed")), np.array([1], np.int64)
        for block_bytes, path in ((128, "streamed"), (96, "batch")):
            arena, host = PrivateArena(Geometry(block_bytes, 1, 4)), PrivateArena(Geometry(block_bytes, 1, 4))
            assert mover.out(arena, one, host, one).path == path

    def test_the_start_up_measurement_knows_the_paths_of_the_cpu(self) -> None:
        table = measure_paths((65536,))
        assert set(table.rates) == {"batch", "streamed", "copies"}
        assert table.rate(65536) > 0


class TestDeviceMover(MoverContract):
    """``staged`` and ``sm`` are kernels of kernels.cu, run thread by thread."""

    @pytest.fixture(params=["sm", "staged", "batch", "copies", "sm falling", "staged without batch"])
    def machine(self, request: pytest.FixtureRequest, kernels: ctypes.CDLL) -> Machine:
        path, *rest = request.param.split()
        device = CpuDevice(kernels, falling="falling" in rest, batch="without" not in rest)
        in_card = "sm" if path == "staged" else path
        # Room for a few blocks only, so that staging takes several rounds.
        mover = DeviceMover(device, tables(path, in_card), staging_bytes=150_000)
        return Machine(mover, CpuDeviceArena, PrivateArena)

    def test_a_plan_is_one_launch(self, kernels: ctypes.CDLL) -> None:
        device = CpuDevice(kernels)
        arena = CpuDeviceArena(Geometry(4096, 4, 50))
        moves = np.random.default_rng(1).permutation(200).reshape(100, 2).astype(np.int64)
        DeviceMover(device, tables("sm")).move(arena, moves)
        assert device.calls == ["move_blocks"]

    def test_batched_copies_are_one_call(self, kernels: ctypes.CDLL) -> None:
        device = CpuDevice(kernels)
        geometry = Geometry(4096, 4, 50)
        order = np.random.default_rng(1).permutation(200).astype(np.int64)
        mover = DeviceMover(device, tables("batch"))
        mover.out(CpuDeviceArena(geometry), order, PrivateArena(geometry), order[::-1].copy())
        assert device.calls == ["copy_batch"]

    def test_staging_makes_one_long_copy_of_many_small_pieces(self, kernels: ctypes.CDLL) -> None:
        device = CpuDevice(kernels)
        geometry = Geometry(4096, 4, 50)
        blocks = np.random.default_rng(1).permutation(200)[:64].astype(np.int64)
        mover = DeviceMover(device, tables("staged"))
        mover.out(CpuDeviceArena(geometry), blocks, PrivateArena(geometry), np.arange(64))
        assert device.calls == ["gather_blocks", "copy"]

    def test_a_failed_transfer_has_nothing_under_way_when_its_error_arrives(
        self, kernels: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        device = CpuDevice(kernels)
        copy, waits = device.copy, []

        def fail_later(target: int, source: int, size: int, stream: object) -> None:
            if device.calls:
                raise RuntimeError("the link is down")
            copy(target, source, size, stream)

        monkeypatch.setattr(device, "copy", fail_later)
        monkeypatch.setattr(device, "synchronize", lambda stream: waits.append(list(device.calls)))
        geometry, blocks = Geometry(4096, 1, 8), np.array([1, 3, 5], np.int64)
        with pytest.raises(RuntimeError, match="link is down"):
            DeviceMover(device, tables("copies")).out(CpuDeviceArena(geometry), blocks, PrivateArena(geometry), blocks)
        assert waits == [["copy"]], "the copy that had started is waited for before anybody can abort"

    def test_pageable_memory_is_never_given_to_a_kernel(self, kernels: ctypes.CDLL) -> None:
        device = CpuDevice(kernels)
        geometry = Geometry(4096, 1, 4)
        one = np.array([0], np.int64)
        mover = DeviceMover(device, tables("sm"), pinned=False)
        with pytest.raises(NotImplementedError, match="pinned"):
            mover.out(CpuDeviceArena(geometry), one, PrivateArena(geometry), one)
        assert device.calls == []

    def test_arenas_on_the_wrong_side_are_refused(self, kernels: ctypes.CDLL) -> None:
        geometry = Geometry(4096, 1, 4)
        one = np.array([0], np.int64)
        with pytest.raises(BadGeometry, match="place"):
            DeviceMover(CpuDevice(kernels), tables("sm")).out(PrivateArena(geometry), one, PrivateArena(geometry), one)

    def test_the_start_up_measurement_leaves_out_what_the_machine_lacks(self, kernels: ctypes.CDLL) -> None:
        near, far = np.zeros(1 << 20, np.uint8), np.zeros(1 << 20, np.uint8)
        measured = calibrate(
            CpuDevice(kernels, batch=False),
            partial(ScratchArena, scratch=near, on_device=True),
            partial(ScratchArena, scratch=far, on_device=False),
            pinned=False,
            scratch_bytes=1 << 20,
            piece_bytes=(4096, 65536),
        )
        assert set(measured.in_card.rates) == {"sm", "copies"}, "no batched copies in this driver"
        assert set(measured.out.rates) == {"copies"}, "kernels cannot reach pageable memory"
        assert measured.thread_blocks in (1, 2, 4, 8)

    def test_the_fewest_thread_blocks_that_are_nearly_as_fast_win(self) -> None:
        assert fewest({33: 1000.0, 66: 1900.0, 132: 2000.0, 264: 2010.0}) == 66


@pytest.mark.parametrize("make", [NumpyMover, None])
def test_contiguous_and_scattered_moves_give_the_same_bytes(
    make: Callable[..., Mover] | None, kernels: ctypes.CDLL
) -> None:
    mover = make(fixed("batch")) if make else DeviceMover(CpuDevice(kernels), tables("sm"))
    geometry = Geometry(48, 8, 8)
    arena = CpuDeviceArena(geometry)
    expected = filled(arena, 9)
    moves = np.stack((np.arange(0, 24), np.arange(40, 64)), axis=1)
    mover.move(arena, moves[np.random.default_rng(0).permutation(24)])
    expected[40:64] = expected[0:24]
    np.testing.assert_array_equal(everything(arena), expected)
