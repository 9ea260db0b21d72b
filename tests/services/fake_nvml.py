"""A module with pynvml's surface over GPUs that a test makes up: faults and cards that cannot be had here."""

# ruff: noqa: N802, N815

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 1 << 30
NOT_AVAILABLE = 2**64 - 1


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Gpu(SimpleNamespace):
    """``fails``: error code by function name."""

    uuid: str
    total: int
    used: int
    reserved: int
    processes: list[tuple[int, int | None]]
    mps: list[tuple[int, int | None]]
    parts: list[Any]
    fails: dict[str, int]

    def __init__(self, uuid: str, total: int = 80 * GIB, used: int = 0, **more: Any) -> None:
        shape = {"reserved": GIB // 2, "processes": [], "mps": [], "parts": [], "fails": {}, "slot": "0/0"}
        super().__init__(uuid=uuid, total=total, used=used, **(shape | more))


class FakeNvml:
    NVMLError = NVMLError
    nvmlMemory_v2 = 0x02000028
    c_nvmlSetMemoryLimits_v1_t = pynvml.c_nvmlSetMemoryLimits_v1_t
    c_nvmlGetMemoryLimits_v1_t = pynvml.c_nvmlGetMemoryLimits_v1_t

    def __init__(self, *gpus: Gpu, driver: str = "615.71.09", cuda: int = 13040, fails: dict[str, int] | None = None):
        self.gpus = list(gpus)
        self.driver, self.cuda = driver, cuda
        self.fails = fails or {}
        self.opened = 0
        self.limits: dict[bytes, tuple[int, int]] = {}
        self.rounding = 1

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml") and name in object.__getattribute__(self, "fails"):
            code = self.fails[name]

            def failing(*_: object) -> None:
                raise NVMLError(code)

            return failing
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return self.driver.encode()

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._ok(self.gpus[index], "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in self.gpus:
            for device in (gpu, *gpu.parts):
                if device is not None and device.uuid == uuid:
                    return device
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return self._ok(gpu, "nvmlDeviceGetUUID").uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> bytes:
        return b"NVIDIA Fake 80GB"

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> SimpleNamespace:
        self._ok(gpu, "nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo")
        free = gpu.total - gpu.used - gpu.reserved
        if version:
            return SimpleNamespace(total=gpu.total, used=gpu.used, free=free, reserved=gpu.reserved)
        return SimpleNamespace(total=gpu.total, used=gpu.used + gpu.reserved, free=free)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, gpu: Gpu) -> list[SimpleNamespace]:
        self._ok(gpu, "nvmlDeviceGetComputeRunningProcesses_v3")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes]

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, gpu: Gpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.mps]

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> tuple[int, int]:
        self._ok(gpu, "nvmlDeviceGetMigMode")
        return (1, 1) if gpu.parts else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: Gpu) -> int:
        return len(gpu.parts)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: Gpu, index: int) -> Gpu:
        if gpu.parts[index] is None:
            raise NVMLError(6)
        return gpu.parts[index]

    def nvmlDeviceGetGpuInstanceId(self, gpu: Gpu) -> str:
        return gpu.slot.split("/")[0]

    def nvmlDeviceGetComputeInstanceId(self, gpu: Gpu) -> str:
        return gpu.slot.split("/")[1]

    def nvmlDeviceSetMemoryLimits_v1(self, gpu: Gpu, limits: Any) -> None:
        rounded = limits.softLimit // self.rounding * self.rounding
        self.limits[limits.nameSpace] = (rounded, limits.hardLimit)

    def nvmlDeviceGetMemoryLimits_v1(self, gpu: Gpu, limits: Any) -> None:
        limits.softLimit, limits.hardLimit = self.limits.get(limits.nameSpace, (0, NOT_AVAILABLE))
        limits.currentUsed = gpu.used

    @staticmethod
    def _ok(gpu: Gpu, name: str) -> Gpu:
        if name in gpu.fails:
            raise NVMLError(gpu.fails[name])
        return gpu
