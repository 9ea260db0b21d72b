"""The bytes of one worker: an arena at scale, what every block must hold, and the host tier that sessions leave to.

The fleet decides who holds which block and when a copy is done; after each of its steps :meth:`WorkerArena.sync`
makes the bytes follow: what left is copied to the host tier before its blocks get new content, what came back is
read into its new blocks, what is new is written. Content is made up: a function of the sequence and of the block's
place in it, as KV is of the tokens, so computing a session again gives the same bytes. Checksums are kept apart from
the bytes: a block that a relocation, a swap-out or a return lost or mixed up is found.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.movement import Moved
from services.actuator.memory.arrays import NumpyArena
from services.actuator.memory.host_tier import HostTier
from services.actuator.memory.receipts import BACK, OUT, Transfer
from services.actuator.memory.tier_errors import TierFull, TornSlot, UnknownEntry

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]

VERIFY_PARTS: Final = 8
"""Beside what changed, one part of so many of all held blocks is verified at each sync."""
_PLACE: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX: Final = np.uint64(0xFF51AFD7ED558CCD)
_SHIFT: Final = np.uint64(32)
_NOTHING: Final = np.empty(0, np.int64)


class Sessions(Protocol):
    """Of a worker's sequences, int64 [n] each: ``copies`` and ``loads`` count transfers that are done."""

    @property
    def sequence(self) -> I8: ...

    @property
    def blocks(self) -> I8: ...

    @property
    def host_blocks(self) -> I8: ...

    @property
    def copies(self) -> I8: ...

    @property
    def loads(self) -> I8: ...


class Figures(msgspec.Struct):
    """What a worker's bytes did since the start. Blocks, but where the name says otherwise."""

    written: int = 0
    moved: int = 0
    """By relocation."""
    swapped_out: int = 0
    brought_back: int = 0
    unseen: int = 0
    """Of sessions that came and went between two looks, or for which others made room in between that this tier
    did not have yet: their content was never copied, so nobody compares it when they come back."""
    verified: int = 0
    wrong: int = 0
    """Blocks that did not hold what they must, each once until it gets new content."""
    move_bytes: int = 0
    out_bytes: int = 0
    back_bytes: int = 0


class WorkerArena:
    """``arena``, ``tier``: of the same block size, ``scale`` times smaller than the model's. ``seed`` makes the
    content. ``asker`` tells who asked for a sequence's transfer, and how many seconds ago."""

    def __init__(
        self,
        arena: NumpyArena,
        tier: HostTier,
        scale: int,
        seed: int,
        asker: Callable[[int, str], tuple[str, float]],
    ) -> None:
        blocks = arena.geometry.blocks
        self.arena = arena
        self.tier = tier
        self.scale = scale
        self.figures = Figures()
        self.transfers: list[Moved] = []
        """Since they were last taken."""
        self.epoch = np.zeros(blocks, np.uint32)
        self.held = np.full(blocks, -1, np.int64)
        """As at the last sync: the sequence that holds each block, negative for none."""
        self._tables: dict[int, I8] = {}
        """Blocks of each sequence, in order."""
        self._expected = np.zeros(blocks, np.uint64)
        self._known_wrong = np.zeros(blocks, bool)
        self._asker = asker
        self._salt = np.uint64(seed)
        self._before: Sessions | None = None
        self._unverified: list[I8] = []
        """Destinations of relocations: read at the next sync, outside the engine's pause."""
        self._turn = 0

    def sync(self, held: I8, sessions: Sessions) -> None:
        """Make the bytes follow the fleet: ``held`` int64 [blocks] as ``Fleet.owners`` gives it."""
        for blocks in self._unverified:
            self.verify(blocks)
        self._unverified = []
        before = self._before
        copied = loaded = forgotten = np.zeros(len(sessions.sequence), bool)
        if before is not None:
            copied, loaded = sessions.copies != before.copies, sessions.loads != before.loads
            forgotten = (sessions.host_blocks == 0) & (before.host_blocks > 0)
        # First, since the fleet gave their room to others; but who came back is read before.
        for q, _ in _rows(sessions, forgotten & ~loaded):
            self._forget(q)
        for q, wanted in _rows(sessions, copied & (sessions.blocks == 0)):
            self._leave(q, self._table(q), wanted)
        changed = np.flatnonzero(held != self.held)
        self._follow(changed, held)
        for q, _ in _rows(sessions, loaded & (sessions.blocks > 0)):
            self._come_back(q)
        for q, wanted in _rows(sessions, copied & (sessions.blocks > 0)):
            self._leave(q, self._table(q), wanted)
        for q, _ in _rows(sessions, forgotten & loaded):
            self._forget(q)
        self._before = sessions
        self._turn = (self._turn + 1) % VERIFY_PARTS
        touched = np.zeros(len(held), bool)
        touched[changed] = True
        touched[self._turn :: VERIFY_PARTS] = True
        self.verify(np.flatnonzero(touched & (held >= 0)))

    def relocated(self, moves: I8) -> None:
        """Tables follow these moves, int64 [n, 2], whose bytes somebody copied."""
        sources, destinations = moves[:, 0], moves[:, 1]
        place = np.arange(len(self.held))
        place[sources] = destinations
        for q in np.unique(self.held[sources]).tolist():
            self._tables[q] = place[self._tables[q]]
        self._expected[destinations] = self._expected[sources]
        self._known_wrong[destinations] = self._known_wrong[sources]
        self.held[destinations] = self.held[sources]
        self.held[sources] = -1
        self.epoch[moves.reshape(-1)] += np.uint32(1)
        self.figures.moved += len(moves)
        self.figures.move_bytes += len(moves) * self.arena.geometry.block_bytes
        self._unverified.append(destinations.copy())

    def verify(self, blocks: I8) -> None:
        """Compare blocks with what they must hold, and count those that do not."""
        self.figures.verified += len(blocks)
        wrong = blocks[self.arena.checksum(blocks) != self._expected[blocks]]
        self.figures.wrong += int(np.count_nonzero(~self._known_wrong[wrong]))
        self._known_wrong[wrong] = True

    def verify_all(self) -> None:
        """:meth:`verify` for every block that somebody holds."""
        self.verify(np.flatnonzero(self.held >= 0))

    def rebuild(self, arena: NumpyArena) -> None:
        """Go on in another arena of the same geometry, whose blocks are written anew."""
        self.arena = arena
        self._unverified = []
        for q, blocks in self._tables.items():
            self._write(blocks, np.full(len(blocks), q), np.arange(len(blocks)))

    def take(self) -> list[Moved]:
        """Transfers since the last call."""
        taken, self.transfers = self.transfers, []
        return taken

    def _table(self, sequence: int) -> I8:
        return self._tables.get(sequence, _NOTHING)

    def _follow(self, changed: I8, held: I8) -> None:
        """Bring tables and content to ``held`` int64 [blocks], which differs from before in ``changed`` int64 [n]."""
        self.epoch[changed] += np.uint32(1)
        losers = np.unique(self.held[changed])
        self.held = held
        written, owners, places = [], [], []
        # Who lost blocks and has some still was put out and computed again: all of it is new.
        again = {q: np.flatnonzero(held == q) for q in losers[losers >= 0].tolist()}
        for q in again:
            self._tables.pop(q, None)
        gained = changed[held[changed] >= 0]
        gained = gained[np.argsort(held[gained], kind="stable")]
        numbers, starts = np.unique(held[gained], return_index=True)
        fresh = dict(zip(numbers.tolist(), np.split(gained, starts[1:]), strict=True)) if len(numbers) else {}
        for q, blocks in (fresh | again).items():
            if not len(blocks):
                continue
            table = self._table(q)
            self._tables[q] = np.concatenate((table, blocks))
            written.append(blocks)
            owners.append(np.full(len(blocks), q))
            places.append(np.arange(len(table), len(table) + len(blocks)))
        if written:
            self._write(np.concatenate(written), np.concatenate(owners), np.concatenate(places))

    def _leave(self, sequence: int, blocks: I8, wanted: int) -> None:
        """Copy what the host tier lacks of the first ``wanted`` of a session's blocks."""
        self.figures.unseen += max(wanted - len(blocks), 0)
        blocks = blocks[:wanted]
        if not len(blocks):
            self._forget(sequence)
            return
        self.verify(blocks)  # or the tier would keep, and later give back, what was wrong already
        entry = self.tier.account.held(sequence)
        # The last block of the copy that is there may have been half full then.
        keep = min(max(len(entry.slots) - 1, 0), len(blocks) - 1) if entry is not None else 0
        try:
            ticket = self.tier.prepare_put(sequence, len(blocks), keep)
        except TierFull:
            self.figures.unseen += len(blocks)
            self._forget(sequence)
            return
        asked_by, queue_s = self._asker(sequence, OUT)
        done = self.tier.write(ticket, self.arena, blocks[keep:], asked_by=asked_by)
        self.tier.commit_put(ticket)
        self._record(done, queue_s)
        self.figures.swapped_out += done.pieces
        self.figures.out_bytes += done.bytes

    def _come_back(self, sequence: int) -> None:
        """Read what the host tier has of a session into its first blocks, which hold nothing before, and compare."""
        blocks = self._table(sequence)
        try:
            ticket = self.tier.prepare_get(sequence)
        except UnknownEntry:
            self.figures.unseen += len(blocks)
            return
        blocks = blocks[: len(ticket.slots)]
        self._known_wrong[blocks] = False
        self.arena.write(blocks, np.zeros((len(blocks), self.arena.geometry.block_bytes), np.uint8))
        asked_by, queue_s = self._asker(sequence, BACK)
        try:
            done = self.tier.read(ticket, self.arena, blocks, asked_by=asked_by)
        except TornSlot as torn:
            self.figures.wrong += torn.torn
            self._write(blocks, np.full(len(blocks), sequence), np.arange(len(blocks)))
            return
        self.tier.commit_get(ticket, keep=True)
        self.verify(blocks)
        self._record(done, queue_s)
        self.figures.brought_back += len(blocks)
        self.figures.back_bytes += done.bytes

    def _forget(self, sequence: int) -> None:
        with contextlib.suppress(UnknownEntry):
            self.tier.drop(sequence)

    def _write(self, blocks: I8, owners: I8, places: I8) -> None:
        """Content of block ``places[i]`` of sequence ``owners[i]``, int64 [n] each: words mixed of both."""
        words = self.arena.geometry.block_bytes // 8
        seeds = (owners.astype(np.uint64) << _SHIFT) ^ places.astype(np.uint64) ^ self._salt
        mixed = (seeds[:, None] * _MIX) ^ (np.arange(1, words + 1, dtype=np.uint64) * _PLACE)[None, :]
        content = mixed ^ (mixed >> _SHIFT)
        self.arena.write(blocks, content.view(np.uint8))
        self._expected[blocks] = self.arena.checksum(blocks)
        self._known_wrong[blocks] = False
        self.figures.written += len(blocks)

    def _record(self, done: Transfer, queue_s: float) -> None:
        self.transfers.append(msgspec.structs.replace(done, queue_s=queue_s).moved(self.scale))


def _rows(sessions: Sessions, chosen: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Number and host blocks of the chosen sequences, bool [n]."""
    return list(zip(sessions.sequence[chosen].tolist(), sessions.host_blocks[chosen].tolist(), strict=True))
