"""Does the fence hold? A child process takes device memory in steps until it is refused, and says where.

``python -m services.actuator.mps.probe --device 0 --limit-mib 10752`` with the variables of ``fence`` set. It uses the
CUDA driver alone, by ctypes. Without a driver it says so and ends with status 3; it never guesses. What it takes it
gives back, and it takes no more than the limit and some steps: on a card that serves, run it where so much is free.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from services.actuator.mps.fence import MIB
from services.errors import DeviceError

LIBRARY: Final = "libcuda.so.1"
OUT_OF_MEMORY: Final = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
FINEST_BYTES: Final = 2 * MIB
"""The granule in which the driver takes device memory."""
BEYOND_STEPS: Final = 2
"""So far past the limit before it counts as not enforced."""
CONTEXT_BYTES: Final = 1 << 30
"""The most that a context may take off a client's limit before its first allocation, of small limits half."""


class Driver(Protocol):
    """What the probe needs of the CUDA driver API; ``allocate`` gives (error code, address)."""

    def start(self, device: int) -> None: ...
    def free_bytes(self) -> int: ...
    def allocate(self, size_bytes: int) -> tuple[int, int]: ...
    def release(self, address: int) -> None: ...
    def stop(self) -> None: ...


class Probed(msgspec.Struct, frozen=True):
    """``outcome``: ``held`` (refused at the limit), ``not_held`` (the limit was passed), ``full`` (refused far below
    it: the card had no more, nothing is shown), ``no_driver``, ``failed``. Bytes."""

    outcome: str
    taken_bytes: int = 0
    limit_bytes: int = 0
    free_before_bytes: int = 0
    detail: str = ""


class CudaDriver:
    """The CUDA driver through ctypes. DeviceError ``no_cuda_driver`` when there is none, ``cuda`` for its errors."""

    def __init__(self, library: str = LIBRARY) -> None:
        self._name = library
        self._cuda: ctypes.CDLL | None = None
        self._device = 0

    def start(self, device: int) -> None:
        try:
            self._cuda = ctypes.CDLL(self._name)
        except OSError as error:
            raise DeviceError(
                "no_cuda_driver", f"no CUDA driver here: {error}", "run it on a node with an NVIDIA driver"
            ) from error
        self._call("cuInit", ctypes.c_uint(0))
        number = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), ctypes.c_int(device))
        self._device = number.value
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._call("cuCtxSetCurrent", context)

    def free_bytes(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        address = ctypes.c_uint64()
        code = self._function("cuMemAlloc_v2")(ctypes.byref(address), ctypes.c_size_t(size_bytes))
        return int(code), address.value

    def release(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def stop(self) -> None:
        if self._cuda is not None:
            self._call("cuDevicePrimaryCtxRelease_v2", ctypes.c_int(self._device))

    def _call(self, name: str, *arguments: object) -> None:
        code = int(self._function(name)(*arguments))
        if code:
            raise DeviceError("cuda", f"{name}: CUDA error {code}", "is the MPS daemon up, in the same pipe directory?")

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        if self._cuda is None:
            raise DeviceError("cuda", f"{name} before start")
        return getattr(self._cuda, name)  # type: ignore[no-any-return]


def take(driver: Driver, device: int, limit_bytes: int, step_bytes: int = 256 * MIB) -> Probed:
    """Take memory until refused, in ever finer steps, or until the limit is passed; all is given back.

    DeviceError for an error that is not "out of memory".
    """
    if not 0 < FINEST_BYTES <= step_bytes:
        raise ValueError(f"step of {step_bytes} bytes, expected {FINEST_BYTES} or more")
    driver.start(device)
    free = driver.free_bytes()
    taken, step = 0, step_bytes
    addresses: list[int] = []
    try:
        while taken <= limit_bytes + BEYOND_STEPS * step_bytes:
            code, address = driver.allocate(step)
            if code == 0:
                addresses.append(address)
                taken += step
            elif code != OUT_OF_MEMORY:
                raise DeviceError("cuda", f"cuMemAlloc of {step} bytes: CUDA error {code}")
            elif step > FINEST_BYTES:
                step = max(FINEST_BYTES, step // 2)
            else:
                break
    finally:
        for address in addresses:
            driver.release(address)
        driver.stop()
    return judge(taken, limit_bytes, free)


def judge(taken_bytes: int, limit_bytes: int, free_before_bytes: int) -> Probed:
    """What an amount taken says of a limit."""
    told = f"refused after {taken_bytes / MIB:.0f} MiB, limit {limit_bytes / MIB:.0f} MiB"
    if taken_bytes > limit_bytes:
        outcome, told = "not_held", f"took {taken_bytes / MIB:.0f} MiB past a limit of {limit_bytes / MIB:.0f} MiB"
    elif taken_bytes + min(CONTEXT_BYTES, limit_bytes // 2) >= limit_bytes:
        outcome = "held"
    else:
        outcome, told = "full", f"{told}, {free_before_bytes / MIB:.0f} MiB free before: the card had no more"
    return Probed(outcome, taken_bytes, limit_bytes, free_before_bytes, told)


async def run(
    environment: Mapping[str, str],
    limit_bytes: int,
    device: int = 0,
    *,
    library: str = LIBRARY,
    timeout_s: float = 60.0,
) -> Probed:
    """Probe in a child with ``environment`` added: a limit is read when a process starts, so this one cannot."""
    command = (
        sys.executable, "-m", "services.actuator.mps.probe", "--device", str(device),
        "--limit-mib", str(limit_bytes // MIB), "--library", library,
    )  # fmt: skip
    child = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, **environment}
    )
    try:
        async with asyncio.timeout(timeout_s):
            output, errors = await child.communicate()
    except TimeoutError:
        return Probed("failed", limit_bytes=limit_bytes, detail=f"no answer within {timeout_s:g} s")
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    try:
        return msgspec.json.decode(output, type=Probed)
    except msgspec.MsgspecError:
        words = errors.decode(errors="replace").strip().splitlines()
        return Probed("failed", limit_bytes=limit_bytes, detail=f"ended with {child.returncode}: {(words or [''])[-1]}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="probe", description="Does CUDA_MPS_PINNED_DEVICE_MEM_LIMIT hold?")
    parser.add_argument("--device", type=int, default=0, help="CUDA ordinal")
    parser.add_argument("--limit-mib", type=int, required=True, help="the limit that should hold, MiB")
    parser.add_argument("--step-mib", type=int, default=256, help="memory taken at a time, MiB")
    parser.add_argument("--library", default=LIBRARY, help="the CUDA driver's library")
    options = parser.parse_args(arguments)
    try:
        probed = take(CudaDriver(options.library), options.device, options.limit_mib * MIB, options.step_mib * MIB)
    except DeviceError as error:
        outcome = "no_driver" if error.reason == "no_cuda_driver" else "failed"
        probed = Probed(outcome, limit_bytes=options.limit_mib * MIB, detail=str(error))
    sys.stdout.write(msgspec.json.encode(probed).decode() + "\n")
    return {"held": 0, "not_held": 1, "no_driver": 3}.get(probed.outcome, 2)


if __name__ == "__main__":
    sys.exit(main())
