"""Movers: they execute a plan where the bytes are, and say what it cost. They decide nothing.

Relocation is two-phase (pool, relocation): a mover only ever copies into blocks that somebody reserved and from
blocks that somebody pinned, so a copy that is abandoned half-way harms nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena, NumpyArena, PrivateArena, host_geometry
from services.actuator.memory.copying import STREAM_BYTES, copy_runs, runs, stream_runs
from services.actuator.memory.errors import BadGeometry, BadMoves
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.paths import PIECE_BYTES, PathTable, fixed, measure
from services.actuator.memory.receipts import BACK, IN_CARD, OUT, Transfer

I8 = NDArray[np.int64]

BATCH: Final = "batch"
"""CPU: one compiled call for the whole plan."""
STREAMED: Final = "streamed"
"""CPU: the same, written past the caches; for blocks of whole 64 bytes."""
COPIES: Final = "copies"
"""CPU: one NumPy copy per run of neighbouring blocks."""
_MEASURED_BYTES: Final = 32 << 20
"""On each side: two of them do not fit into a cache."""


class Mover(Protocol):
    """Copies blocks within an arena and between it and a host arena. Synchronous: lanes.py runs it aside."""

    def move(self, arena: Arena, moves: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``moves`` (int64 [n, 2]: source, destination). BadMoves, nothing touched, when they overlap."""
        ...

    def out(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``blocks`` of the arena (int64 [n]) to ``slots`` of the host arena (int64 [n])."""
        ...

    def back(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``slots`` of the host arena to ``blocks`` of the arena."""
        ...


class NumpyMover:
    """Both sides are memory of the CPU. Give it a measured table (:func:`measure_paths`)."""

    def __init__(self, paths: PathTable, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.paths = paths
        self._clock = clock

    def move(self, arena: Arena, moves: I8, *, asked_by: str = "") -> Transfer:
        """Errors: BadMoves, SegmentGone."""
        into, from_ = checked_moves(moves, arena.geometry)
        return self._run(IN_CARD, arena, into, arena, from_, asked_by)

    def out(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Errors: BadMoves, BadGeometry, SegmentGone."""
        checked_pairs(arena.geometry, blocks, host.geometry, slots, into_host=True)
        return self._run(OUT, host, slots, arena, blocks, asked_by)

    def back(self, arena: Arena, blocks: I8, host: Arena, slots: I8, *, asked_by: str = "") -> Transfer:
        """Errors: BadMoves, BadGeometry, SegmentGone."""
        checked_pairs(arena.geometry, blocks, host.geometry, slots, into_host=False)
        return self._run(BACK, arena, blocks, host, slots, asked_by)

    def _run(self, kind: str, target: Arena, into: I8, source: Arena, from_: I8, asked_by: str) -> Transfer:
        target.check()
        source.check()
        started = self._clock()
        size = target.geometry.block_bytes
        starts, origins, lengths = runs(into, from_)
        piece = int(size * len(into) / len(starts)) if len(starts) else size
        path = self.paths.best(piece)
        if path == STREAMED and (target.address | source.address | size) % STREAM_BYTES:
            path = BATCH
        if path == STREAMED:
            stream_runs(target.address, source.address, starts, origins, lengths, size)
        elif path == BATCH:
            copy_runs(target.address, source.address, starts, origins, lengths, size)
        else:
            _copies(target, source, starts, origins, lengths)
        seconds = self._clock() - started
        return Transfer(kind, asked_by, len(into) * size, len(into), path, seconds)


def checked_moves(moves: I8, geometry: Geometry) -> tuple[I8, I8]:
    """(destinations, sources) of ``moves`` int64 [n, 2]; BadMoves unless all lie in the arena, no block is written
    twice, none is moved twice and none is both source and destination.

    So the order of execution does not matter, and a GPU may do all at once.
    """
    if moves.ndim != 2 or moves.shape[1] != 2 or moves.dtype != np.int64:
        raise BadMoves(f"a plan is int64 [n, 2], not {moves.dtype} {list(moves.shape)}")
    sources = np.ascontiguousarray(moves[:, 0])
    destinations = np.ascontiguousarray(moves[:, 1])
    _inside(sources, geometry, "sources outside the arena")
    _inside(destinations, geometry, "destinations outside the arena")
    uses = np.bincount(destinations, minlength=geometry.blocks)
    _refuse("destinations used twice", uses[destinations] > 1, destinations)
    _refuse("sources that are destinations too", uses[sources] > 0, sources)
    moved = np.bincount(sources, minlength=geometry.blocks)
    _refuse("sources moved twice", moved[sources] > 1, sources)
    return destinations, sources


def checked_pairs(card: Geometry, blocks: I8, host: Geometry, slots: I8, *, into_host: bool) -> None:
    """BadGeometry when the two arenas' blocks differ in size; BadMoves unless ``blocks`` and ``slots`` are as many,
    lie inside, and the side written to has no place twice."""
    if card.block_bytes != host.block_bytes:
        raise BadGeometry("block_bytes of the host arena", host.block_bytes, f"{card.block_bytes}")
    if blocks.shape != slots.shape or blocks.ndim != 1:
        raise BadMoves("blocks and slots differ in number", max(blocks.size, slots.size))
    _inside(blocks, card, "blocks outside the arena")
    _inside(slots, host, "slots outside the host arena")
    written, count = (slots, host.blocks) if into_host else (blocks, card.blocks)
    _refuse("places written twice", np.bincount(written, minlength=count)[written] > 1, written)


def measure_paths(piece_bytes: tuple[int, ...] = PIECE_BYTES, *, seed: int = 0) -> PathTable:
    """Time the CPU paths on scattered pieces: 64 MiB, and some 2 s on a busy machine of two cores."""
    order = np.random.default_rng(seed)
    whole = host_geometry(_MEASURED_BYTES, 1)
    near, far = PrivateArena(whole).view, PrivateArena(whole).view
    # Untouched memory is one page of zeros that never leaves the cache: reading it looks ten times as fast.
    near[:], far[:] = 1, 2

    def run(path: str, size: int) -> tuple[int, float]:
        geometry = host_geometry(size, max(_MEASURED_BYTES // size, 1))
        shape = (geometry.blocks, size)
        blocks = order.permutation(geometry.blocks).astype(np.int64)
        slots = order.permutation(geometry.blocks).astype(np.int64)
        arena, host = NumpyArena(geometry, near.reshape(shape)), NumpyArena(geometry, far.reshape(shape))
        done = NumpyMover(fixed(path)).out(arena, blocks, host, slots)
        return done.bytes, done.seconds

    return measure(run, (BATCH, STREAMED, COPIES), piece_bytes)


def _copies(target: Arena, source: Arena, starts: I8, origins: I8, lengths: I8) -> None:
    if not isinstance(target, NumpyArena) or not isinstance(source, NumpyArena):
        raise BadGeometry("arenas in this process's memory", 0, "both sides of a copy on the CPU")
    to, of = target.view, source.view
    for into, from_, length in zip(starts.tolist(), origins.tolist(), lengths.tolist(), strict=True):
        to[into : into + length] = of[from_ : from_ + length]


def _inside(blocks: I8, geometry: Geometry, reason: str) -> None:
    _refuse(reason, (blocks < 0) | (blocks >= geometry.blocks), blocks)


def _refuse(reason: str, wrong: NDArray[np.bool_], blocks: I8) -> None:
    if wrong.any():
        first = int(np.argmax(wrong))
        raise BadMoves(reason, int(wrong.sum()), first, int(blocks[first]))
