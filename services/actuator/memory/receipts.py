"""What a transfer and a compaction report, and the sums that the metrics show. Pure."""

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
ACTUATOR: Final = "actuator"
"""Who asked, in sums."""


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


class Compaction(msgspec.Struct, frozen=True):
    """One finished compaction: what it gave, against the fewest bytes that could have given it."""

    asked_by: str
    groups_freed: int
    moved_bytes: int
    lower_bound_bytes: int
    """The planner's bound: no plan frees as many groups with fewer bytes."""
    dropped: int
    """Moves whose source changed under the copy; their destinations are free again."""
    pause_us: float
    """The engine stood still this long, for the swap of its tables."""
    transfer: Transfer | None = None
    """None where nothing says how its bytes went."""


class Totals(msgspec.Struct):
    """Sums of one kind and path of transfer."""

    transfers: int = 0
    bytes: int = 0
    pieces: int = 0
    seconds: float = 0.0
    queue_s: float = 0.0

    def add(self, transfer: Transfer) -> None:
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
        self.bytes_by_asker: dict[str, int] = {}
        self.compactions = 0
        self.groups_freed = 0
        self.moved_bytes = 0
        self.lower_bound_bytes = 0
        self.dropped_moves = 0
        self.pause_us = 0.0
        self.longest_pause_us = 0.0

    def transfer(self, one: Transfer) -> None:
        """Count a transfer."""
        self.transfers.setdefault((one.kind, one.path), Totals()).add(one)
        self.bytes_by_asker[one.asked_by] = self.bytes_by_asker.get(one.asked_by, 0) + one.bytes

    def compaction(self, one: Compaction) -> None:
        """Count a compaction and the transfer that it consisted of, where that is known."""
        if one.transfer is not None:
            self.transfer(one.transfer)
        self.compactions += 1
        self.groups_freed += one.groups_freed
        self.moved_bytes += one.moved_bytes
        self.lower_bound_bytes += one.lower_bound_bytes
        self.dropped_moves += one.dropped
        self.pause_us += one.pause_us
        self.longest_pause_us = max(self.longest_pause_us, one.pause_us)

    def effect(self, said: Receipt | WorkerOutcome) -> None:
        """Count what became of an action, once, when it is done. Transfers count as they lie in the arena, under
        ``engine`` or ``actuator``: action ids without end would be no sums."""
        for one in said.moved:
            asked_by = ENGINE if one.asked_by == ENGINE else ACTUATOR
            self.transfer(Transfer(one.kind, asked_by, one.bytes, one.pieces, one.path, one.seconds, one.queue_s))
        if said.compacted_bytes or said.dropped_moves or said.lower_bound_bytes:
            self.compaction(
                Compaction(
                    said.action_id,
                    said.pages_freed,
                    said.compacted_bytes,
                    said.lower_bound_bytes,
                    said.dropped_moves,
                    said.pause_us,
                )
            )
