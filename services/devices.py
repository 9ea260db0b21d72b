"""A node's GPUs as NVML tells them. Pure.

Memory comes in two meanings. Version 2 (driver 510 and newer) tells ``reserved`` (driver and firmware) apart from
``used`` (allocations); version 1 counts the reserved part as used. They differ by some hundred MB, so a reading
says which it is. (NVML API reference, nvmlMemory_t and nvmlMemory_v2_t.)
"""

from __future__ import annotations

from typing import Final, NamedTuple

HIDDEN_FROM_BYTES: Final = 256 << 20
"""A card that uses more than that without any process listed hides them: one CUDA context alone takes about as much."""
RESERVED_MOST_BYTES: Final = 1 << 30
"""The driver's own part, at most: what version 1 may count as used on an empty card."""


class Versions(NamedTuple):
    """``cuda`` is what the driver supports at most, as NVML codes it: 13040 is 13.4; 0 when not told."""

    driver: str
    cuda: int

    @property
    def driver_major(self) -> int:
        """0 when it cannot be read."""
        head = self.driver.split(".", 1)[0]
        return int(head) if head.isdigit() else 0


class Device(NamedTuple):
    """One GPU, or one MIG instance of it (``instance`` not empty). Bytes; None = not told, which is not zero."""

    gpu: int
    """NVML's number, in order of the PCI bus; -1: asked by UUID."""
    uuid: str
    name: str = ""
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    """Driver and firmware; None in version 1, where ``used_bytes`` has it inside."""
    used_has_reserved: bool = False
    processes: dict[int, int | None] = {}  # noqa: RUF012 - read only
    """Bytes by pid of the host; None for a process whose bytes NVML does not tell."""
    processes_told: bool = False
    """False: NVML refused the list; an empty one says nothing then."""
    mig: bool = False
    """The GPU is cut into instances, or this is one of them."""
    instance: str = ""
    """``<GPU instance>/<compute instance>`` of a MIG device."""
    trouble: str = ""
    """Why the rest is missing."""

    @property
    def allocated_bytes(self) -> int | None:
        """What allocations take, in either meaning of ``used``; None when it cannot be told apart."""
        return None if self.used_has_reserved else self.used_bytes

    @property
    def processes_hidden(self) -> bool:
        """Memory is in use and no process is listed: a container with a pid namespace of its own sees none."""
        if self.processes or self.used_bytes is None:
            return False
        return self.used_bytes > HIDDEN_FROM_BYTES + (RESERVED_MOST_BYTES if self.used_has_reserved else 0)

    @property
    def claimed_bytes(self) -> int | None:
        """What the listed processes hold together; None when any of it is not known."""
        if not self.processes_told or self.processes_hidden or None in self.processes.values():
            return None
        return sum(value for value in self.processes.values() if value is not None)
