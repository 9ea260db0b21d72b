"""Limits of pinned memory, probing for it, and the driver's batched copy, without a driver."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.actuator.memory.batch_copy import Attributes, CudaFailed, entry_point
from services.actuator.memory.errors import BadMoves
from services.actuator.memory.pinned import HostMemory, allowance, probe, read_host_memory

GB = 1_000_000_000


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_cgroup_and_the_other_ranks_bound_what_may_be_pinned() -> None:
    assert allowance(HostMemory(100 * GB), 1) == 90 * GB
    assert allowance(HostMemory(100 * GB, limit=50 * GB, used=10 * GB), 4) == 9 * GB
    assert allowance(HostMemory(100 * GB, limit=5 * GB, used=10 * GB), 4) == 0, "over the limit: nothing, not less"
    with pytest.raises(ValueError, match="ranks"):
        allowance(HostMemory(GB), 0)


def test_the_tightest_cgroup_above_the_process_counts(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable:  800 kB\n",
            "proc/self/cgroup": "0::/pod/engine\n",
            "sys/fs/cgroup/pod/engine/memory.max": "max\n",
            "sys/fs/cgroup/pod/memory.max": "500000\n",
            "sys/fs/cgroup/pod/memory.current": "100000\n",
        },
    )
    assert read_host_memory(root) == HostMemory(800 * 1024, 500_000, 100_000)


def test_version_1_cgroups_are_read_and_their_no_limit_is_none(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 8 kB\n",
        "proc/self/cgroup": "5:cpu,memory:/a\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "7000\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_host_memory(tree(tmp_path, files)) == HostMemory(8192, 7000, 1000)


def test_a_machine_without_cgroups_has_no_limit(tmp_path: Path) -> None:
    assert read_host_memory(tree(tmp_path, {"proc/meminfo": "MemAvailable: 1 kB\n"})) == HostMemory(1024)


def test_probing_goes_down_until_it_fits_and_measures_the_cards_cost() -> None:
    tried: list[int] = []
    free = iter([5000, 5000, 5000, 4900])

    def allocate(size: int) -> str:
        tried.append(size)
        if size > 600:
            raise MemoryError
        return "memory"

    got = probe(allocate, 805, unit_bytes=10, failures=(MemoryError,), free_device_bytes=lambda: next(free))
    assert tried == [800, 700, 600], "in whole slots, an eighth less each time"
    assert (got.value, got.bytes, got.refused_bytes, got.device_bytes) == ("memory", 600, (800, 700), 100)
    assert got.warning == "600 of 805 bytes of host memory could be pinned"


def test_when_nothing_can_be_pinned_the_receipt_says_so() -> None:
    def allocate(size: int) -> str:
        raise MemoryError

    got = probe(allocate, 30, unit_bytes=10, failures=(MemoryError,))
    assert got.value is None
    assert got.refused_bytes == (30, 20, 10)
    assert "slower" in got.warning


def test_errors_of_another_kind_are_not_taken_for_a_lack_of_memory() -> None:
    def allocate(size: int) -> str:
        raise OSError("the driver is gone")

    with pytest.raises(OSError, match="gone"):
        probe(allocate, 30, unit_bytes=10, failures=(MemoryError,))


class FakeDriver:
    """libcuda with a batched copy that copies host memory, or with none."""

    def __init__(self, *, known: bool = True, code: int = 0) -> None:
        self.asked: tuple[bytes, int] = (b"", 0)
        self._known = known
        self._code = code
        self._function: Any = None
        self.seen: dict[str, Any] = {}

    def cuGetProcAddress_v2(self, name: bytes, function: Any, version: Any, flags: Any, found: Any) -> int:  # noqa: N802
        self.asked = (name, version.value)
        if self._known:
            fail = (ctypes.c_void_p,) if version.value < 13000 else ()
            pointer, number = ctypes.c_void_p, ctypes.c_size_t
            kinds = (pointer, pointer, pointer, number, pointer, pointer, number, *fail, pointer)
            self._function = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._batch)
            function._obj.value = ctypes.cast(self._function, ctypes.c_void_p).value
        return 0

    def _batch(self, targets: int, sources: int, sizes: int, count: int, told_at: int, first: int, *rest: int) -> int:
        told = ctypes.cast(told_at, ctypes.POINTER(Attributes)).contents
        self.seen = {"order": told.source_access_order, "flags": told.flags, "kinds": rest[0], "stream": rest[-1]}
        lists = [(ctypes.c_uint64 * count).from_address(at) for at in (targets, sources, sizes)]
        if self._code:
            if len(rest) == 3:
                ctypes.c_size_t.from_address(rest[1]).value = 1
            return self._code
        for target, source, size in zip(*lists, strict=True):
            ctypes.memmove(target, source, size)
        return 0


@pytest.mark.parametrize(("driver_version", "asked"), [(12080, 12080), (12090, 12080), (13000, 13000), (13020, 13000)])
def test_the_drivers_batched_copy_is_asked_for_in_the_form_it_has(driver_version: int, asked: int) -> None:
    driver = FakeDriver()
    batch = entry_point(driver_version, driver)
    assert batch is not None
    assert driver.asked == (b"cuMemcpyBatchAsync", asked)
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    offsets = np.array([0, 50, 90], np.uint64)
    sizes = np.array([10, 20, 10], np.uint64)
    batch(offsets + np.uint64(target.ctypes.data), offsets + np.uint64(source.ctypes.data), sizes, 77)
    assert target[55] == 55
    assert target[45] == 0
    assert driver.seen == {"order": 1, "flags": 1, "kinds": 1, "stream": 77}


def test_old_drivers_have_none() -> None:
    assert entry_point(12070, FakeDriver()) is None
    assert entry_point(13000, FakeDriver(known=False)) is None


def test_a_refusal_of_the_driver_carries_its_code_and_the_copy() -> None:
    one = np.array([8, 8], np.uint64)
    batch = entry_point(12080, FakeDriver(code=1))
    assert batch is not None
    with pytest.raises(CudaFailed, match="error 1 \\(copy 1 of 2\\)"):
        batch(one, one, one, 7)
    with pytest.raises(BadMoves, match="unlike length"):
        batch(one, one[:1], one, 7)


def test_the_attributes_are_laid_out_as_in_cuda_h() -> None:
    assert ctypes.sizeof(Attributes) == 24
    assert Attributes.flags.offset == 20
