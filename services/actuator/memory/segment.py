"""A named piece of shared memory: a file in a memory file system, with a header that says what lies in it.

Python's ``multiprocessing.shared_memory`` is not used, because its resource tracker takes a segment away when the
first process that only read it ends (until Python 3.13). Here the engine that made a segment removes it, nobody
else. Whether that engine lives is told by a lock that it holds on the file and that the kernel drops with it, which
also works across process namespaces, where process ids mean nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import struct
import time
import zlib
from pathlib import Path
from typing import Final

import msgspec

from services.actuator.memory.errors import BadGeometry, OutOfBlocks, SegmentGone
from services.actuator.memory.geometry import Geometry

FOLDER: Final = Path("/dev/shm")  # a memory file system on every Linux
HEADER_BYTES: Final = 4096
"""A whole memory page, so that the blocks behind it start on one."""
GATE_SUFFIX: Final = ".gate"
"""Of the file beside a segment that says who may copy in it (gate.py): held only while somebody copies or closes it,
so whether its engine lives is told by the segment alone."""
MAGIC: Final = b"TGARENA\0"
VERSION: Final = 1
_HEADER: Final = struct.Struct("<8sIIQQQ")
_CHECK: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,200}")


class Segment(msgspec.Struct):
    """An open segment. ``name`` is the handle that other processes open it by."""

    name: str
    geometry: Geometry
    path: Path
    descriptor: int
    memory: mmap.mmap
    owner: bool

    @property
    def size(self) -> int:
        return HEADER_BYTES + self.geometry.arena_bytes

    def check(self) -> None:
        """SegmentGone when the file was removed or has another size or header than at the start.

        Memory beyond a truncated file kills the process that touches it (SIGBUS), so this comes before every
        transfer. It cannot exclude a truncation during one: only who may write to the file could do that.
        """
        found = os.fstat(self.descriptor)
        if found.st_size != self.size:
            raise SegmentGone(self.name, found.st_size, self.size, "its size changed")
        if found.st_nlink == 0:
            raise SegmentGone(self.name, 0, self.size, "its engine removed it")
        read_header(self.name, self.memory[: _HEADER.size + _CHECK.size], self.geometry)
        if not self.owner and not _held(self.descriptor):
            raise SegmentGone(self.name, found.st_size, self.size, "the engine that made it is dead")

    def close(self) -> None:
        """Let go of it. Memory that somebody still holds an array of stays until that array goes."""
        with contextlib.suppress(BufferError):  # then it is unmapped with the last array
            self.memory.close()
        os.close(self.descriptor)

    def remove(self) -> None:
        """Take the name away; processes that have it open see that at their next check. Owner only."""
        self.path.unlink(missing_ok=True)


def header(geometry: Geometry) -> bytes:
    """The header of a segment with ``geometry``."""
    body = _HEADER.pack(MAGIC, VERSION, HEADER_BYTES, geometry.block_bytes, geometry.blocks_per_group, geometry.groups)
    return body + _CHECK.pack(zlib.crc32(body))


def read_header(name: str, found: bytes, expected: Geometry | None) -> Geometry:
    """The geometry that a header states. SegmentGone when it is none, is damaged, or states another geometry
    than ``expected`` (None: any)."""
    needed = _HEADER.size + _CHECK.size
    if len(found) < needed:
        raise SegmentGone(name, len(found), needed, "too short for a header")
    body = found[: _HEADER.size]
    magic, version, header_bytes, *sizes = _HEADER.unpack(body)
    if magic != MAGIC or version != VERSION or header_bytes != HEADER_BYTES:
        raise SegmentGone(name, len(found), needed, f"no arena of version {VERSION}")
    if _CHECK.unpack(found[_HEADER.size : needed]) != (zlib.crc32(body),):
        raise SegmentGone(name, len(found), needed, "its header is damaged")
    geometry = Geometry(*sizes)
    if expected is not None and geometry != expected:
        raise SegmentGone(name, geometry.arena_bytes, expected.arena_bytes, f"it holds {geometry}")
    return geometry


def create(name: str, geometry: Geometry, folder: Path = FOLDER) -> Segment:
    """Make a segment, zeroed, for this user only; one that a dead engine left under the name is replaced.

    BadGeometry for a name that is no file name; SegmentGone where a living engine holds the name; OutOfBlocks
    where the memory file system has no room (in a container /dev/shm is often 64 MiB).
    """
    path = _path(name, folder)
    size = HEADER_BYTES + geometry.arena_bytes
    _clear(name, path, size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Room is taken now: a sparse file would end the process where the file system is full at first touch.
        os.posix_fallocate(descriptor, 0, size)
        os.pwrite(descriptor, header(geometry), 0)
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if error.errno not in (errno.ENOSPC, errno.ENOMEM):
            raise
        free = os.statvfs(folder)
        raise OutOfBlocks(size, free.f_bavail * free.f_frsize, f"the room in {folder}", "bytes") from error
    return Segment(name, geometry, path, descriptor, memory, owner=True)


def attach(name: str, geometry: Geometry | None = None, folder: Path = FOLDER) -> Segment:
    """Open a segment that another process made. SegmentGone when it is not there, cut short, of another geometry
    than ``geometry``, or its engine is dead."""
    path = _path(name, folder)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        needed = HEADER_BYTES + (geometry.arena_bytes if geometry else 0)
        raise SegmentGone(name, 0, needed, error.strerror or str(error)) from error
    try:
        stated = read_header(name, os.pread(descriptor, _HEADER.size + _CHECK.size, 0), geometry)
        size = HEADER_BYTES + stated.arena_bytes
        found = os.fstat(descriptor).st_size
        if found != size:
            raise SegmentGone(name, found, size, "cut short" if found < size else "too long")
        if not _held(descriptor):
            raise SegmentGone(name, found, size, "the engine that made it is dead")
        memory = mmap.mmap(descriptor, size)
    except BaseException:
        os.close(descriptor)
        raise
    return Segment(name, stated, path, descriptor, memory, owner=False)


def sweep(prefix: str, folder: Path = FOLDER, older_s: float = 5.0) -> list[str]:
    """Remove segments called ``prefix...`` that dead engines of this user left, and gates (``<segment>.gate``) whose
    segment is gone; their names. Younger ones than ``older_s`` stay: an engine that starts this moment has made its
    file and does not hold it yet."""
    removed = []
    for path in sorted(folder.glob(f"{prefix}*"), reverse=True):
        gate = path.suffix == GATE_SUFFIX
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:  # somebody else's, or gone already
            continue
        try:
            found = os.fstat(descriptor)
            dead = not path.with_suffix("").exists() if gate else not _held(descriptor)
            if found.st_uid == os.getuid() and time.time() - found.st_mtime >= older_s and dead:
                path.unlink(missing_ok=True)
                removed.append(path.name)
                if not gate:
                    path.with_name(path.name + GATE_SUFFIX).unlink(missing_ok=True)
        finally:
            os.close(descriptor)
    return removed


def _path(name: str, folder: Path) -> Path:
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise BadGeometry(f"segment name {name!r}", len(name), "1 to 200 of A-Z a-z 0-9 _ - . and no dot in front")
    return folder / name


def _held(descriptor: int) -> bool:
    """Whether the engine that made the file is alive: its exclusive lock shuts out a shared one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _clear(name: str, path: Path, size: int) -> None:
    """Remove what a dead engine left; SegmentGone where the engine lives."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if _held(descriptor):
            raise SegmentGone(name, os.fstat(descriptor).st_size, size, "a living engine holds this name")
        path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)
