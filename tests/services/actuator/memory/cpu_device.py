"""A device whose memory is this process's and whose kernels are kernels.cu, compiled by g++ and run on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.actuator.memory.arrays import NumpyArena, PrivateArena
from services.actuator.memory.device import THREADS
from services.actuator.memory.geometry import Geometry

SOURCES = Path(str(files("services.actuator.memory")))


def compile_kernels(folder: Path) -> ctypes.CDLL:
    """kernels.cu as a library for the CPU; skips the test where there is no g++."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here: the kernels' indexing cannot be tried on the CPU")
    library = folder / "kernels.so"
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-x", "c++"]
    done = subprocess.run(
        [compiler, *options, str(SOURCES / "kernels_host.cpp"), "-o", str(library)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


class CpuBuffer:
    def __init__(self, values: NDArray[Any]) -> None:
        self._values = values
        self.address = int(values.ctypes.data)
        self.size = values.nbytes


class CpuDevice:
    """``falling`` runs the kernels' threads in the opposite order; ``batch`` False is an old driver."""

    name = "CPU"
    processors = 4

    def __init__(self, kernels: ctypes.CDLL, *, falling: bool = False, batch: bool = True) -> None:
        self._kernels = kernels
        self._falling = falling
        self.has_batch = batch
        self.calls: list[str] = []
        """Names of kernels launched and copies made, in order."""

    def new_stream(self) -> object:
        return object()

    def reserve(self, size: int) -> CpuBuffer:
        return CpuBuffer(np.zeros(size, np.uint8))

    def upload(self, values: NDArray[np.int64], stream: object) -> CpuBuffer:
        assert values.dtype == np.int64, "the kernels' lists are int64"
        return CpuBuffer(values.copy())

    def launch(self, kernel: str, thread_blocks: int, arguments: tuple[int, ...], stream: object) -> None:
        self.calls.append(kernel)
        packed = [ctypes.c_uint64(value) for value in arguments]
        grid, block = ctypes.c_uint(thread_blocks), ctypes.c_uint(THREADS)
        getattr(self._kernels, f"host_{kernel}")(grid, block, ctypes.c_int(self._falling), *packed)

    def copy(self, target: int, source: int, size: int, stream: object) -> None:
        self.calls.append("copy")
        ctypes.memmove(target, source, size)

    def copy_batch(self, targets: Any, sources: Any, sizes: Any, stream: object) -> None:
        if not self.has_batch:
            raise NotImplementedError
        self.calls.append("copy_batch")
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)

    def synchronize(self, stream: object) -> None:
        return None


class CpuDeviceArena(PrivateArena):
    """An arena that says it lies on a device."""

    on_device = True

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry)


class ScratchArena(NumpyArena):
    """An arena over scratch memory."""

    def __init__(self, geometry: Geometry, scratch: NDArray[np.uint8], *, on_device: bool) -> None:
        super().__init__(geometry, scratch[: geometry.arena_bytes].reshape(geometry.blocks, geometry.block_bytes))
        self.on_device = on_device
