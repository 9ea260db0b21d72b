"""The calls that a disk tier makes to the operating system, in one class that a test can stand in for."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.tier_errors import NotATier, TierFailed

U1 = NDArray[np.uint8]

NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""A full file system, a full quota, a file as long as the process may make it: all mean that the tier is full."""


class SlotFile:
    """An open file with an exclusive lock. Errors of the system are OSErrors."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> SlotFile:
        """Open or make a file and lock it. NotATier while another process has it; TierFailed when it cannot be
        opened. The lock goes with the process, however that ends."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as problem:
            raise TierFailed(str(path), problem.errno or 0, f"cannot be opened: {problem.strerror}") from problem
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            os.close(descriptor)
            raise NotATier(
                str(path), "a file that another process has locked", "one for this process alone"
            ) from problem
        return cls(str(path), descriptor)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def free_bytes(self) -> int:
        """What the file system has left for this user."""
        told = os.fstatvfs(self._descriptor)
        return told.f_bavail * told.f_frsize

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def sync(self) -> None:
        """Wait until everything written is on the device."""
        os.fdatasync(self._descriptor)

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``."""
        self._all(lambda done: os.pwrite(self._descriptor, data[done:], offset + done), len(data), "write")

    def read_at(self, offset: int, into: memoryview) -> int:
        """Fill ``into``; the bytes read, fewer at the end of the file."""
        return self._all(lambda done: os.preadv(self._descriptor, [into[done:]], offset + done), len(into), "read")

    def close(self) -> None:
        """Close, which unlocks; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _all(self, once: Callable[[int], int], size: int, what: str) -> int:
        done = 0
        while done < size:
            moved = once(done)
            if not moved:
                if what == "write":
                    raise OSError(errno.EIO, "nothing was written")
                break
            done += moved
        return done


def as_bytes(array: NDArray[np.generic]) -> memoryview:
    """The memory of a C-ordered array as bytes, without a copy."""
    return array.reshape(-1).view(np.uint8).data
