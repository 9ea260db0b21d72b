"""Does the fence hold: the probe against a driver that a test makes up, and against a library of C."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from services.actuator.mps.fence import MIB, client_environment
from services.actuator.mps.probe import LIBRARY, run, take
from services.errors import DeviceError

GIB = 1 << 30


class FakeDriver:
    """Refuses above ``fence`` (per client) or ``free`` (of the card)."""

    def __init__(self, fence: int | None, free: int = 80 * GIB, code: int = 2) -> None:
        self.fence, self.free, self.code = fence, free, code
        self.taken = 0
        self.live: dict[int, int] = {}
        self.stopped = False

    def start(self, device: int) -> None:
        self.device = device

    def free_bytes(self) -> int:
        return self.free

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        limit = min(self.free, self.fence if self.fence is not None else self.free)
        if self.taken + size_bytes > limit:
            return self.code, 0
        self.taken += size_bytes
        self.live[len(self.live) + 1] = size_bytes
        return 0, len(self.live)

    def release(self, address: int) -> None:
        self.taken -= self.live.pop(address)

    def stop(self) -> None:
        self.stopped = True


def test_a_fence_that_holds_is_found_to_two_mib() -> None:
    driver = FakeDriver(10 * GIB - 300 * MIB)  # the context takes its part of the limit
    probed = take(driver, 0, 10 * GIB)
    assert probed.outcome == "held"
    assert 0 <= 10 * GIB - 300 * MIB - probed.taken_bytes < 2 * MIB
    assert driver.taken == 0, "all is given back"
    assert driver.stopped


def test_without_a_fence_it_is_told_and_little_more_is_taken() -> None:
    driver = FakeDriver(None)
    probed = take(driver, 0, 10 * GIB)
    assert probed.outcome == "not_held"
    assert probed.taken_bytes <= 10 * GIB + 3 * 256 * MIB, "a serving card must not be emptied"


def test_a_full_card_shows_nothing_and_is_not_taken_for_a_fence() -> None:
    assert take(FakeDriver(GIB, free=0), 0, GIB).outcome == "full", "nothing taken shows nothing"
    probed = take(FakeDriver(10 * GIB, free=3 * GIB), 0, 10 * GIB)
    assert probed.outcome == "full"
    assert "3072 MiB free before" in probed.detail


def test_another_error_is_an_error_and_gives_all_back() -> None:
    driver = FakeDriver(GIB, code=700)
    with pytest.raises(DeviceError, match="CUDA error 700"):
        take(driver, 0, 10 * GIB)
    assert (driver.taken, driver.stopped) == (0, True)


async def test_a_machine_without_a_driver_says_so_and_guesses_nothing() -> None:
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        probed = await run(client_environment([(0, GIB)]), GIB)
        assert probed.outcome == "no_driver"
        assert "no CUDA driver here" in probed.detail
    else:
        pytest.skip("a CUDA driver is here")


C_DRIVER = r"""
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
static unsigned long long taken, fence = ~0ULL;
int cuInit(unsigned flags) {
    const char *text = getenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT");
    if (text && strncmp(text, "0=", 2) == 0) fence = strtoull(text + 2, NULL, 10) << 20;
    return (int)flags;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal == 0 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; *context = &taken; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device; }
int cuCtxSetCurrent(void *context) { return context == &taken ? 0 : 201; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = (size_t)80 << 30; return 0; }
int cuMemAlloc_v2(unsigned long long *address, size_t size) {
    if (taken + size > fence) return 2;
    taken += size;
    *address = 0xABCDEF0000000000ULL + size;
    return 0;
}
int cuMemFree_v2(unsigned long long address) { taken -= address - 0xABCDEF0000000000ULL; return 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    folder: Path = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(C_DRIVER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return str(folder / "libcuda.so.1")


async def test_the_child_reads_the_limit_it_is_started_with(library: str) -> None:
    """A real child, the real ctypes calls, a library of C that keeps the limit of its environment."""
    probed = await run(client_environment([(0, 3 * GIB)]), 3 * GIB, library=library)
    assert (probed.outcome, probed.taken_bytes) == ("held", 3 * GIB)
    assert (await run({}, 3 * GIB, library=library)).outcome == "not_held"


async def test_a_device_that_is_not_there_is_a_failure_with_the_drivers_code(library: str) -> None:
    probed = await run({}, GIB, device=4, library=library)
    assert probed.outcome == "failed"
    assert "cuDeviceGet: CUDA error 101" in probed.detail
