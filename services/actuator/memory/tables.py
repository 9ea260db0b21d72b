"""Block tables of all sessions in one array, so that a thousand re-pointed blocks are one NumPy assignment.

``cells`` holds the tables one after the other in spans whose sizes are powers of two; a block knows its cell
(``Blocks.cell``), a session its span. A table that outgrows its span gets one of twice the size.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import Blocks
from services.actuator.memory.states import SessionState

I8 = NDArray[np.int64]

SMALLEST_SPAN: Final = 16


class Session:
    """An owner of blocks.

    ``at``, ``size`` and ``span`` are its cells (first, in use, reserved); ``full`` counts the leading blocks that
    are complete; ``since`` says since when it is idle; ``away`` is how many blocks it left with; ``prefix`` is the
    owner of the shared prefix it reads, if any, and ``readers`` how many sessions read this one.
    """

    __slots__ = ("at", "away", "full", "pinned", "prefix", "readers", "since", "size", "span", "state")

    def __init__(self, state: SessionState) -> None:
        self.state = state
        self.at = 0
        self.size = 0
        self.span = 0
        self.full = 0
        self.since = 0.0
        self.away = 0
        self.pinned = False
        self.prefix: int | None = None
        self.readers = 0


class Tables:
    """Cells int64 of all tables; ``blocks.cell`` is kept in step."""

    def __init__(self, blocks: Blocks) -> None:
        self.cells: I8 = np.zeros(max(blocks.geometry.blocks, SMALLEST_SPAN), np.int64)
        self._blocks = blocks
        self._top = 0
        self._spare: dict[int, list[int]] = {}

    def table(self, session: Session) -> I8:
        """The session's blocks in order, int64 [n]; a view that the next call may change."""
        return self.cells[session.at : session.at + session.size]

    def append(self, session: Session, added: I8) -> None:
        """Put ``added`` int64 [n] at the end of the session's table."""
        size = session.size + len(added)
        if size > session.span:
            old = self.table(session)  # stays what it is when _reserve replaces the array
            was_at, was_span = session.at, session.span
            session.span = max(SMALLEST_SPAN, 1 << (size - 1).bit_length())
            session.at = self._reserve(session.span)
            self.cells[session.at : session.at + session.size] = old
            self._blocks.cell[old] = np.arange(session.at, session.at + session.size)
            self._release(was_at, was_span)
        at = session.at + session.size
        self.cells[at : at + len(added)] = added
        self._blocks.cell[added] = np.arange(at, at + len(added))
        session.size = size

    def clear(self, session: Session) -> None:
        """Empty the session's table; its blocks' cells are the caller's to reset."""
        self._release(session.at, session.span)
        session.at = session.size = session.span = 0

    def repoint(self, sources: I8, destinations: I8) -> None:
        """Every table that held ``sources[i]`` holds ``destinations[i]`` in its place."""
        at = self._blocks.cell[sources]
        self.cells[at] = destinations
        self._blocks.cell[destinations] = at

    def _reserve(self, span: int) -> int:
        spare = self._spare.get(span)
        if spare:
            return spare.pop()
        at = self._top
        self._top += span
        if self._top > len(self.cells):
            grown = np.zeros(max(self._top, 2 * len(self.cells)), np.int64)
            grown[:at] = self.cells[:at]
            self.cells = grown
        return at

    def _release(self, at: int, span: int) -> None:
        if span:
            self._spare.setdefault(span, []).append(at)
