"""Transfers beside the caller: one lane for moves in the card, one for each direction of the link.

A lane does its transfers in the order they were asked for; the lanes run at the same time, so that a link carries
both directions at once. Copies run without the interpreter lock, so one thread a lane is enough.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.mover import Mover
from services.actuator.memory.receipts import BACK, IN_CARD, OUT, Transfer

I8 = NDArray[np.int64]
_Work = tuple[Callable[[], Transfer], "Future[Transfer]", float]
LANES: Final = (IN_CARD, OUT, BACK)


class Lanes:
    """``mover`` behind three lanes. :meth:`start` starts the threads, :meth:`close` ends them."""

    def __init__(self, mover: Mover, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._mover = mover
        self._clock = clock
        self._queues: dict[str, queue.SimpleQueue[_Work | None]] = {lane: queue.SimpleQueue() for lane in LANES}
        self._threads: list[threading.Thread] = []
        self._open = False

    def start(self) -> None:
        """Start one thread a lane. Once."""
        if self._threads:
            raise RuntimeError("lanes start once")
        self._open = True
        for lane in LANES:
            thread = threading.Thread(target=self._serve, args=(self._queues[lane],), name=f"lane {lane}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Do what was asked for so far, then end. Later calls of move, out and back raise RuntimeError."""
        self._open = False
        for waiting in self._queues.values():
            waiting.put(None)
        for thread in self._threads:
            thread.join()

    def move(self, arena: Arena, moves: I8, *, asked_by: str = "") -> Future[Transfer]:
        """:meth:`Mover.move`, later. The future also brings its errors."""
        return self._ask(IN_CARD, lambda: self._mover.move(arena, moves, asked_by=asked_by))

    def out(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Future[Transfer]:
        """:meth:`Mover.out`, later."""
        return self._ask(OUT, lambda: self._mover.out(arena, blocks, host, slots, asked_by=asked_by))

    def back(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Future[Transfer]:
        """:meth:`Mover.back`, later."""
        return self._ask(BACK, lambda: self._mover.back(arena, blocks, host, slots, asked_by=asked_by))

    def _ask(self, lane: str, work: Callable[[], Transfer]) -> Future[Transfer]:
        if not self._open:
            raise RuntimeError("the lanes are closed")
        future: Future[Transfer] = Future()
        self._queues[lane].put((work, future, self._clock()))
        return future

    def _serve(self, waiting: queue.SimpleQueue[_Work | None]) -> None:
        while (item := waiting.get()) is not None:
            work, future, asked = item
            if not future.set_running_or_notify_cancel():
                continue
            waited = self._clock() - asked
            try:
                done = work()
            except BaseException as error:  # noqa: BLE001  # the future carries it to whoever asked
                future.set_exception(error)
            else:
                future.set_result(msgspec.structs.replace(done, queue_s=waited))
