"""Batched asynchronous copies by the CUDA driver's own entry point, which CuPy 14 does not offer.

``cuMemcpyBatchAsync`` came with CUDA 12.8 and lost its ``failIdx`` argument in 13.0; the driver hands out the
function for the version that is asked for (headers cuda.h and cudaTypedefs.h of CUDA 13.0).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import BadMoves
from services.errors import MemoryPlaneError

U8 = NDArray[np.uint64]
Batch = Callable[[U8, U8, U8, int], None]

WITH_FAIL_INDEX: Final = 12080
WITHOUT_FAIL_INDEX: Final = 13000
_IN_STREAM_ORDER: Final = 1
_PREFER_OVERLAP: Final = 1


class CudaFailed(MemoryPlaneError):
    """``call`` of the CUDA driver answered ``code``."""

    def __init__(self, call: str, code: int, detail: str = "") -> None:
        super().__init__(f"{call}: CUDA error {code}" + (f" ({detail})" if detail else ""))
        self.call = call
        self.code = code


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """CUmemcpyAttributes: 24 bytes. The two location hints are ignored for device and pinned memory."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


def entry_point(driver_version: int, library: Any = None) -> Batch | None:
    """``batch(targets, sources, sizes, stream)`` with uint64 [n] arrays; None where the driver lacks it.

    ``driver_version`` as cuDriverGetVersion says it; ``library`` is libcuda, loaded here when None. The stream must
    not be the default one. The call raises CudaFailed.
    """
    if driver_version < WITH_FAIL_INDEX:
        return None
    if library is None:
        try:
            library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return None
    with_fail_index = driver_version < WITHOUT_FAIL_INDEX
    function = ctypes.c_void_p()
    found = ctypes.c_int(-1)
    code = library.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(function),
        ctypes.c_int(WITH_FAIL_INDEX if with_fail_index else WITHOUT_FAIL_INDEX),
        ctypes.c_uint64(0),
        ctypes.byref(found),
    )
    if code != 0 or not function.value:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_size_t
    fail = (pointer,) if with_fail_index else ()
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, number, pointer, pointer, number, *fail, pointer
    )
    return _caller(prototype(function.value), with_fail_index)


def _caller(function: Any, with_fail_index: bool) -> Batch:
    attributes = Attributes(_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _PREFER_OVERLAP)

    def batch(targets: U8, sources: U8, sizes: U8, stream: int) -> None:
        count = len(sizes)
        if not len(targets) == len(sources) == count:
            raise BadMoves("a batch of copies with lists of unlike length", count)
        if not count:
            return
        # Kept in names: the driver reads them during the call.
        lists = [np.ascontiguousarray(values, np.uint64) for values in (targets, sources, sizes)]
        first = ctypes.c_size_t(0)
        failed = ctypes.c_size_t(count)
        tail = (ctypes.byref(failed),) if with_fail_index else ()
        code = function(
            *(values.ctypes.data for values in lists),
            count,
            ctypes.byref(attributes),
            ctypes.byref(first),
            1,
            *tail,
            stream,
        )
        if code != 0:
            detail = f"copy {failed.value} of {count}" if with_fail_index else f"{count} copies"
            raise CudaFailed("cuMemcpyBatchAsync", code, detail)

    return batch
