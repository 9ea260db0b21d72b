"""What NVML says of a node's GPUs: memory, processes, MIG instances, versions.

Below the services because telemetry (facts), the actuator (verifying by the change in device memory, MPS limits)
and the operator's ``doctor`` all ask it. ``pynvml`` is imported when NVML is opened, never before.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from services.devices import Device, Versions
from services.errors import DeviceError

NOT_AVAILABLE: Final = 2**64 - 1
"""NVML_VALUE_NOT_AVAILABLE: missing, not a number of bytes."""

_MEMORY_V2: Final = 0x02000028
"""Structure version of nvmlMemory_v2_t: 40 bytes, version 2."""

_REASONS: Final[dict[int, tuple[str, str]]] = {
    1: ("not_open", "open NVML first"),
    3: ("not_supported", "this GPU or driver does not tell it"),
    4: ("no_permission", "run as root, or give the container the capability utility and the device files"),
    6: ("not_found", "nvidia-smi -L lists what is there"),
    9: ("driver_not_loaded", "load the kernel module: modprobe nvidia, then nvidia-smi"),
    10: ("timeout", "the driver did not answer: look at dmesg for Xid messages"),
    12: ("library_missing", "install the NVIDIA driver, or start the container with --gpus (libnvidia-ml.so.1)"),
    13: ("function_missing", "the driver is older than this function: update it"),
    15: ("gpu_lost", "the GPU fell off the bus: look at dmesg for Xid 79, then reset or reboot the node"),
    16: ("reset_required", "nvidia-smi --gpu-reset, or reboot the node"),
    18: ("driver_mismatch", "the library and the kernel module are of different versions: reboot the node"),
}


class Nvml:
    """NVML, opened and closed explicitly. ``library``: a module with pynvml's surface; None imports pynvml.

    Every method raises DeviceError with a reason and a remedy.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = library
        self._open = False

    @property
    def library(self) -> Any:
        """The module in use; DeviceError before ``open``."""
        if not self._open:
            raise DeviceError("not_open", "NVML is not open", "open NVML first")
        return self._library

    def open(self) -> Versions:
        """Initialise; what it finds. Opening twice is one opening."""
        if self._library is None:
            try:
                import pynvml
            except ImportError as error:
                raise DeviceError("library_missing", str(error), "pip install nvidia-ml-py") from error
            self._library = pynvml
        if not self._open:
            self._ask("nvmlInit")
            self._open = True
        return self.versions()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._ask("nvmlShutdown")

    def versions(self) -> Versions:
        driver = _text(self._ask("nvmlSystemGetDriverVersion"))
        try:
            cuda = int(self._ask("nvmlSystemGetCudaDriverVersion"))
        except DeviceError:
            cuda = 0
        return Versions(driver, cuda)

    def devices(self) -> tuple[Device, ...]:
        """All GPUs, each followed by its MIG instances. A GPU that cannot be asked has ``trouble``; the others are
        whole."""
        found: list[Device] = []
        for gpu in range(int(self._ask("nvmlDeviceGetCount"))):
            try:
                handle = self.handle(gpu)
                device = self._read(gpu, handle)
            except DeviceError as error:
                found.append(Device(gpu, "", trouble=str(error)))
                continue
            found.append(device)
            if device.mig:
                try:
                    found.extend(self._instances(gpu, handle))
                except DeviceError as error:
                    found.append(Device(gpu, "", mig=True, instance="?", trouble=str(error)))
        return tuple(found)

    def handle(self, gpu: int) -> Any:
        return self._ask("nvmlDeviceGetHandleByIndex", gpu)

    def memory(self, uuid: str) -> Device:
        """One device by its UUID (``GPU-...`` or ``MIG-...``): what a verification by memory delta asks."""
        handle = self._ask("nvmlDeviceGetHandleByUUID", uuid)
        return self._read(-1, handle)

    def _read(self, gpu: int, handle: Any, instance: str = "") -> Device:
        device = Device(gpu, _text(self._ask("nvmlDeviceGetUUID", handle)), instance=instance)
        troubles: list[str] = []
        device = self._with_memory(device, handle, troubles)
        try:
            device = device._replace(name=_text(self._ask("nvmlDeviceGetName", handle)))
        except DeviceError as error:
            troubles.append(str(error))
        processes, told = self._processes(handle, troubles)
        mig = bool(instance) or self._mig_enabled(handle)
        return device._replace(processes=processes, processes_told=told, mig=mig, trouble="; ".join(troubles))

    def _with_memory(self, device: Device, handle: Any, troubles: list[str]) -> Device:
        version = getattr(self._library, "nvmlMemory_v2", _MEMORY_V2)
        try:
            told, second = self._ask("nvmlDeviceGetMemoryInfo", handle, version), True
        except DeviceError as error:
            if error.reason in ("gpu_lost", "reset_required"):
                raise
            if error.reason not in ("function_missing", "not_supported"):
                troubles.append(str(error))
                return device
            try:
                told, second = self._ask("nvmlDeviceGetMemoryInfo", handle), False
            except DeviceError as older:
                # Chips that share their memory with the CPU have none of their own to tell.
                troubles.append(str(older))
                return device
        return device._replace(
            total_bytes=_bytes(told.total),
            used_bytes=_bytes(told.used),
            free_bytes=_bytes(told.free),
            reserved_bytes=_bytes(told.reserved) if second else None,
            used_has_reserved=not second,
        )

    def _processes(self, handle: Any, troubles: list[str]) -> tuple[dict[int, int | None], bool]:
        processes: dict[int, int | None] = {}
        told = False
        # Clients of MPS stand in a list of their own; on older drivers their memory is the server's.
        for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"):
            try:
                listed = self._ask(name, handle)
            except DeviceError as error:
                if "MPS" not in name:
                    troubles.append(str(error))
                continue
            told = told or "MPS" not in name
            for process in listed:
                processes.setdefault(int(process.pid), _bytes(process.usedGpuMemory))
        return processes, told

    def _mig_enabled(self, handle: Any) -> bool:
        try:
            current, _pending = self._ask("nvmlDeviceGetMigMode", handle)
        except DeviceError:
            return False
        return bool(current)

    def _instances(self, gpu: int, handle: Any) -> list[Device]:
        found: list[Device] = []
        for slot in range(int(self._ask("nvmlDeviceGetMaxMigDeviceCount", handle))):
            try:
                part = self._ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
            except DeviceError as error:
                if error.reason != "not_found":  # slots are sparse
                    raise
                continue
            gpu_instance = self._ask("nvmlDeviceGetGpuInstanceId", part)
            compute_instance = self._ask("nvmlDeviceGetComputeInstanceId", part)
            found.append(self._read(gpu, part, f"{gpu_instance}/{compute_instance}"))
        return found

    def _ask(self, name: str, *arguments: Any) -> Any:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceError("function_missing", f"pynvml has no {name}", "update nvidia-ml-py")
        try:
            return function(*arguments)
        except self._library.NVMLError as error:
            fail(name, error)


def fail(name: str, error: Any) -> NoReturn:
    """Raise the DeviceError that an NVMLError means."""
    code = int(getattr(error, "value", 999))
    reason, remedy = _REASONS.get(code, ("failed", "look at nvidia-smi -q and dmesg"))
    raise DeviceError(reason, f"{name}: {error} (NVML error {code})", remedy) from error


def _bytes(value: int | None) -> int | None:
    return None if value is None or value == NOT_AVAILABLE or value < 0 else int(value)


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
