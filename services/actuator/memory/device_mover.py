"""The mover of a GPU: kernels or copy engines, whichever the start-up measurement found faster for the piece.

Ways through the link: ``batch`` (all copies in one driver call), ``copies`` (one call per run of neighbours),
``sm`` (a kernel reads or writes pinned host memory itself, 16 bytes at a time), ``staged`` (a kernel gathers into a
buffer on the card, which goes over in one copy per run of host slots). In the card: ``sm``, ``batch`` and ``copies``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.copying import runs
from services.actuator.memory.device import Device
from services.actuator.memory.errors import BadGeometry
from services.actuator.memory.mover import checked_moves, checked_pairs
from services.actuator.memory.paths import PathTable
from services.actuator.memory.receipts import BACK, IN_CARD, OUT, Transfer

I8 = NDArray[np.int64]
U8 = NDArray[np.uint64]

SM: Final = "sm"
STAGED: Final = "staged"
BATCH: Final = "batch"
COPIES: Final = "copies"
IN_CARD_PATHS: Final = (SM, BATCH, COPIES)
LINK_PATHS: Final = (BATCH, STAGED, SM, COPIES)
STAGING_BYTES: Final = 32 << 20
"""Per direction, in device memory: the guard's account must hold it."""
BATCH_LIMIT: Final = 4096
"""Copies in one driver call: its lists must fit into the command buffer, and a lower one shows progress earlier."""


class Tables(msgspec.Struct, frozen=True):
    """Measured rates of the paths, per kind of transfer, and the thread blocks of a kernel launch."""

    in_card: PathTable
    out: PathTable
    back: PathTable
    thread_blocks: int


class DeviceMover:
    """``pinned``: the host arenas can be read and written by the card; without that only the copy engines serve.

    Each kind of transfer has a stream and a staging buffer of its own; calls of the same kind take turns.
    """

    def __init__(
        self,
        device: Device,
        tables: Tables,
        *,
        pinned: bool = True,
        staging_bytes: int = STAGING_BYTES,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.tables = tables
        self._device = device
        self._pinned = pinned
        self._staging_bytes = staging_bytes
        self._clock = clock
        self._streams = {kind: device.new_stream() for kind in (IN_CARD, OUT, BACK)}
        self._locks = {kind: threading.Lock() for kind in (IN_CARD, OUT, BACK)}
        self._staging: dict[str, Any] = {}

    def move(self, arena: Arena, moves: I8, *, asked_by: str = "") -> Transfer:
        """One launch for the whole plan, or the copy engines. Errors: BadMoves, SegmentGone, BadGeometry."""
        into, from_ = checked_moves(moves, arena.geometry)
        _need(arena, on_device=True)
        return self._run(IN_CARD, self.tables.in_card, arena, into, arena, from_, asked_by)

    def out(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Errors: BadMoves, BadGeometry, SegmentGone."""
        checked_pairs(arena.geometry, blocks, host.geometry, slots, into_host=True)
        _need(arena, on_device=True)
        _need(host, on_device=False)
        return self._run(OUT, self.tables.out, host, slots, arena, blocks, asked_by)

    def back(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Errors: BadMoves, BadGeometry, SegmentGone."""
        checked_pairs(arena.geometry, blocks, host.geometry, slots, into_host=False)
        _need(arena, on_device=True)
        _need(host, on_device=False)
        return self._run(BACK, self.tables.back, arena, blocks, host, slots, asked_by)

    def run_path(self, path: str, kind: str, target: Arena, into: I8, source: Arena, from_: I8) -> float:
        """Seconds of one transfer by a named path, checked by nobody: for the start-up measurement.

        NotImplementedError for a path that this machine lacks.
        """
        with self._locks[kind]:
            started = self._clock()
            self._copy(path, kind, target, into, source, from_)
            return self._clock() - started

    def _run(
        self, kind: str, table: PathTable, target: Arena, into: I8, source: Arena, from_: I8, asked_by: str
    ) -> Transfer:
        size = target.geometry.block_bytes
        waiting = self._clock()
        with self._locks[kind]:
            target.check()
            source.check()
            started = self._clock()
            path = table.best(size)
            if len(into):
                self._copy(path, kind, target, into, source, from_)
            seconds = self._clock() - started
        return Transfer(kind, asked_by, len(into) * size, len(into), path, seconds, started - waiting)

    def _copy(self, path: str, kind: str, target: Arena, into: I8, source: Arena, from_: I8) -> None:
        if path in (SM, STAGED) and kind != IN_CARD and not self._pinned:
            raise NotImplementedError("kernels reach the host's memory only where it is pinned")
        stream = self._streams[kind]
        try:
            if path == SM:
                self._by_kernel(kind, target, into, source, from_, stream)
            elif path == STAGED:
                self._by_staging(kind, target, into, source, from_, stream)
            elif path in (BATCH, COPIES):
                self._by_engine(path, target, into, source, from_, stream)
            else:
                raise NotImplementedError(f"no copy path {path}")
        finally:
            # After a failure too: whoever aborts the ticket gives its blocks to others, so nobody may write there.
            self._device.synchronize(stream)

    def _by_kernel(self, kind: str, target: Arena, into: I8, source: Arena, from_: I8, stream: Any) -> None:
        device, count, size = self._device, len(into), target.geometry.block_bytes
        if kind != IN_CARD:  # host memory likes rising addresses; inside the card sorting costs more than it brings
            order = np.argsort(into, kind="stable")
            into, from_ = into[order], from_[order]
        lists = device.upload(np.concatenate((into, from_)), stream)
        places = (lists.address, lists.address + 8 * count, count, size)
        if kind == IN_CARD:
            device.launch("move_blocks", self.tables.thread_blocks, (target.address, *places), stream)
        else:
            both = (target.address, source.address, *places)
            device.launch("copy_blocks", self.tables.thread_blocks, both, stream)
        device.synchronize(stream)  # the lists live until the kernel has read them

    def _by_staging(self, kind: str, target: Arena, into: I8, source: Arena, from_: I8, stream: Any) -> None:
        """In rounds of one staging buffer, sorted by host slot so that the copies over the link are long."""
        if kind == IN_CARD:
            raise NotImplementedError("staging serves the link")
        device, size = self._device, target.geometry.block_bytes
        slots, blocks = (into, from_) if kind == OUT else (from_, into)
        host, card = (target, source) if kind == OUT else (source, target)
        order = np.argsort(slots, kind="stable")
        staging = self._staging.get(kind)
        if staging is None:
            staging = self._staging[kind] = device.reserve(max(self._staging_bytes, size))
        room = max(staging.size // size, 1)
        for begin in range(0, len(order), room):
            chosen = order[begin : begin + room]
            lists = device.upload(np.ascontiguousarray(blocks[chosen]), stream)
            arguments = (lists.address, len(chosen), size)
            starts, places, lengths = runs(slots[chosen], np.arange(len(chosen), dtype=np.int64))
            on_host, staged = host.address + starts * size, staging.address + places * size
            if kind == OUT:
                both = (staging.address, card.address, *arguments)
                device.launch("gather_blocks", self.tables.thread_blocks, both, stream)
                self._engine(on_host, staged, lengths * size, stream)
            else:
                self._engine(staged, on_host, lengths * size, stream)
                both = (card.address, staging.address, *arguments)
                device.launch("scatter_blocks", self.tables.thread_blocks, both, stream)
            device.synchronize(stream)  # the buffer is used again in the next round

    def _by_engine(self, path: str, target: Arena, into: I8, source: Arena, from_: I8, stream: Any) -> None:
        size = target.geometry.block_bytes
        starts, origins, lengths = runs(into, from_)
        targets, sources, sizes = target.address + starts * size, source.address + origins * size, lengths * size
        if path == COPIES:
            self._one_by_one(targets, sources, sizes, stream)
        elif self._device.has_batch:
            self._engine(targets, sources, sizes, stream)
        else:
            raise NotImplementedError("the driver has no batched copies")

    def _engine(self, targets: I8, sources: I8, sizes: I8, stream: Any) -> None:
        """By the copy engines, in as few calls as the driver offers."""
        if not self._device.has_batch or len(targets) == 1:
            self._one_by_one(targets, sources, sizes, stream)
            return
        lists = [values.astype(np.uint64) for values in (targets, sources, sizes)]
        for begin in range(0, len(targets), BATCH_LIMIT):
            to, of, size = (values[begin : begin + BATCH_LIMIT] for values in lists)
            self._device.copy_batch(to, of, size, stream)

    def _one_by_one(self, targets: I8, sources: I8, sizes: I8, stream: Any) -> None:
        for to, of, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._device.copy(to, of, size, stream)


def _need(arena: Arena, *, on_device: bool) -> None:
    if arena.on_device != on_device:
        raise BadGeometry("an arena's place (1: device, 0: host)", int(arena.on_device), str(int(on_device)))
