"""What a mover needs of a GPU. cupy_arrays.py has the real one; tests have one that runs the kernels on the CPU.

Pointers are plain numbers, so nothing here and in the mover knows CuPy.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

I8 = NDArray[np.int64]
U8 = NDArray[np.uint64]

THREADS: Final = 256
"""Threads of a thread block: with four 16-byte words each they have one tile of kernels.cu under way."""


class Buffer(Protocol):
    """Device memory that lives as long as this object."""

    @property
    def address(self) -> int: ...

    @property
    def size(self) -> int:
        """Bytes."""
        ...


class Device(Protocol):
    """One GPU, seen from one process. ``stream`` values are the device's own; work on one is in order."""

    @property
    def name(self) -> str: ...

    @property
    def processors(self) -> int:
        """SMs."""
        ...

    @property
    def has_batch(self) -> bool:
        """Whether :meth:`copy_batch` exists here (driver 12.8 and newer)."""
        ...

    def new_stream(self) -> Any:
        """Of the lowest priority, not synchronising with the default stream."""
        ...

    def reserve(self, size: int) -> Buffer:
        """Device memory for staging; MemoryError when the card has no room."""
        ...

    def upload(self, values: I8, stream: Any) -> Buffer:
        """A copy of ``values`` in device memory, ready for kernels of the same stream."""
        ...

    def launch(self, kernel: str, thread_blocks: int, arguments: tuple[int, ...], stream: Any) -> None:
        """Run a kernel of kernels.cu with THREADS threads a block. Addresses and counts are 8-byte numbers."""
        ...

    def copy(self, target: int, source: int, size: int, stream: Any) -> None:
        """One asynchronous copy by the copy engines, in any direction."""
        ...

    def copy_batch(self, targets: U8, sources: U8, sizes: U8, stream: Any) -> None:
        """All copies in one call; no order among them. NotImplementedError without ``has_batch``."""
        ...

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream, without the interpreter lock."""
        ...
