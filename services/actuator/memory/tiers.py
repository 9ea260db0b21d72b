"""The tiers below the card, fastest first: where a session's KV is, and its ways between them.

What leaves the card goes to the first tier with room. ``demote`` carries an entry further down. A full tier is an
ordinary state: :meth:`Tiers.accepts` says beforehand whether a put would find room (evict is masked while it says
no), and nobody need try until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import Arena
from services.actuator.memory.errors import IllegalTransition
from services.actuator.memory.host_tier import HostTier
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.slots import Entry, SlotTicket
from services.actuator.memory.states import SessionState
from services.actuator.memory.tier import Tier
from services.actuator.memory.tier_errors import TierFull, UnknownEntry

I8 = NDArray[np.int64]


class Passage(msgspec.Struct, frozen=True):
    """An open way down or up: which tier (0 = the fastest) and its ticket."""

    tier: int
    ticket: SlotTicket


class Place(msgspec.Struct, frozen=True):
    """Where a key is below the card. LEAVING: a put is open; AWAY: held (the card may have it too);
    RETURNING: somebody reads it."""

    tier: int
    state: SessionState
    slots: int


class Tiers:
    """``tiers``: at least one, fastest first, all with blocks of one size."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        sizes = {tier.block_bytes for tier in tiers}
        if len(sizes) != 1:
            raise ValueError(f"tiers with blocks of {sorted(sizes)} bytes: expected at least one, all of one size")
        self.tiers = tuple(tiers)
        self.refused = 0
        """Puts that found no room."""

    def accepts(self, count: int) -> bool:
        """Whether a put of ``count`` slots would find room in some tier."""
        return any(tier.accepts(count) for tier in self.tiers)

    def place(self, key: int) -> Place | None:
        """Where a key is, None when no tier has it; the fastest where several do."""
        for number, tier in enumerate(self.tiers):
            entry = tier.account.held(key)
            if tier.account.filling(key):
                return Place(number, SessionState.LEAVING, len(entry.slots) if entry else 0)
            if entry:
                state = SessionState.RETURNING if tier.account.readers(key) else SessionState.AWAY
                return Place(number, state, len(entry.slots))
        return None

    def prepare_put(self, key: int, count: int, keep: int = 0) -> Passage:
        """Reserve slots for an entry of ``count`` blocks in the first tier with room.

        ``keep``: its first blocks that the host's memory holds already and that have not changed; another tier
        takes the whole (the ticket's ``first`` tells which: 0 = all blocks are to be written). TierFull with the
        sums of all tiers; IllegalTransition while the key is leaving or returning.
        """
        place = self.place(key)
        if place and place.state != SessionState.AWAY:
            raise IllegalTransition("entry", key, place.state.name.lower(), "leave")
        for number, tier in enumerate(self.tiers):
            kept = keep if isinstance(tier, HostTier) and place and place.tier == number else 0
            if tier.accepts(count - kept):
                return Passage(number, tier.prepare_put(key, count, kept))
        self.refused += 1
        free = sum(tier.account.free for tier in self.tiers)
        raise TierFull("all tiers", count, free, sum(tier.account.capacity for tier in self.tiers))

    def write(self, passage: Passage, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy the card's ``blocks`` int64 [n] to the passage's slots; errors as :meth:`Tier.write`."""
        return self.tiers[passage.tier].write(passage.ticket, arena, blocks, asked_by=asked_by)

    def commit_put(self, passage: Passage) -> Entry:
        """Serve the new entry; older copies in other tiers are dropped."""
        entry = self.tiers[passage.tier].commit_put(passage.ticket)
        for number, tier in enumerate(self.tiers):
            if number != passage.tier and tier.account.held(passage.ticket.key):
                tier.drop(passage.ticket.key)
        return entry

    def prepare_get(self, key: int) -> Passage:
        """Pin a key where it is. UnknownEntry when no tier has it; IllegalTransition while it is leaving."""
        place = self.place(key)
        if place is None:
            raise UnknownEntry("all tiers", key, sum(len(tier.account.keys) for tier in self.tiers))
        return Passage(place.tier, self.tiers[place.tier].prepare_get(key))

    def read(self, passage: Passage, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy the entry to the card's ``blocks``; errors as :meth:`Tier.read`: recompute then."""
        return self.tiers[passage.tier].read(passage.ticket, arena, blocks, asked_by=asked_by)

    def commit_get(self, passage: Passage, *, keep: bool) -> None:
        """The card has it. ``keep`` leaves the copy, so that the session may leave again without a transfer."""
        self.tiers[passage.tier].commit_get(passage.ticket, keep=keep)

    def abort(self, passage: Passage, *, copier_stopped: bool = True) -> None:
        """Give a passage up: nothing has changed."""
        self.tiers[passage.tier].abort(passage.ticket, copier_stopped=copier_stopped)

    def drop(self, key: int) -> None:
        """Forget a key in every tier. UnknownEntry when none has it."""
        if self.place(key) is None:
            raise UnknownEntry("all tiers", key, sum(len(tier.account.keys) for tier in self.tiers))
        for tier in self.tiers:
            if tier.account.held(key):
                tier.drop(key)

    def demote(self, key: int, *, asked_by: str = "") -> Transfer:
        """Carry what the host's memory holds to the next tier that has room; blocks for as long as that takes.

        Two-phase on both sides: at any moment one of them serves it. TierFull when no lower tier has room,
        UnknownEntry when the host has nothing of it, IllegalTransition while it is read, TornSlot when its bytes
        are not what was written (it is dropped; with the host's ``verify``).
        """
        host = self.tiers[0]
        if not isinstance(host, HostTier) or host.account.held(key) is None:
            raise UnknownEntry(host.name, key, len(host.account.keys))
        if host.account.readers(key):
            raise IllegalTransition("entry", key, "returning", "be demoted")
        out = host.prepare_get(key)
        host.check(out)
        lower = self.tiers[1:]
        tier = next((tier for tier in lower if tier.accepts(len(out.slots))), None)
        if tier is None:
            host.abort(out)
            self.refused += 1
            free, capacity = sum(t.account.free for t in lower), sum(t.account.capacity for t in lower)
            raise TierFull("below the host", len(out.slots), free, capacity)
        into = None
        try:
            into = tier.prepare_put(key, len(out.slots))
            done = tier.write(into, host.arena, out.rows, asked_by=asked_by)
            tier.commit_put(into)
        except BaseException:
            host.abort(out)
            if into is not None and tier.account.filling(key):
                tier.abort(into)
            raise
        host.commit_get(out, keep=False)
        return done
