"""The array seam: where the bytes of blocks lie. NumPy here, a GPU in cupy_arrays.py; movers know only this.

An arena is uint8 [blocks, block_bytes] that starts at an address. Its constructor allocates or takes memory that
is there already; opening a shared segment is a step of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory import segment
from services.actuator.memory.copying import checksums
from services.actuator.memory.errors import BadGeometry, SegmentGone
from services.actuator.memory.geometry import Geometry

U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]
I8 = NDArray[np.int64]


class Arena(Protocol):
    """What a mover needs to know of a place with blocks."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def address(self) -> int:
        """Of block 0, in the address space of this process and its device."""
        ...

    @property
    def on_device(self) -> bool:
        """True: the bytes lie in the memory of a GPU."""
        ...

    def check(self) -> None:
        """SegmentGone when the memory must not be touched any more."""
        ...

    def checksum(self, blocks: I8) -> U8:
        """Checksum of each block, the same for the same bytes wherever they lie: uint64 [n]."""
        ...

    def read(self, blocks: I8) -> U1:
        """Copies of blocks: uint8 [n, block_bytes] in this process's memory."""
        ...

    def write(self, blocks: I8, values: U1) -> None:
        """Set blocks from uint8 [n, block_bytes]."""
        ...


class NumpyArena:
    """An arena whose bytes NumPy can see; ``view`` is uint8 [blocks, block_bytes], C-ordered."""

    on_device = False

    def __init__(self, geometry: Geometry, view: U1) -> None:
        expected = (geometry.blocks, geometry.block_bytes)
        if view.dtype != np.uint8 or view.shape != expected or not view.flags.c_contiguous:
            raise BadGeometry("bytes of the view", view.nbytes, f"C-ordered uint8 {expected[0]} x {expected[1]}")
        self.geometry = geometry
        self._view: U1 | None = view

    @property
    def view(self) -> U1:
        """uint8 [blocks, block_bytes]; SegmentGone once closed."""
        if self._view is None:
            raise SegmentGone("arena", 0, self.geometry.arena_bytes, "closed")
        return self._view

    @property
    def address(self) -> int:
        return int(self.view.ctypes.data)

    def check(self) -> None:
        """SegmentGone once closed."""
        if self._view is None:
            raise SegmentGone("arena", 0, self.geometry.arena_bytes, "closed")

    def checksum(self, blocks: I8) -> U8:
        """uint64 [n] of ``blocks`` int64 [n]; BadGeometry for a block outside the arena."""
        self.geometry.group_of(blocks)
        return checksums(self.view, np.ascontiguousarray(blocks, np.int64))

    def read(self, blocks: I8) -> U1:
        """Copies of ``blocks``: uint8 [n, block_bytes]."""
        self.geometry.group_of(blocks)
        return self.view[blocks]

    def write(self, blocks: I8, values: U1) -> None:
        """Set ``blocks`` from uint8 [n, block_bytes]."""
        self.geometry.group_of(blocks)
        self.view[blocks] = values

    def close(self) -> None:
        """Let go of the memory. Arrays that others took of it stay valid."""
        self._view = None


class PrivateArena(NumpyArena):
    """Zeroed memory of this process alone: tests, the emulated engine, and the host tier without a GPU."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__(geometry, _aligned(geometry))


class SharedArena(NumpyArena):
    """The blocks of a shared segment. The engine creates and unlinks it, the actuator opens and closes it."""

    def __init__(self, opened: segment.Segment) -> None:
        geometry = opened.geometry
        flat = np.frombuffer(opened.memory, np.uint8, geometry.arena_bytes, segment.HEADER_BYTES)
        super().__init__(geometry, flat.reshape(geometry.blocks, geometry.block_bytes))
        self._segment: segment.Segment | None = opened
        self.name = opened.name
        """The handle that another process opens it by."""

    @classmethod
    def create(cls, name: str, geometry: Geometry, folder: Path = segment.FOLDER) -> SharedArena:
        """Make it, zeroed. Errors: :func:`segment.create`."""
        return cls(segment.create(name, geometry, folder))

    @classmethod
    def open(cls, name: str, geometry: Geometry | None = None, folder: Path = segment.FOLDER) -> SharedArena:
        """Open another process's arena; ``geometry`` is what its engine described. Errors: :func:`segment.attach`."""
        return cls(segment.attach(name, geometry, folder))

    def check(self) -> None:
        """SegmentGone when it was closed, removed, cut short or overwritten, or its engine died."""
        if self._segment is None:
            raise SegmentGone(self.name, 0, self.geometry.arena_bytes, "closed")
        self._segment.check()

    def close(self) -> None:
        """Let go of it; the segment stays for the others. Twice is once."""
        super().close()
        opened, self._segment = self._segment, None
        if opened is not None:
            opened.close()

    def unlink(self) -> None:
        """Take the segment away and let go of it. Only its creator may: others just close."""
        if self._segment is not None and self._segment.owner:
            self._segment.remove()
        self.close()


def _aligned(geometry: Geometry) -> U1:
    """Zeroed memory that starts on a memory page, as shared and pinned memory do."""
    room = np.zeros(geometry.arena_bytes + 4096, np.uint8)
    start = -int(room.ctypes.data) % 4096
    return room[start : start + geometry.arena_bytes].reshape(geometry.blocks, geometry.block_bytes)


def host_geometry(block_bytes: int, slots: int) -> Geometry:
    """The geometry of a host arena: slots as large as blocks, no page groups."""
    return Geometry(block_bytes, 1, slots)
