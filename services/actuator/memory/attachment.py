"""An engine's shared arena as the actuator has it open: the blocks, the gate, and a mover that copies."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from schemas.engine import Description
from services.actuator.memory import segment
from services.actuator.memory.arrays import SharedArena
from services.actuator.memory.gate import Gate
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import BATCH, Mover, NumpyMover
from services.actuator.memory.paths import fixed
from services.actuator.memory.receipts import Transfer

I8 = NDArray[np.int64]


def gate_path(name: str, folder: Path = segment.FOLDER) -> Path:
    """Where the gate of the shared arena ``name`` is."""
    return folder / f"{name}{segment.GATE_SUFFIX}"


class SharedAttachment:
    """Copies in a shared arena while its gate is held."""

    def __init__(self, arena: SharedArena, gate: Gate, mover: Mover) -> None:
        self._arena = arena
        self._gate = gate
        self._mover = mover
        self._copying = threading.Lock()
        """A gate that is closed in the middle of a copy would tell the engine that the copier stopped."""

    @classmethod
    def open(cls, said: Description, mover: Mover | None = None, folder: Path = segment.FOLDER) -> SharedAttachment:
        """Open the arena that ``said.handle`` names. SegmentGone when it or its gate is missing, cut short or
        damaged, or when the engine that made it is dead. Without ``mover``: one call per plan."""
        arena = SharedArena.open(said.handle, folder=folder)
        try:
            gate = Gate.attach(gate_path(said.handle, folder))
        except BaseException:
            arena.close()
            raise
        return cls(arena, gate, mover or NumpyMover(fixed(BATCH)))

    @property
    def geometry(self) -> Geometry:
        return self._arena.geometry

    def copy(self, ticket: int, moves: I8, asked_by: str = "") -> Transfer:
        """See :class:`relocation.Attachment`; the segment is looked at under the gate, right before the copy."""
        with self._copying, self._gate.passage(ticket):
            return self._mover.move(self._arena, moves, asked_by=asked_by or f"ticket {ticket}")

    def close(self) -> None:
        """Let go of arena and gate, after a copy under way."""
        with self._copying:
            self._gate.close()
            self._arena.close()
