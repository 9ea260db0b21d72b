"""How much of its card a server has in use: what a sleep and a waking are verified by.

By the server's own processes where NVML lists them: neighbours map and free at the same time, and their gigabytes are
not what left. Else all that is in use on the card.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from services.devices import Device
from services.errors import DeviceError
from services.nvml import Nvml


class DeviceUse:
    """Of one server. ``gpu``: NVML's number of the card; ``pid_of``: the server's process, 0 where it is not known.
    Every method raises DeviceError."""

    def __init__(self, nvml: Nvml, gpu: int, pid_of: Callable[[], int]) -> None:
        self._nvml = nvml
        self._gpu = gpu
        self._pid_of = pid_of
        self._uuid = ""
        self.by_process = False
        """What :meth:`used_bytes` counts, as the last :meth:`begin` found it."""

    def begin(self) -> None:
        """Before a measurement by difference: both its ends have to count the same."""
        if not self._uuid:
            self._nvml.open()
            found = [one for one in self._nvml.devices() if one.gpu == self._gpu and not one.instance]
            if not found or not found[0].uuid:
                trouble = found[0].trouble if found else f"NVML has no card {self._gpu}"
                raise DeviceError("not_found", trouble, "nvidia-smi -L lists what is there")
            self._uuid = found[0].uuid
        device = self._nvml.memory(self._uuid)
        self.by_process = any(device.processes.get(pid) is not None for pid in self._pids())
        _total(device)

    def used_bytes(self) -> int:
        """In use now."""
        device = self._nvml.memory(self._uuid)
        if not self.by_process:
            return _total(device)
        if not device.processes_told:
            raise DeviceError("not_told", f"NVML lists no processes: {device.trouble or 'no reason'}", "try again")
        return sum(device.processes.get(pid) or 0 for pid in self._pids())

    def _pids(self) -> list[int]:
        """The API server, its engine and its workers."""
        pid = self._pid_of()
        try:
            return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))] if pid > 0 else []
        except psutil.Error:
            return []


def _total(device: Device) -> int:
    if device.used_bytes is None:
        raise DeviceError("not_supported", device.trouble or "the card does not tell its memory", "update the driver")
    return device.used_bytes
