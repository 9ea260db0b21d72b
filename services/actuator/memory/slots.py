"""Who holds which slot of a tier: entries under keys, two-phase in both directions. Pure.

A slot holds one block. Putting an entry reserves slots (FILLING), somebody copies, commit makes it served (HELD);
getting pins it (its slots are READING while anybody reads) until every reader has committed or given up. A put over
something held is all or nothing: the old entry is left alone until the commit and is back in service after an
abort. A key is a session or a shared prefix, any int.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import BadGeometry, IllegalTransition, InvariantBroken, UnknownTicket
from services.actuator.memory.tier_errors import TierFull, UnknownEntry

I8 = NDArray[np.int64]

PUT: Final = "put"
GET: Final = "get"


class SlotState(IntEnum):
    """The values are what ``SlotAccount.state`` holds."""

    FREE = 0
    FILLING = 1
    """Reserved by a put that has not ended."""
    HELD = 2
    READING = 3
    """Held, and somebody reads it: it cannot be dropped."""
    STRANDED = 4
    """Of a put that was given up while its copier may still be writing: free once that has stopped."""


class SlotTicket(msgspec.Struct, frozen=True):
    """An open put or get. ``slots`` are those to copy, in the order of the entry's blocks from ``first`` on."""

    number: int
    kind: str
    key: int
    slots: tuple[int, ...]
    sequence: int
    """Of the entry: unlike that of any other put on this tier, rising."""
    first: int = 0

    @property
    def rows(self) -> I8:
        """``slots`` as int64 [n]."""
        return np.array(self.slots, dtype=np.int64)


class Entry(msgspec.Struct, frozen=True):
    """What is held under a key."""

    slots: tuple[int, ...]
    sequence: int


class SlotAccount:
    """One tier's slots. ``capacity`` of them, ``name`` for errors."""

    def __init__(self, name: str, capacity: int) -> None:
        if capacity < 1:
            raise BadGeometry(f"slots of {name}", capacity, "at least 1")
        self.name = name
        self.capacity = capacity
        self.state = np.zeros(capacity, dtype=np.uint8)
        """uint8 [capacity], a SlotState each."""
        self.usable = np.ones(capacity, dtype=bool)
        """bool [capacity]: False where nothing new may be put (a disk that gave no space for it)."""
        self.sequence = 0
        self._entries: dict[int, Entry] = {}
        self._readers: dict[int, int] = {}
        self._open: dict[int, SlotTicket] = {}
        self._filling: dict[int, int] = {}  # key -> ticket of its put
        self._stranded: dict[int, SlotTicket] = {}
        self._number = 0

    @property
    def free(self) -> int:
        """Slots that a put could have now."""
        return int(np.count_nonzero((self.state == SlotState.FREE) & self.usable))

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys held, oldest first."""
        return tuple(self._entries)

    def held(self, key: int) -> Entry | None:
        """What is served under a key, None when nothing is."""
        return self._entries.get(key)

    def filling(self, key: int) -> bool:
        """Whether a put of this key is open."""
        return key in self._filling

    def readers(self, key: int) -> int:
        return self._readers.get(key, 0)

    def accepts(self, count: int) -> bool:
        """Whether a put of ``count`` slots would find room now."""
        return count <= self.free

    def prepare_put(self, key: int, count: int, keep: int = 0) -> SlotTicket:
        """Reserve slots for an entry of ``count`` blocks, of which the first ``keep`` are held already (full KV
        blocks never change, so a conversation that grew copies its new blocks only).

        TierFull; IllegalTransition when a put of the key is open, or it is being read; BadGeometry for counts.
        """
        before = self._entries.get(key)
        if count < 1 or not 0 <= keep <= min(count, len(before.slots) if before else 0):
            raise BadGeometry(f"{self.name}: slots of key {key}", count, f"at least 1, keeping {keep} of those held")
        if key in self._filling:
            raise IllegalTransition("entry", key, "leaving", "be put again")
        if self.readers(key):
            raise IllegalTransition("entry", key, "returning", "be put over")
        new = count - keep
        found = np.flatnonzero((self.state == SlotState.FREE) & self.usable)
        if new > len(found):
            raise TierFull(self.name, new, len(found), self.capacity)
        slots = tuple(found[:new].tolist())  # the lowest: neighbours copy in one piece, a file stays short
        self.sequence += 1
        ticket = SlotTicket(self._next(), PUT, key, slots, self.sequence, keep)
        self.state[list(slots)] = SlotState.FILLING
        self._open[ticket.number] = ticket
        self._filling[key] = ticket.number
        return ticket

    def commit_put(self, number: int) -> Entry:
        """The copy is complete: served from now on; what was under the key before is free, but for what was kept."""
        ticket = self._close(number, PUT)
        del self._filling[ticket.key]
        before = self._entries.pop(ticket.key, None)
        kept = before.slots[: ticket.first] if before else ()
        if before:
            self.state[list(before.slots[ticket.first :])] = SlotState.FREE
        self.state[list(ticket.slots)] = SlotState.HELD
        entry = Entry(kept + ticket.slots, ticket.sequence)
        self._entries[ticket.key] = entry
        return entry

    def prepare_get(self, key: int) -> SlotTicket:
        """Pin what is held under a key. UnknownEntry; many may read at once."""
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownEntry(self.name, key, len(self._entries))
        if key in self._filling:
            raise IllegalTransition("entry", key, "leaving", "be read")
        ticket = SlotTicket(self._next(), GET, key, entry.slots, entry.sequence)
        self._open[ticket.number] = ticket
        self._readers[key] = self.readers(key) + 1
        self.state[list(entry.slots)] = SlotState.READING
        return ticket

    def commit_get(self, number: int, *, keep: bool) -> bool:
        """A reader has its bytes. Without ``keep`` the entry is dropped, if nobody else reads it; True if it was."""
        ticket = self._close(number, GET)
        last = self._left(ticket)
        if last and not keep:
            self.drop(ticket.key)
            return True
        return False

    def abort(self, number: int, *, copier_stopped: bool = True) -> None:
        """Give an open put or get up. When a put's copier may still be writing its slots are nobody's until
        ``release_stranded``."""
        ticket = self._open.get(number)
        if ticket is None:
            raise UnknownTicket(number, self._number, len(self._open))
        del self._open[number]
        if ticket.kind == GET:
            self._left(ticket)
            return
        del self._filling[ticket.key]
        self.state[list(ticket.slots)] = SlotState.FREE if copier_stopped else SlotState.STRANDED
        if not copier_stopped:
            self._stranded[number] = ticket

    def release_stranded(self, number: int) -> None:
        """The copier of an aborted put has stopped: its slots are free."""
        ticket = self._stranded.pop(number, None)
        if ticket is None:
            raise UnknownTicket(number, self._number, len(self._stranded))
        self.state[list(ticket.slots)] = SlotState.FREE

    def drop(self, key: int) -> tuple[int, ...]:
        """Free what is held under a key; the slots. UnknownEntry; IllegalTransition while it is read or put over."""
        entry = self._entries.get(key)
        if entry is None:
            raise UnknownEntry(self.name, key, len(self._entries))
        if self.readers(key) or key in self._filling:
            raise IllegalTransition("entry", key, "returning" if self.readers(key) else "leaving", "be dropped")
        del self._entries[key]
        self.state[list(entry.slots)] = SlotState.FREE
        return entry.slots

    def adopt(self, key: int, entry: Entry) -> None:
        """Take in an entry found whole after a restart. IllegalTransition when key or slots are taken."""
        places = list(entry.slots)
        if key in self._entries or self.state[places].any() or len(set(places)) != len(places):
            raise IllegalTransition("entry", key, "held", "be adopted", len(places))
        self.state[places] = SlotState.HELD
        self._entries[key] = entry
        self.sequence = max(self.sequence, entry.sequence)

    def open_ticket(self, number: int, kind: str) -> SlotTicket:
        """The open ticket of that number and kind; UnknownTicket."""
        ticket = self._open.get(number)
        if ticket is None or ticket.kind != kind:
            raise UnknownTicket(number, self._number, len(self._open))
        return ticket

    def check(self) -> None:
        """InvariantBroken unless every slot is where exactly one owner says it is."""
        owned = np.zeros(self.capacity, dtype=np.int64)
        expected = np.zeros(self.capacity, dtype=np.uint8)
        for key, entry in self._entries.items():
            places = list(entry.slots)
            np.add.at(owned, places, 1)
            expected[places] = SlotState.READING if self.readers(key) else SlotState.HELD
        for state, tickets in ((SlotState.FILLING, self._open), (SlotState.STRANDED, self._stranded)):
            for ticket in tickets.values():
                if ticket.kind == PUT:
                    np.add.at(owned, list(ticket.slots), 1)
                    expected[list(ticket.slots)] = state
        for rule, wrong, found, due in (
            ("a slot has at most one owner", owned > 1, owned, np.ones_like(owned)),
            ("a slot is in its owner's state", self.state != expected, self.state, expected),
        ):
            if wrong.any():
                at = int(np.argmax(wrong))
                raise InvariantBroken(f"{self.name}: {rule}", int(found[at]), int(due[at]), at)

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _close(self, number: int, kind: str) -> SlotTicket:
        ticket = self.open_ticket(number, kind)
        del self._open[number]
        return ticket

    def _left(self, ticket: SlotTicket) -> bool:
        """One reader less; True when it was the last."""
        left = self.readers(ticket.key) - 1
        if left:
            self._readers[ticket.key] = left
            return False
        del self._readers[ticket.key]
        self.state[list(ticket.slots)] = SlotState.HELD
        return True
