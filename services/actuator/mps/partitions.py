"""The live limits of MPS v3: soft and hard device memory of a cgroup, through NVML.

Needs driver 615 (CUDA 13.4), a GPU that is not cut by MIG, cgroup v2, root to set. The hard limit fails allocations;
going over the soft one makes a client a candidate: under pressure MPS *kills* it, gives nothing back politely. So a
soft limit below what is in use is refused here unless asked for by name. Where any of this is missing nothing is
pretended: ``unavailable`` says what, and setting raises. (NVIDIA MPS documentation, *MPS v3 Memory Partitioning*.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, NamedTuple

from services.devices import Device, Versions
from services.errors import DeviceError, UserError
from services.nvml import fail

FIRST_DRIVER: Final = 615
FIRST_CUDA: Final = 13040
NO_LIMIT: Final = 2**64 - 1
"""NVML_DEVICE_MEMORY_LIMIT_MAX."""
CGROUPS: Final = Path("/sys/fs/cgroup")
SETTER: Final = "nvmlDeviceSetMemoryLimits_v1"
GETTER: Final = "nvmlDeviceGetMemoryLimits_v1"
_ROUNDING_BYTES: Final = 2 << 20
"""The driver may round to its granule of device memory."""


class Partition(NamedTuple):
    """Limits of one cgroup on one GPU; bytes. ``soft_bytes`` 0: nothing is guaranteed; ``hard_bytes`` None: none."""

    soft_bytes: int
    hard_bytes: int | None
    used_bytes: int


def unavailable(library: Any, versions: Versions, device: Device, cgroups: Path = CGROUPS) -> str:
    """Why this machine has no live limits; empty when it has. Having the function is not enough: pynvml has it on
    every machine, the driver only from 615 on."""
    if not (hasattr(library, SETTER) and hasattr(library, GETTER)):
        return f"pynvml has no {SETTER}: update nvidia-ml-py to 13.615 or newer"
    if versions.driver_major < FIRST_DRIVER:
        return f"driver {versions.driver or 'unknown'}, expected {FIRST_DRIVER} or newer"
    if versions.cuda < FIRST_CUDA:
        return f"CUDA {versions.cuda // 1000}.{versions.cuda % 1000 // 10} of the driver, expected 13.4 or newer"
    if device.mig or device.instance:
        return "MIG is on: the limits are for whole GPUs only"
    if not (cgroups / "cgroup.controllers").exists():
        return f"{cgroups} is not cgroup v2: mount it (systemd.unified_cgroup_hierarchy=1)"
    return ""


class Partitions:
    """Reads and sets the limits of one GPU, given NVML open. ``handle``: the GPU's NVML handle.

    DeviceError ``mps_v3_unavailable`` where the machine has none.
    """

    def __init__(self, library: Any, handle: Any, versions: Versions, device: Device, cgroups: Path = CGROUPS) -> None:
        self._library = library
        self._handle = handle
        self._cgroups = cgroups
        self._missing = unavailable(library, versions, device, cgroups)

    def read(self, cgroup: Path) -> Partition:
        """What is set for a cgroup, and used under it. Without a limit of its own a cgroup tells its ancestor's."""
        self._check(cgroup)
        told = self._library.c_nvmlGetMemoryLimits_v1_t()
        told.nameSpace = str(cgroup).encode()
        self._call(GETTER, told)
        hard = int(told.hardLimit)
        return Partition(int(told.softLimit), None if hard == NO_LIMIT else hard, int(told.currentUsed))

    def write(self, cgroup: Path, soft_bytes: int, hard_bytes: int | None, *, may_kill: bool = False) -> Partition:
        """Set both, and what NVML then says is set; DeviceError ``mps_v3_unverified`` when that is something else.

        UserError for a soft limit above the hard one. Refused (``mps_v3_would_kill``) when more than ``soft_bytes`` or
        ``hard_bytes`` is in use, unless ``may_kill``.
        """
        if soft_bytes < 0 or (hard_bytes is not None and not soft_bytes <= hard_bytes < NO_LIMIT):
            raise UserError(f"MPS limits: soft {soft_bytes}, hard {hard_bytes}: expected 0 <= soft <= hard")
        used = self.read(cgroup).used_bytes
        lowest = soft_bytes if soft_bytes > 0 else (hard_bytes if hard_bytes is not None else used)
        if used > lowest and not may_kill:
            raise DeviceError(
                "mps_v3_would_kill",
                f"{used} bytes in use under {cgroup}, above the limit of {lowest}",
                "lower the engine's quota first, and wait until it has given memory back",
            )
        wanted = self._library.c_nvmlSetMemoryLimits_v1_t()
        wanted.nameSpace = str(cgroup).encode()
        wanted.softLimit = soft_bytes
        wanted.hardLimit = NO_LIMIT if hard_bytes is None else hard_bytes
        self._call(SETTER, wanted)
        now = self.read(cgroup)
        if not (_same(now.soft_bytes, soft_bytes) and _same(now.hard_bytes, hard_bytes)):
            found = f"read back {now.soft_bytes} and {now.hard_bytes}"
            raise DeviceError("mps_v3_unverified", f"{cgroup}: set soft {soft_bytes} and hard {hard_bytes}, {found}")
        return now

    def clear(self, cgroup: Path) -> Partition:
        """No limit any more. Before a cgroup is removed: its ancestors keep the soft part of one that just vanished."""
        return self.write(cgroup, 0, None)

    def _check(self, cgroup: Path) -> None:
        if self._missing:
            raise DeviceError("mps_v3_unavailable", self._missing, "the engine's quota is the live knob here")
        if not cgroup.is_absolute() or self._cgroups not in cgroup.parents:
            raise UserError(f"cgroup: found {cgroup}, expected a full path below {self._cgroups}")
        if not cgroup.is_dir():
            raise UserError(f"cgroup: {cgroup} does not exist")

    def _call(self, name: str, structure: Any) -> None:
        try:
            getattr(self._library, name)(self._handle, structure)
        except self._library.NVMLError as error:
            fail(name, error)


def _same(found: int | None, wanted: int | None) -> bool:
    if found is None or wanted is None:
        return found is wanted
    return abs(found - wanted) < _ROUNDING_BYTES
