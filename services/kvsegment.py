"""The shared-memory segment in which kvcached tells its use and takes its limit.

Layout of kvcached 0.1.6 (``kvcached/cli/utils.py``, ``csrc/inc/mem_info_tracker.hpp``): ``/dev/shm/<name>``, 24 bytes,
three native int64 under flock: limit, bytes in use, bytes mapped in advance. The engine creates the segment and
removes it; it is never created here, because kvcached would take one of zeros for a limit of nothing. Only reading
stands here, so that telemetry and the actuator share it; the actuator writes (``engines/kvcached/segment.py``).
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from services.errors import SegmentError, UserError

FOLDER: Final = Path("/dev/shm")
LAYOUT: Final = struct.Struct("=3q")
LIMIT: Final = struct.Struct("=q")
"""The first field alone: the others are the engine's to write."""
LARGEST_BYTES: Final = 1 << 50
"""More than that on a card is garbage."""

_TRIES: Final = 20
_RETRY_S: Final = 0.001
"""kvcached holds its lock for microseconds; 20 ms is a holder that was stopped."""


class Usage(NamedTuple):
    """What a segment says, bytes of all layers and of K and V together."""

    limit_bytes: int
    used_bytes: int
    """In pages that hold a block."""
    preallocated_bytes: int
    """In pages mapped in advance, empty."""
    identity: tuple[int, int] = (0, 0)
    """Device and inode: another one under the same name is another engine."""

    @property
    def mapped_bytes(self) -> int:
        return self.used_bytes + self.preallocated_bytes

    @property
    def excess_bytes(self) -> int:
        """Above the limit by what is in use; kvcached gives back pages mapped in advance by itself."""
        return max(0, self.used_bytes - self.limit_bytes)


def segment_path(name: str, folder: Path = FOLDER) -> Path:
    """Where the segment of ``KVCACHED_IPC_NAME`` lies; UserError for what is no file name."""
    if not name or "/" in name or name in (".", ".."):
        raise UserError(f"kvcached segment: found {name!r}, expected the name in KVCACHED_IPC_NAME, without slashes")
    return folder / name


def read_usage(path: Path) -> Usage:
    """The segment as it is now; SegmentError ``vanished``, ``truncated``, ``garbage``, ``empty``, ``busy`` or
    ``forbidden``. Never blocks longer than 20 ms."""
    with locked(path, os.O_RDONLY, fcntl.LOCK_SH) as descriptor:
        return parse(path, descriptor)


@contextmanager
def locked(path: Path, mode: int, lock: int) -> Iterator[int]:
    """A descriptor of the segment that now has this name, under its lock."""
    descriptor = _open(path, mode)
    try:
        _lock(path, descriptor, lock)
        # Removed, or replaced, between opening and locking: what is locked is nobody's any more.
        try:
            current = path.stat()
        except OSError as error:
            raise SegmentError(str(path), "vanished", "removed while it was opened: is the engine down?") from error
        held = os.fstat(descriptor)
        if (current.st_dev, current.st_ino) != (held.st_dev, held.st_ino):
            raise SegmentError(str(path), "vanished", "replaced while it was opened: the engine restarts")
        yield descriptor
    finally:
        os.close(descriptor)  # the lock goes with it


def parse(path: Path, descriptor: int) -> Usage:
    """Read and check. By ``pread``, not by mapping: a mapped file that is truncated kills its reader (SIGBUS)."""
    raw = os.pread(descriptor, LAYOUT.size, 0)
    if len(raw) != LAYOUT.size:
        raise SegmentError(str(path), "truncated", f"{len(raw)} bytes, expected {LAYOUT.size}")
    limit, used, preallocated = LAYOUT.unpack(raw)
    if limit == used == preallocated == 0:
        raise SegmentError(str(path), "empty", "all zero: made by kvctl, or its engine has not begun")
    for field, value in (("limit", limit), ("used", used), ("preallocated", preallocated)):
        if not 0 <= value <= LARGEST_BYTES:
            raise SegmentError(str(path), "garbage", f"{field} {value}, expected 0 to {LARGEST_BYTES}")
    held = os.fstat(descriptor)
    return Usage(limit, used, preallocated, (held.st_dev, held.st_ino))


def _open(path: Path, mode: int) -> int:
    try:
        # Not blocking, and no link: the folder is writable by everybody.
        descriptor = os.open(path, mode | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise SegmentError(str(path), "vanished", "not there: is the engine up, under this name?") from error
    except OSError as error:
        reason = "forbidden" if error.errno in (errno.EACCES, errno.EPERM) else "garbage"
        raise SegmentError(str(path), reason, error.strerror or str(error)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SegmentError(str(path), "garbage", "not a regular file")
    return descriptor


def _lock(path: Path, descriptor: int, lock: int) -> None:
    for attempt in range(_TRIES):
        try:
            fcntl.flock(descriptor, lock | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if attempt + 1 < _TRIES:
                time.sleep(_RETRY_S)
    raise SegmentError(str(path), "busy", f"locked by another process for {1e3 * _TRIES * _RETRY_S:.0f} ms")
