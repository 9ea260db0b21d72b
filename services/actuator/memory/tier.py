"""What a lower tier of KV is, for those who use it: the seam between the host's memory and a file. Pure.

Both directions are two-phase. ``prepare_put`` reserves, ``write`` copies, ``commit_put`` serves;
``prepare_get`` pins, ``read`` copies, ``commit_get`` keeps or drops. Whatever happens between two calls, nothing
half-written is ever served and every slot comes back. ``write`` and ``read`` block: call them aside, one at a time
for each ticket.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.slots import Entry, SlotAccount, SlotTicket

I8 = NDArray[np.int64]

_NEWEST: Final = 0.2
"""Weight of the newest transfer in a measured rate: five transfers follow a link that slowed down."""
_SMALLEST_BYTES: Final = 1 << 20
"""Smaller transfers tell of latency, not of bandwidth; they do not count."""


class Rate:
    """A measured bandwidth, bytes/s: ``assumed`` until a transfer was seen."""

    def __init__(self, assumed_bytes_per_s: float) -> None:
        self.bytes_per_s = assumed_bytes_per_s
        self.measured = False

    def saw(self, moved_bytes: int, seconds: float) -> None:
        """Take a finished transfer in; the first one replaces what was assumed."""
        if moved_bytes < _SMALLEST_BYTES or seconds <= 0:
            return
        weight = _NEWEST if self.measured else 1.0
        # Averaged as seconds a byte, which add up where rates do not.
        per_byte = (1 - weight) / self.bytes_per_s + weight * seconds / moved_bytes
        self.bytes_per_s = 1.0 / per_byte
        self.measured = True

    def seconds(self, moved_bytes: float) -> float:
        """How long so many bytes take."""
        return moved_bytes / self.bytes_per_s


class Tier(Protocol):
    """The host's memory or a file. Errors: those of SlotAccount; TierFull, TornSlot, TierFailed where said."""

    name: str
    block_bytes: int
    account: SlotAccount
    put_rate: Rate
    get_rate: Rate

    def accepts(self, count: int) -> bool:
        """Whether ``count`` slots could be put now; while False nobody need try (evict is masked)."""
        ...

    def prepare_put(self, key: int, count: int, keep: int = 0) -> SlotTicket:
        """Reserve slots; a file takes whole entries only (``keep`` 0). TierFull."""
        ...

    def write(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``blocks`` int64 [n] of the arena to the ticket's slots. TierFull (a full disk; the put is
        aborted), TierFailed (likewise)."""
        ...

    def commit_put(self, ticket: SlotTicket) -> Entry:
        """Serve it from now on."""
        ...

    def prepare_get(self, key: int) -> SlotTicket:
        """Pin what is held. UnknownEntry."""
        ...

    def read(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy the entry to ``blocks`` int64 [n] of the arena, the first n of its slots when it has more.
        TornSlot: the reader is out, the entry is dropped as soon as nobody reads it; recompute."""
        ...

    def commit_get(self, ticket: SlotTicket, *, keep: bool) -> None:
        """The reader has its bytes; without ``keep`` the last reader drops the entry."""
        ...

    def abort(self, ticket: SlotTicket, *, copier_stopped: bool = True) -> None:
        """Give a put or get up."""
        ...

    def drop(self, key: int) -> None:
        """Forget what is held under a key."""
        ...
