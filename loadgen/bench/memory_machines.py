"""The two sides of the memory benchmark on one machine: Tidegate's mover, and the plainest copy of the same bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena, NumpyArena
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import Mover, NumpyMover, measure_paths
from services.actuator.memory.paths import told
from services.errors import UserError

U1 = NDArray[np.uint8]
I8 = NDArray[np.int64]
PAGE: Final = 4096


class Machine(Protocol):
    """Card memory and host memory of ``size`` bytes each, cut into arenas as needed, and what runs on them."""

    backend: str
    mover: Mover
    size: int
    paths: dict[str, Any]
    """For the report: what the start-up measurement chose."""

    def card(self, geometry: Geometry) -> Arena: ...

    def host(self, geometry: Geometry) -> Arena: ...

    def plain_in_card(self, size: int) -> float:
        """Seconds of one contiguous copy of ``size`` bytes (at most half the card's) inside the card."""
        ...

    def plain_link(self, size: int, directions: tuple[str, ...]) -> float:
        """Seconds of one contiguous copy of ``size`` bytes per direction (``out``, ``back``), all at once."""
        ...

    def step(self) -> float:
        """Seconds of a stand-in for a decode step, which reads the arena."""
        ...


class NumpyMachine:
    """Everything is memory of the CPU: the "link" is the memory bus, and one thread copies on either side."""

    backend = "numpy"

    def __init__(self, size: int) -> None:
        self.size = size
        self.mover: Mover = NumpyMover(table := measure_paths())
        self.paths: dict[str, Any] = {"all": dict(told(table))}
        self._card, self._host = _touched(size), _touched(size)
        self._words = self._card.view(np.uint64)[: min(size, 64 << 20) // 8]

    def card(self, geometry: Geometry) -> Arena:
        return NumpyArena(geometry, cut(self._card, geometry))

    def host(self, geometry: Geometry) -> Arena:
        return NumpyArena(geometry, cut(self._host, geometry))

    def plain_in_card(self, size: int) -> float:
        half = self.size // 2
        return timed(lambda: np.copyto(self._card[half : half + size], self._card[:size]))

    def plain_link(self, size: int, directions: tuple[str, ...]) -> float:
        # Different halves, so that both directions at once do not meet.
        half = self.size // 2
        work = {
            "out": lambda: np.copyto(self._host[:size], self._card[:size]),
            "back": lambda: np.copyto(self._card[half : half + size], self._host[half : half + size]),
        }
        return together([work[direction] for direction in directions])

    def step(self) -> float:
        return timed(lambda: np.add.reduce(self._words))


def machine(backend: str, size: int) -> Machine:
    """``numpy``, ``cupy``, or ``auto``: a GPU if CuPy finds one. UserError for ``cupy`` without one."""
    if backend not in ("auto", "numpy", "cupy"):
        raise UserError(f"backend: found {backend}, expected auto, numpy or cupy")
    if backend != "numpy":
        try:
            from loadgen.bench.memory_gpu import CupyMachine
        except ImportError as error:
            if backend == "cupy":
                raise UserError(f"backend cupy: {error}; install the extra tidegate[gpu]") from error
        else:
            if (reason := CupyMachine.missing()) is None:
                return CupyMachine()
            if backend == "cupy":
                raise UserError(f"backend cupy: {reason}")
    return NumpyMachine(size)


def cut(memory: U1, geometry: Geometry) -> U1:
    """The first bytes of ``memory`` as uint8 [blocks, block_bytes]."""
    return memory[: geometry.arena_bytes].reshape(geometry.blocks, geometry.block_bytes)


def timed(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def together(work: list[Callable[[], object]]) -> float:
    """Seconds until all of ``work`` is done, each in a thread of its own; one alone runs here."""
    if len(work) == 1:
        return timed(work[0])
    start = threading.Barrier(len(work) + 1)

    def run(one: Callable[[], object]) -> None:
        start.wait()
        one()

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    start.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started


def _touched(size: int) -> U1:
    """Memory with a page behind every address, filled with something that is not zero."""
    room = np.empty(size + PAGE, np.uint8)
    start = -int(room.ctypes.data) % PAGE
    room[:] = 0xA5
    return room[start : start + size]
