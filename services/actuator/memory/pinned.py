"""How much host memory may be pinned, and finding out how much can be.

Pinned memory is never swapped and counts in full, so asking for too much ends in the kernel killing the process,
not in an error: what the cgroup, the machine and the other ranks on it leave is worked out before the first try.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

T = TypeVar("T")

KEEP_SHARE: Final = 0.1
"""Of what is available, left to everything else."""
STEPS: Final = 8
"""A size that fails is followed by one smaller by this part of the first."""
_UNLIMITED: Final = 1 << 60
"""cgroup v1 writes a number near 2^63 for no limit."""


class HostMemory(msgspec.Struct, frozen=True):
    """Bytes. ``limit`` and ``used``: the tightest of this process's cgroup and those above it; None: no limit."""

    available: int
    limit: int | None = None
    used: int = 0


class Pinned(msgspec.Struct, Generic[T], frozen=True):
    """What a probe got. ``value`` is None when even the smallest size failed: use pageable memory."""

    wanted_bytes: int
    bytes: int
    value: T | None
    refused_bytes: tuple[int, ...]
    """Sizes that failed, in the order they were tried."""
    device_bytes: int = 0
    """Memory of the card that it cost: page tables of the mapping. The guard's account must hold it."""

    @property
    def warning(self) -> str:
        """For the log; empty when everything asked for was got."""
        if self.value is None:
            return f"no host memory could be pinned ({self.wanted_bytes} bytes wanted): transfers will be slower"
        if self.bytes < self.wanted_bytes:
            return f"{self.bytes} of {self.wanted_bytes} bytes of host memory could be pinned"
        return ""


def allowance(memory: HostMemory, ranks: int, *, keep_share: float = KEEP_SHARE) -> int:
    """Bytes that one of ``ranks`` processes of this host (or cgroup) may pin: its share of what is left."""
    if ranks < 1:
        raise ValueError(f"ranks on this host: found {ranks}, expected 1 or more")
    left = memory.available
    if memory.limit is not None:
        left = min(left, memory.limit - memory.used)
    return max(int(left * (1.0 - keep_share)) // ranks, 0)


def probe(
    allocate: Callable[[int], T],
    wanted_bytes: int,
    *,
    unit_bytes: int,
    failures: tuple[type[Exception], ...],
    free_device_bytes: Callable[[], int] = lambda: 0,
) -> Pinned[T]:
    """Pin as much of ``wanted_bytes`` as works, in whole ``unit_bytes``, trying ever smaller sizes.

    ``allocate(size)`` raises one of ``failures`` for a size that cannot be had; any other error passes through.
    """
    refused: list[int] = []
    whole = wanted_bytes // unit_bytes
    for step in range(STEPS):
        size = whole * (STEPS - step) // STEPS * unit_bytes
        if size == 0 or size in refused:
            continue
        before = free_device_bytes()
        try:
            value = allocate(size)
        except failures:
            refused.append(size)
            continue
        return Pinned(wanted_bytes, size, value, tuple(refused), max(before - free_device_bytes(), 0))
    return Pinned(wanted_bytes, 0, None, tuple(refused))


def read_host_memory(root: Path = Path("/")) -> HostMemory:
    """What this host and this process's cgroup (version 2 or 1) say now. Missing files mean no limit."""
    available = 0
    for line in _text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    limit: int | None = None
    used = 0
    for folder, limit_name, used_name in _cgroups(root):
        found = _number(folder / limit_name)
        if found is None or found >= _UNLIMITED:
            continue
        held = _number(folder / used_name) or 0
        if limit is None or found - held < limit - used:
            limit, used = found, held
    return HostMemory(available, limit, used)


def _cgroups(root: Path) -> list[tuple[Path, str, str]]:
    """(folder, its file with the limit, its file with the use) of this process's cgroup and those above it."""
    base = root / "sys/fs/cgroup"
    found: list[tuple[Path, str, str]] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            top, names = base, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = base / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / name.strip("/")
        while True:
            found.append((folder, *names))
            if folder == top:
                break
            folder = folder.parent
    return found


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
