"""The tier in the host's memory: slots of an arena that a mover copies to and from."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.errors import BadMoves
from services.actuator.memory.mover import Mover
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.slots import GET, PUT, Entry, SlotAccount, SlotTicket
from services.actuator.memory.tier import Rate
from services.actuator.memory.tier_errors import TornSlot

I8 = NDArray[np.int64]

ASSUMED_BYTES_PER_S: Final = 25e9
"""PCIe Gen4 x16 as measured on an A100; only until the first transfer."""


class HostTier:
    """``arena``: the host's slots, in memory that the mover reaches (pinned on a GPU).

    ``verify``: keep a checksum of every slot and compare on the way back, at the cost of one pass over the bytes
    on either side; without it the memory is trusted.
    """

    name = "host"

    def __init__(self, arena: Arena, mover: Mover, *, verify: bool = False) -> None:
        self.arena = arena
        self.block_bytes = arena.geometry.block_bytes
        self.account = SlotAccount(self.name, arena.geometry.blocks)
        self.put_rate = Rate(ASSUMED_BYTES_PER_S)
        self.get_rate = Rate(ASSUMED_BYTES_PER_S)
        self.verify = verify
        self._mover = mover
        self._sums = np.zeros(arena.geometry.blocks, dtype=np.uint64)
        self._torn: set[int] = set()

    def accepts(self, count: int) -> bool:
        """Whether ``count`` slots are free."""
        return self.account.accepts(count)

    def prepare_put(self, key: int, count: int, keep: int = 0) -> SlotTicket:
        """Reserve slots for an entry of ``count`` blocks whose first ``keep`` are held already. TierFull."""
        return self.account.prepare_put(key, count, keep)

    def write(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``blocks`` int64 [n] to the ticket's n slots; BadMoves when they are not as many."""
        self.account.open_ticket(ticket.number, PUT)
        if len(blocks) != len(ticket.slots):
            raise BadMoves("as many blocks as slots of the put are needed", len(blocks))
        done = self._mover.out(arena, blocks, self.arena, ticket.rows, asked_by=asked_by)
        if self.verify:
            self._sums[ticket.rows] = arena.checksum(blocks)
        self.put_rate.saw(done.bytes, done.seconds)
        return done

    def commit_put(self, ticket: SlotTicket) -> Entry:
        """Serve it from now on."""
        return self.account.commit_put(ticket.number)

    def prepare_get(self, key: int) -> SlotTicket:
        """Pin what is held. UnknownEntry."""
        return self.account.prepare_get(key)

    def read(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy the entry's first n slots to ``blocks`` int64 [n]; BadMoves when it has fewer. With ``verify``:
        TornSlot, after which the get is over and the entry goes with its last reader."""
        self.account.open_ticket(ticket.number, GET)
        if len(blocks) > len(ticket.slots):
            raise BadMoves("at most as many blocks as the entry has slots", len(blocks))
        slots = ticket.rows[: len(blocks)]
        done = self._mover.back(arena, blocks, self.arena, slots, asked_by=asked_by)
        self.get_rate.saw(done.bytes, done.seconds)
        self._compare(ticket, arena, blocks, slots)
        return done

    def check(self, ticket: SlotTicket) -> None:
        """With ``verify``: compare the slots of a get where they lie; TornSlot as :meth:`read`."""
        self._compare(ticket, self.arena, ticket.rows, ticket.rows)

    def commit_get(self, ticket: SlotTicket, *, keep: bool) -> None:
        """The reader has its bytes; the last one drops the entry unless it is kept (a torn one never is)."""
        if self.account.commit_get(ticket.number, keep=keep and ticket.key not in self._torn):
            self._torn.discard(ticket.key)

    def abort(self, ticket: SlotTicket, *, copier_stopped: bool = True) -> None:
        """Give a put or get up."""
        self.account.abort(ticket.number, copier_stopped=copier_stopped)

    def drop(self, key: int) -> None:
        """Forget what is held under a key."""
        self.account.drop(key)
        self._torn.discard(key)

    def _compare(self, ticket: SlotTicket, arena: Arena, blocks: I8, slots: I8) -> None:
        if not self.verify:
            return
        wrong = arena.checksum(blocks) != self._sums[slots]
        if wrong.any():
            self._torn.add(ticket.key)
            self.commit_get(ticket, keep=False)
            first = int(slots[np.argmax(wrong)])
            raise TornSlot(self.name, ticket.key, first, int(wrong.sum()), len(slots))
