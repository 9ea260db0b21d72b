"""The tier in a file on a local disk (NVMe): checksummed slots under a space limit.

A kill at any moment loses nothing that was committed and serves nothing that was not: bytes and slot headers are
written first, the header of the first block last (disk_format). A power cut may lose the newest entries, unless
``durable``; checksums find what it tore. A full disk is back-pressure: the put is aborted with TierFull and, until
the file system has room again, only slots that have their space on the disk already are used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory import disk_format
from services.actuator.memory.arrays import Arena
from services.actuator.memory.copying import checksums
from services.actuator.memory.disk_file import NO_SPACE, SlotFile, as_bytes
from services.actuator.memory.disk_format import PAGE, SLOT, Layout
from services.actuator.memory.errors import BadGeometry, BadMoves
from services.actuator.memory.receipts import BACK, OUT, Transfer
from services.actuator.memory.slots import GET, PUT, Entry, SlotAccount, SlotTicket
from services.actuator.memory.tier import Rate
from services.actuator.memory.tier_errors import NotATier, TierFailed, TierFull, TornSlot

I8 = NDArray[np.int64]
U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]

ASSUMED_BYTES_PER_S: Final = 2e9
"""A data-centre NVMe's sustained write rate; only until the first transfer."""
PATH: Final = "file"
_CHUNK_BYTES: Final = 4 << 20


class Recovered(msgspec.Struct, frozen=True):
    """What became of a file's former contents when it was opened."""

    kept: tuple[int, ...]
    """Keys served again."""
    reclaimed_slots: int
    """Of whole entries that nobody knows any more."""
    torn_slots: int
    """Of entries that are not whole; never served."""
    rebuilt: bool = False
    """The file was damaged or of another layout and was begun anew."""


class DiskTier:
    """Open one with :meth:`open`. Calls block for as long as the disk takes."""

    name = "disk"

    def __init__(
        self, file: SlotFile, layout: Layout, *, durable: bool, retry_s: float, clock: Callable[[], float]
    ) -> None:
        self.layout = layout
        self.block_bytes = layout.block_bytes
        self.account = SlotAccount(self.name, layout.slots)
        self.put_rate = Rate(ASSUMED_BYTES_PER_S)
        self.get_rate = Rate(ASSUMED_BYTES_PER_S)
        self.recovered = Recovered((), 0, 0)
        self._file = file
        self._durable = durable
        self._retry_s = retry_s
        self._clock = clock
        self._full_until_s = -np.inf
        self._backed = np.zeros(layout.slots, dtype=bool)
        self._headers = np.zeros(layout.slots, dtype=SLOT)
        self._written: dict[int, U8] = {}  # ticket -> checksums of what its put wrote
        self._torn: set[int] = set()

    @classmethod
    def open(
        cls,
        path: Path,
        block_bytes: int,
        limit_bytes: int,
        known: Mapping[int, int] | None = None,
        *,
        durable: bool = False,
        retry_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        open_file: Callable[[Path], SlotFile] = SlotFile.open,
    ) -> DiskTier:
        """Open or make the tier's file of at most ``limit_bytes``.

        ``known``: keys whose contents are still wanted, each with the sequence of its entry; everything else is
        reclaimed (a key alone does not tell an old copy from a newer one). Without it nothing is. ``retry_s``:
        after a full disk, how long until the file system is asked again. BadGeometry for a limit below one slot;
        NotATier for a file with other contents (untouched) or in use; TierFull when not even the tables fit.
        """
        layout = disk_format.layout_within(block_bytes, limit_bytes)
        file = open_file(path)
        tier = cls(file, layout, durable=durable, retry_s=retry_s, clock=clock)
        try:
            tier._recover(known or {})
        except BaseException:
            file.close()
            raise
        return tier

    def accepts(self, count: int) -> bool:
        """Whether ``count`` slots could be put now. After a full disk: in slots that have their space, until the
        file system has room for a slot more again."""
        if not self.account.usable.all() and self._clock() >= self._full_until_s:
            self._full_until_s = self._clock() + self._retry_s
            if self._file.free_bytes() >= max(count * self.layout.stride, _CHUNK_BYTES):
                self.account.usable[:] = True
        return self.account.accepts(count)

    def prepare_put(self, key: int, count: int, keep: int = 0) -> SlotTicket:
        """Reserve slots for a whole entry (``keep`` must be 0: its first header tells of all). TierFull."""
        if keep:
            raise BadGeometry(f"{self.name}: blocks kept of key {key}", keep, "0")
        if not self.accepts(count) and not self.account.usable.all():
            raise TierFull(self.name, count, self.account.free, self.account.capacity, "disk full")
        return self.account.prepare_put(key, count)

    def write(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy ``blocks`` int64 [n] to the ticket's n slots. TierFull on a full disk, TierFailed for other
        refusals of the system: the put is aborted then. BadMoves for another number of blocks."""
        self.account.open_ticket(ticket.number, PUT)
        if len(blocks) != len(ticket.slots):
            raise BadMoves("as many blocks as slots of the put are needed", len(blocks))
        started = self._clock()
        sums = np.empty(len(blocks), dtype=np.uint64)
        with _Aborting(self, ticket):
            for first, end, slot in self._pieces(ticket.rows):
                values = arena.read(blocks[first:end])
                sums[first:end] = _sums(values)
                self._file.write_at(self.layout.slot_at(slot), as_bytes(self._padded(values)))
            headers = disk_format.slot_headers(disk_format.HELD, ticket.key, ticket.sequence, sums)
            for slot, header in zip(ticket.slots[1:], headers[1:], strict=True):
                self._file.write_at(self.layout.header_at(slot), as_bytes(header.reshape(1)))
            if self._durable:
                self._file.sync()
        self._backed[ticket.rows] = True
        self._headers[ticket.rows] = headers
        self._written[ticket.number] = sums
        seconds = self._clock() - started
        moved = len(blocks) * self.block_bytes
        self.put_rate.saw(moved, seconds)
        return Transfer(OUT, asked_by, moved, len(blocks), PATH, seconds)

    def commit_put(self, ticket: SlotTicket) -> Entry:
        """Write the header that makes the entry whole, and serve it. UnknownTicket; BadMoves when nothing was
        written; TierFailed (the put is aborted)."""
        self.account.open_ticket(ticket.number, PUT)
        if self._written.pop(ticket.number, None) is None:
            raise BadMoves("a put must be written before its commit", len(ticket.slots))
        with _Aborting(self, ticket):
            self._write_header(ticket.slots[0])  # what it replaces has a lower sequence: the newest counts
            if self._durable:
                self._file.sync()
        return self.account.commit_put(ticket.number)

    def prepare_get(self, key: int) -> SlotTicket:
        """Pin what is held. UnknownEntry."""
        return self.account.prepare_get(key)

    def read(self, ticket: SlotTicket, arena: Arena, blocks: I8, *, asked_by: str = "") -> Transfer:
        """Copy the entry's first n slots to ``blocks`` int64 [n], each checked before it is copied. TornSlot
        (also for a file cut short): the get is over and the entry goes with its last reader. TierFailed: the get
        is over."""
        self.account.open_ticket(ticket.number, GET)
        if len(blocks) > len(ticket.slots):
            raise BadMoves("at most as many blocks as the entry has slots", len(blocks))
        started = self._clock()
        slots = ticket.rows[: len(blocks)]
        with _Aborting(self, ticket):
            for first, end, slot in self._pieces(slots):
                values = np.zeros((end - first, self.layout.stride), dtype=np.uint8)
                self._file.read_at(self.layout.slot_at(slot), as_bytes(values))
                bytes_of = np.ascontiguousarray(values[:, : self.block_bytes])
                wrong = _sums(bytes_of) != self._headers["payload"][slots[first:end]]
                if wrong.any():
                    self._torn.add(ticket.key)
                    self.commit_get(ticket, keep=False)
                    at = int(slots[first + int(np.argmax(wrong))])
                    raise TornSlot(self.name, ticket.key, at, int(wrong.sum()), len(ticket.slots))
                arena.write(blocks[first:end], bytes_of)
        seconds = self._clock() - started
        moved = len(blocks) * self.block_bytes
        self.get_rate.saw(moved, seconds)
        return Transfer(BACK, asked_by, moved, len(blocks), PATH, seconds)

    def commit_get(self, ticket: SlotTicket, *, keep: bool) -> None:
        """The reader has its bytes; the last one drops the entry unless it is kept (a torn one never is)."""
        if self.account.commit_get(ticket.number, keep=keep and ticket.key not in self._torn):
            self._torn.discard(ticket.key)
            self._forget(ticket.slots[0])

    def abort(self, ticket: SlotTicket, *, copier_stopped: bool = True) -> None:
        """Give a put or get up."""
        self.account.abort(ticket.number, copier_stopped=copier_stopped)
        self._written.pop(ticket.number, None)

    def drop(self, key: int) -> None:
        """Forget what is held under a key, in the file too. TierFailed when that could not be written: it is
        dropped all the same, and whoever opens the file later knows other sequences."""
        slots = self.account.drop(key)
        self._torn.discard(key)
        self._forget(slots[0])

    def close(self) -> None:
        """Close the file; what was committed stays in it."""
        self._file.close()

    def _pieces(self, slots: I8) -> Iterator[tuple[int, int, int]]:
        """Stretches [first, end) of neighbouring slots, at most a chunk long, each with its first slot."""
        most = max(_CHUNK_BYTES // self.layout.stride, 1)
        first = 0
        for at in range(1, len(slots) + 1):
            if at == len(slots) or slots[at] != slots[at - 1] + 1 or at - first == most:
                yield first, at, int(slots[first])
                first = at

    def _padded(self, values: U1) -> U1:
        """Blocks uint8 [n, block_bytes] as they lie in the file: uint8 [n, stride]."""
        more = self.layout.stride - self.block_bytes
        return np.pad(values, ((0, 0), (0, more))) if more else values

    def _write_header(self, slot: int) -> None:
        self._file.write_at(self.layout.header_at(slot), as_bytes(self._headers[slot : slot + 1]))

    def _forget(self, slot: int) -> None:
        """Mark an entry's first header as dropped; its sequence stays, so that no later put has it again."""
        held = self._headers[slot : slot + 1]
        key, sequence = int(held["key"][0]), int(held["sequence"][0])
        self._headers[slot : slot + 1] = disk_format.slot_headers(
            disk_format.DROPPED, key, sequence, np.zeros(1, dtype=np.uint64)
        )
        try:
            self._write_header(slot)
        except OSError as problem:
            raise TierFailed(self.name, problem.errno or 0, f"key {key} not dropped: {problem.strerror}") from problem

    def _recover(self, known: Mapping[int, int]) -> None:
        size = self._file.size()
        page = np.zeros(min(size, PAGE), dtype=np.uint8)
        self._file.read_at(0, as_bytes(page))
        head = page.tobytes()
        if size and not disk_format.ours(head):
            raise NotATier(self._file.path, f"{size} bytes of something else", "an empty file or a tier's")
        if disk_format.parsed_header(head) != self.layout or size < self.layout.payload_at:
            self._begin(rebuilt=size > 0)
            return
        self._file.read_at(PAGE, as_bytes(self._headers))
        found = disk_format.scan(self._headers)
        kept = []
        reclaimed = 0
        for key, entry in found.entries.items():
            if known.get(key) == entry.sequence:
                self.account.adopt(key, entry)
                kept.append(key)
            else:
                self._forget(entry.slots[0])
                reclaimed += len(entry.slots)
        self._backed[self._headers["state"] != 0] = True
        self.account.sequence = max(self.account.sequence, found.newest)
        self.recovered = Recovered(tuple(kept), reclaimed, found.torn_slots)

    def _begin(self, *, rebuilt: bool) -> None:
        try:
            self._file.truncate(0)
            self._file.write_at(0, memoryview(disk_format.file_header(self.layout)))
            self._file.write_at(PAGE, memoryview(bytes(self.layout.payload_at - PAGE)))
        except OSError as problem:
            raise _told(self, problem, self.layout.slots) from problem
        self.recovered = Recovered((), 0, 0, rebuilt)

    def _filled_up(self) -> None:
        """The disk gave no more space: keep to the slots that have theirs."""
        self.account.usable[:] = self._backed
        self._full_until_s = self._clock() + self._retry_s


class _Aborting:
    """Ends a ticket when the system refuses, and says so in the tier's errors."""

    def __init__(self, tier: DiskTier, ticket: SlotTicket) -> None:
        self._tier = tier
        self._ticket = ticket

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, problem: BaseException | None, trace: object) -> None:
        if not isinstance(problem, OSError):
            return
        self._tier.abort(self._ticket)
        raise _told(self._tier, problem, len(self._ticket.slots)) from problem


def _told(tier: DiskTier, problem: OSError, wanted: int) -> TierFull | TierFailed:
    number = problem.errno or 0
    if number not in NO_SPACE:
        return TierFailed(tier.name, number, problem.strerror or "refused")
    tier._filled_up()
    return TierFull(tier.name, wanted, tier.account.free, tier.account.capacity, "disk full")


def _sums(values: U1) -> U8:
    """Checksums of uint8 [n, block_bytes], uint64 [n]."""
    return checksums(np.ascontiguousarray(values), np.arange(len(values), dtype=np.int64))
