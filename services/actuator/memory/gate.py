"""The gate of a shared arena: who may copy in it now, decided by the kernel.

A lease alone cannot protect shared memory: an actuator that was stopped in the middle of a copy wakes after its
ticket lapsed and would write into blocks that belong to somebody else by then. So a copier holds a shared lock on
the gate's file while it copies and reads there, under the lock, whether its ticket is the open one; the engine
closes the gate under the exclusive lock, and only then gives the destinations to others. The kernel releases the
lock of a process that dies, after its memory is gone.

The file's content is one 64-bit number: the ticket that may be copied, 0 for none.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from services.actuator.memory.errors import SegmentGone, UnknownTicket

_NUMBER: Final = struct.Struct("<q")
NO_TICKET: Final = 0


class GateKeeper:
    """The engine's end. :meth:`open` and :meth:`close` are its only writers."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def create(cls, path: Path) -> GateKeeper:
        """Make the gate's file, for this user only, closed. What a dead engine left there is replaced: call it
        when you hold the arena of that name."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.pwrite(descriptor, _NUMBER.pack(NO_TICKET), 0)
        return cls(path, descriptor)

    def open(self, ticket: int) -> None:
        """Let ``ticket`` (> 0) be copied. The gate must be closed: whoever copies now copies for another ticket."""
        os.pwrite(self._descriptor, _NUMBER.pack(ticket), 0)

    def close(self) -> bool:
        """Let nobody copy. False, and nothing changed, while somebody does: never waits."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        os.pwrite(self._descriptor, _NUMBER.pack(NO_TICKET), 0)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True

    def remove(self) -> None:
        """Close the file and take it away."""
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)


class Gate:
    """The copier's end. The lock belongs to this object's open file, so one Gate serves one copy at a time."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def attach(cls, path: Path) -> Gate:
        """SegmentGone when the engine that made it took it away, or it is no gate."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise SegmentGone(str(path), 0, _NUMBER.size, error.strerror or str(error)) from error
        return cls(path, descriptor)

    @contextlib.contextmanager
    def passage(self, ticket: int) -> Iterator[None]:
        """Hold the gate while copying for ``ticket``; never waits. UnknownTicket when another or none may be
        copied."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            # The engine holds it alone only to close it: the ticket that was open is ending this moment.
            raise UnknownTicket(ticket, NO_TICKET, 0) from None
        try:
            found = os.pread(self._descriptor, _NUMBER.size, 0)
            if len(found) != _NUMBER.size:
                raise SegmentGone(str(self.path), len(found), _NUMBER.size)
            (opened,) = _NUMBER.unpack(found)
            if opened != ticket or ticket == NO_TICKET:
                raise UnknownTicket(ticket, opened, int(opened != NO_TICKET))
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._descriptor)
