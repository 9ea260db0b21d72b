"""The GPU's arenas and mover: the CPU's suite once more, and what only a GPU has."""

from __future__ import annotations

import subprocess
import sys
import uuid
from functools import partial
from typing import Any

import numpy as np
import pytest

from services.actuator.memory.arrays import SharedArena, host_geometry
from services.actuator.memory.calibration import calibrate
from services.actuator.memory.device_mover import DeviceMover, Tables
from services.actuator.memory.errors import BadGeometry, SegmentGone
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.paths import fixed
from tests.services.actuator.memory.moving import Machine, MoverContract, everything, filled

pytestmark = pytest.mark.gpu

GEOMETRY = Geometry(65536, 4, 16)


def tables(path: str) -> Tables:
    return Tables(fixed("sm" if path == "staged" else path), fixed(path), fixed(path), 64)


class TestCupyMover(MoverContract):
    @pytest.fixture(params=["sm", "staged", "batch", "copies"])
    def machine(self, request: pytest.FixtureRequest, device: Any) -> Machine:
        from services.actuator.memory.cupy_arrays import CupyArena, HostArena

        if request.param == "batch" and not device.has_batch:
            pytest.skip("this driver has no cuMemcpyBatchAsync (CUDA 12.8 and newer)")
        mover = DeviceMover(device, tables(request.param), staging_bytes=1 << 20)

        def host(geometry: Geometry) -> Any:
            return HostArena.allocate(device, geometry.block_bytes, geometry.blocks)

        return Machine(mover, partial(CupyArena.private, device), host)


def test_the_start_up_measurement_finds_a_path_for_every_size(device: Any) -> None:
    from services.actuator.memory.cupy_arrays import CupyArena, HostArena

    room = Geometry(1 << 20, 1, 16)
    card, host = CupyArena.private(device, room), HostArena.allocate(device, 1 << 20, 16)

    def on_card(geometry: Geometry) -> CupyArena:
        flat = card.view.reshape(-1)[: geometry.arena_bytes]
        return CupyArena(device, geometry, flat.reshape(geometry.blocks, geometry.block_bytes))

    def on_host(geometry: Geometry) -> HostArena:
        flat = host.view.reshape(-1)[: geometry.arena_bytes]
        return HostArena(geometry, flat.reshape(geometry.blocks, geometry.block_bytes), host.receipt)

    measured = calibrate(device, on_card, on_host, pinned=host.pinned, scratch_bytes=16 << 20)
    assert {"sm", "copies"} <= set(measured.in_card.rates)
    assert ("batch" in measured.out.rates) == device.has_batch
    assert all(rate > 0 for rates in measured.back.rates.values() for rate in rates)


def test_an_arena_over_the_engines_tensor_is_the_tensor(device: Any) -> None:
    torch = pytest.importorskip("torch", reason="no torch: no engine's tensor to look at")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA: no engine's tensor to look at")
    from services.actuator.memory.cupy_arrays import CupyArena

    tensor = torch.zeros((64, 16, 8, 128), dtype=torch.float16, device=f"cuda:{device.number}")
    arena = CupyArena.over(device, Geometry(32768, 4, 16), tensor)
    filled(arena, 1)
    moves = np.array([[3, 40], [4, 41]], np.int64)
    DeviceMover(device, tables("sm")).move(arena, moves)
    assert torch.equal(tensor[3].view(torch.uint8), tensor[40].view(torch.uint8))
    with pytest.raises(BadGeometry, match="bytes of the tensor"):
        CupyArena.over(device, Geometry(32768, 4, 15), tensor)


def test_another_process_opens_a_plain_allocation_by_its_handle(device: Any) -> None:
    from services.actuator.memory.cupy_arrays import CupyArena

    arena = CupyArena.private(device, GEOMETRY)
    filled(arena, 2)
    script = (
        "import sys, numpy as np\n"
        "from services.actuator.memory.cupy_arrays import CupyArena, CupyDevice\n"
        "from services.actuator.memory.geometry import Geometry\n"
        "arena = CupyArena.opened(CupyDevice(int(sys.argv[1])), Geometry(65536, 4, 16), bytes.fromhex(sys.argv[2]))\n"
        "print(*arena.checksum(np.arange(64)).tolist())\n"
        "arena.close()\n"
    )
    command = [sys.executable, "-c", script, str(device.number), arena.handle.hex()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [int(one) for one in done.stdout.split()] == arena.checksum(np.arange(64)).tolist()


def test_a_handle_that_means_nothing_is_a_typed_error(device: Any) -> None:
    from services.actuator.memory.cupy_arrays import CupyArena

    with pytest.raises(SegmentGone, match="IPC handle"):
        CupyArena.opened(device, GEOMETRY, bytes(64))


def test_a_shared_host_arena_can_be_pinned_where_it_lies(device: Any) -> None:
    from services.actuator.memory.cupy_arrays import CupyArena, register, unregister

    arena = CupyArena.private(device, GEOMETRY)
    expected = filled(arena, 3)
    host = SharedArena.create(f"tidegate-test-{uuid.uuid4().hex}", host_geometry(65536, 64))
    try:
        assert register(device, host)
        order = np.random.default_rng(4).permutation(64)
        DeviceMover(device, tables("sm")).out(arena, np.arange(64), host, order)
        np.testing.assert_array_equal(everything(host)[order], expected)
        unregister(device, host)
    finally:
        host.unlink()


def test_more_device_memory_than_there_is_is_a_memory_error(device: Any) -> None:
    from services.actuator.memory.cupy_arrays import CupyArena

    with pytest.raises(MemoryError, match="device memory"):
        CupyArena.private(device, Geometry(1 << 30, 1, 4096))
