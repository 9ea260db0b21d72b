"""What a transfer reports, and the sums over transfers and compactions that the metrics show. Pure."""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.engine import Receipt
from schemas.movement import Moved
from schemas.outcomes import WorkerOutcome

IN_CARD: Final = "move"
"""Within one arena."""
OUT: Final = "out"
"""From the card's arena to a host arena."""
BACK: Final = "back"
"""From a host arena to the card's arena."""
ENGINE: Final = "engine"
"""Who asked, where the engine moved something by itself."""


class Transfer(msgspec.Struct, frozen=True):
    """One finished transfer: what it moved, how, and how long it waited and took."""

    kind: str
    """``move``, ``out`` or ``back``."""
    asked_by: str
    """Who asked: an action id, a tier, a benchmark."""
    bytes: int
    pieces: int
    """Blocks moved; neighbouring ones may have gone in one copy."""
    path: str
    """How: the name of the copy path that ran."""
    seconds: float
    """From its start to the last byte."""
    queue_s: float = 0.0
    """From being asked for to its start."""

    @property
    def gb_per_s(self) -> float:
        """Payload rate, 1e9 bytes a second; 0 for an empty transfer."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    def moved(self, scale: int = 1) -> Moved:
        """As receipts and outcomes carry it; ``scale``: the model's bytes per byte of the arena."""
        return Moved(self.kind, self.path, self.bytes, self.pieces, self.seconds, self.queue_s, self.asked_by, scale)


class Totals(msgspec.Struct):
    """Sums of one kind and path of transfer."""

    transfers: int = 0
    bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0
    queue_s: float = 0.0

    def add(self, transfer: Transfer | Moved) -> None:
        """Count one transfer."""
        self.transfers += 1
        self.bytes += transfer.bytes
        self.pieces += transfer.pieces
        self.seconds += transfer.seconds
        self.queue_s += transfer.queue_s


class Ledger:
    """Sums since the start, for counters: they only grow."""

    def __init__(self) -> None:
        self.transfers: dict[tuple[str, str], Totals] = {}
        """By (kind, path)."""
        self.compactions = 0
        self.groups_freed = 0
        self.moved_bytes = 0
        self.lower_bound_bytes = 0
        self.dropped_moves = 0
        self.pause_us = 0.0
        self.longest_pause_us = 0.0

    def effect(self, said: Receipt | WorkerOutcome) -> None:
        """Count what became of an action, once, when it is done. Transfers count as they lie in the arena."""
        for one in said.moved:
            self.transfers.setdefault((one.kind, one.path), Totals()).add(one)
        if said.compacted_bytes or said.dropped_moves or said.lower_bound_bytes:
            self.compactions += 1
            self.groups_freed += said.pages_freed
            self.moved_bytes += said.compacted_bytes
            self.lower_bound_bytes += said.lower_bound_bytes
            self.dropped_moves += said.dropped_moves
            self.pause_us += said.pause_us
            self.longest_pause_us = max(self.longest_pause_us, said.pause_us)
