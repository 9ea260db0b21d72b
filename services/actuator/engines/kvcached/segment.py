"""Writing a kvcached limit: compare and set under the segment's lock, and who owns the writing.

kvcached takes any limit from anybody, so two controllers undo each other without noticing. Two things stand against
that: a lock file beside the segment, held by the one Tidegate process that writes (the kernel drops it when that
process dies, however it dies), and every write names the limit it expects to replace. Other programs (``kvctl``)
know neither; ``limits.py`` notices them.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from services.errors import SegmentError
from services.kvsegment import LARGEST_BYTES, LIMIT, Usage, locked, parse

_PROC: Final = Path("/proc")


class Written(NamedTuple):
    before: Usage
    after: Usage
    """Read back under the same lock."""


def write_limit(path: Path, limit_bytes: int, expected_bytes: int) -> Written:
    """Replace the limit ``expected_bytes`` by another; the engine's own fields are not touched.

    ValueError for a limit that kvcached would not take (it ignores 0). SegmentError as for reading, and ``changed``
    when the limit is not the expected one any more; nothing is written then.
    """
    if not 0 < limit_bytes <= LARGEST_BYTES:
        raise ValueError(f"kvcached limit of {limit_bytes} bytes: expected 1 to {LARGEST_BYTES}")
    with locked(path, os.O_RDWR, fcntl.LOCK_EX) as descriptor:
        before = parse(path, descriptor)
        if before.limit_bytes != expected_bytes:
            raise SegmentError(str(path), "changed", f"limit {before.limit_bytes}, expected {expected_bytes}")
        os.pwrite(descriptor, LIMIT.pack(limit_bytes), 0)
        after = parse(path, descriptor)
    if after.limit_bytes != limit_bytes:
        raise SegmentError(str(path), "changed", f"wrote {limit_bytes}, read back {after.limit_bytes}")
    return Written(before, after)


class OwnerNote(msgspec.Struct, frozen=True):
    """What the owner file holds: revisions grow for ever, whoever owns the segment."""

    pid: int
    revision: int
    limit_bytes: int
    pool_bytes: int = 0
    """What the engine wrote at its start: the end of its address range, beyond which no limit may go."""
    identity: tuple[int, int] = (0, 0)
    """The segment's that ``pool_bytes`` belongs to."""


class Owner:
    """The right to write one segment's limit, as a lock on ``.<name>.tidegate`` beside it."""

    def __init__(self, segment: Path) -> None:
        self.path = segment.with_name(f".{segment.name}.tidegate")
        self.revision = 0
        self.limit_bytes = 0
        """The last one written by any owner; 0: none yet."""
        self.pool_bytes = 0
        self.identity = (0, 0)
        self._segment = segment
        self._descriptor = -1

    @property
    def taken(self) -> bool:
        return self._descriptor >= 0

    def take(self) -> None:
        """Become the owner; SegmentError ``owned`` names the process that is. Taking twice is one taking."""
        if self.taken:
            return
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise SegmentError(str(self.path), "forbidden", error.strerror or str(error)) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            note = _note(descriptor)
            os.close(descriptor)
            who = f"process {note.pid}" if note is not None else "another process"
            raise SegmentError(str(self._segment), "owned", f"its limit is written by {who}") from error
        self._descriptor = descriptor
        note = _note(descriptor)
        if note is not None:
            self.revision, self.limit_bytes = note.revision, note.limit_bytes
            self.pool_bytes, self.identity = note.pool_bytes, note.identity
        self._record()

    def pool(self, pool_bytes: int, identity: tuple[int, int]) -> None:
        """Note the engine's whole pool, for owners to come: they may first see it lowered."""
        self.pool_bytes, self.identity = pool_bytes, identity
        if self.taken:
            self._record()

    def next_revision(self, limit_bytes: int) -> int:
        """Note a limit that is about to be written. Before the write: a crash between skips a revision, never reuses
        one."""
        if not self.taken:
            raise SegmentError(str(self._segment), "owned", "its limit is not this process's to write")
        self.revision += 1
        self.limit_bytes = limit_bytes
        self._record()
        return self.revision

    def release(self) -> None:
        """Let another process own it; the note stays, for its revision."""
        if self.taken:
            os.close(self._descriptor)
            self._descriptor = -1

    def _record(self) -> None:
        # Padded: a shorter note leaves no tail of a longer one, and there is no moment with an empty file.
        note = OwnerNote(os.getpid(), self.revision, self.limit_bytes, self.pool_bytes, self.identity)
        os.pwrite(self._descriptor, msgspec.json.encode(note).ljust(256), 0)


def holders(path: Path, proc: Path = _PROC) -> tuple[str, ...]:
    """``<pid> <command>`` of the other processes that have the file open, as far as this one may see."""
    found = []
    for process in sorted(proc.glob("[0-9]*"), key=lambda entry: int(entry.name)):
        if int(process.name) == os.getpid():
            continue
        try:
            links = [os.readlink(link) for link in (process / "fd").iterdir()]
            if str(path) in links:
                found.append(f"{process.name} {(process / 'comm').read_text().strip()}")
        except OSError:
            continue  # gone, or somebody else's
    return tuple(found)


def _note(descriptor: int) -> OwnerNote | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=OwnerNote)
    except msgspec.MsgspecError:
        return None
