"""kernels.cu by itself: odd sizes and addresses on the CPU, and that nvcc takes it for the cards in use."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actuator.memory.arrays import PrivateArena
from services.actuator.memory.geometry import Geometry
from tests.services.actuator.memory.cpu_device import SOURCES, CpuDevice, compile_kernels

GUARD = 64
"""Bytes before and behind what a kernel may write."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return compile_kernels(Path(tmp_path_factory.mktemp("kernels")))


@settings(max_examples=60, deadline=None)
@given(
    piece_bytes=st.integers(1, 200) | st.sampled_from([16384, 16385, 16400, 32768, 40000]),
    count=st.integers(0, 12),
    shift=st.integers(0, 16),
    thread_blocks=st.integers(1, 9),
    falling=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_pieces_of_any_size_at_any_address_arrive_whole_and_nothing_beside_them_changes(
    kernels: ctypes.CDLL, piece_bytes: int, count: int, shift: int, thread_blocks: int, falling: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    size = 13 * piece_bytes
    source = rng.integers(0, 256, size + GUARD + shift, dtype=np.uint8)
    target = rng.integers(0, 256, size + 2 * GUARD + shift, dtype=np.uint8)
    into, from_ = (rng.permutation(13)[:count].astype(np.int64) for _ in range(2))
    expected = target.copy()
    at = GUARD + shift
    pieces = source[shift : shift + size].reshape(13, piece_bytes)
    expected[at : at + size].reshape(13, piece_bytes)[into] = pieces[from_]
    CpuDevice(kernels, falling=falling).launch(
        "copy_blocks",
        thread_blocks,
        (
            target.ctypes.data + at,
            source.ctypes.data + shift,
            into.ctypes.data,
            from_.ctypes.data,
            count,
            piece_bytes,
        ),
        None,
    )
    np.testing.assert_array_equal(target, expected)


@settings(max_examples=40, deadline=None)
@given(piece_bytes=st.integers(1, 100), count=st.integers(1, 10), seed=st.integers(0, 1000))
def test_gather_and_scatter_undo_each_other(kernels: ctypes.CDLL, piece_bytes: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    device = CpuDevice(kernels)
    arena = rng.integers(0, 256, (10, piece_bytes), dtype=np.uint8)
    blocks = rng.permutation(10)[:count].astype(np.int64)
    staging = np.zeros((count, piece_bytes), np.uint8)
    lists = (blocks.ctypes.data, count, piece_bytes)
    device.launch("gather_blocks", 2, (staging.ctypes.data, arena.ctypes.data, *lists), None)
    np.testing.assert_array_equal(staging, arena[blocks])
    back = np.zeros_like(arena)
    device.launch("scatter_blocks", 2, (back.ctypes.data, staging.ctypes.data, *lists), None)
    np.testing.assert_array_equal(back[blocks], arena[blocks])


@pytest.mark.parametrize("block_bytes", [1, 7, 8, 12, 24, 1000, 4096])
def test_the_kernels_checksum_is_the_arenas(kernels: ctypes.CDLL, block_bytes: int) -> None:
    arena = PrivateArena(Geometry(block_bytes, 1, 9))
    arena.view[:] = np.random.default_rng(2).integers(0, 256, arena.view.shape, dtype=np.uint8)
    blocks = np.array([8, 0, 5, 5], np.int64)
    sums = np.zeros(4, np.uint64)
    places = (sums.ctypes.data, arena.address, blocks.ctypes.data, 4, block_bytes)
    CpuDevice(kernels).launch("checksum_blocks", 3, places, None)
    np.testing.assert_array_equal(sums, arena.checksum(blocks))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_compiles_the_kernels_with_16_byte_accesses(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc is None:
        pytest.skip("no nvcc here: the kernels are not compiled for a GPU")
    source = str(SOURCES / "kernels.cu")
    for kind in ("cubin", "ptx"):
        command = [nvcc, "-std=c++17", f"-arch={architecture}", f"-{kind}", source, "-o", str(tmp_path / kind)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr
    code = (tmp_path / "ptx").read_text()
    assert code.count("ld.global.v4.u32") >= 4, "pieces of whole 16-byte words move by 16 bytes at a time"
    assert code.count("st.global.v4.u32") >= 4
    assert (tmp_path / "cubin").stat().st_size > 0


def test_the_kernels_travel_with_the_package() -> None:
    names = {path.name for path in SOURCES.iterdir()}
    assert {"kernels.cu", "kernels_host.h", "kernels_host.cpp"} <= names
