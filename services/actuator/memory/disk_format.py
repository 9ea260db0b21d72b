"""How a tier lies in its file: a header, a table of slot headers, the slots. Pure.

    0                 file header, one page
    PAGE              slot headers, 64 bytes each, padded to a page
    payload_at        slots, each of block_bytes padded to a page

A slot header names the entry (key, sequence), the slot's place in it, and the checksum of its payload, under a
checksum of its own. The header of an entry's first block is written last: it is the commit point. So an entry is
whole when the headers of all its blocks are valid and agree, and a slot is whole when its payload matches; anything
else is free space. Headers never cross a disk sector, so they tear into something that their checksum finds.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.errors import BadGeometry
from services.actuator.memory.slots import Entry

U1 = NDArray[np.uint8]
U8 = NDArray[np.uint64]

PAGE: Final = 4096
MAGIC: Final = b"TIDEGATE-KV-TIER"
VERSION: Final = 1
HELD: Final = 0x48454C44
DROPPED: Final = 0x44524F50

_FILE: Final = struct.Struct("<16sIIQQ")
SLOT: Final = np.dtype(
    [
        ("state", "<u4"),
        ("index", "<u4"),
        ("count", "<u4"),
        ("unused", "<u4"),
        ("key", "<i8"),
        ("sequence", "<u8"),
        ("payload", "<u8"),
        ("padding", "V20"),
        ("crc", "<u4"),
    ]
)
"""One slot header, 64 bytes; ``crc`` covers the 60 before it."""
_COVERED: Final = 60


class Layout(msgspec.Struct, frozen=True):
    """Where things lie in a file of ``slots`` slots of ``block_bytes``."""

    block_bytes: int
    slots: int

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return padded(self.block_bytes)

    @property
    def payload_at(self) -> int:
        return PAGE + padded(self.slots * SLOT.itemsize)

    @property
    def file_bytes(self) -> int:
        """Of the file when every slot was written."""
        return self.payload_at + self.slots * self.stride

    def header_at(self, slot: int) -> int:
        return PAGE + slot * SLOT.itemsize

    def slot_at(self, slot: int) -> int:
        return self.payload_at + slot * self.stride


class Found(msgspec.Struct, frozen=True):
    """What a scan of the slot headers saw: entries with all their slots, and slots of entries that are not whole."""

    entries: dict[int, Entry]
    torn_slots: int
    newest: int
    """Highest sequence in any valid header: the next put goes beyond it."""


def padded(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE


def layout_within(block_bytes: int, limit_bytes: int) -> Layout:
    """The layout with the most slots whose file stays within ``limit_bytes``. BadGeometry when not one fits."""
    if block_bytes < 1:
        raise BadGeometry("block_bytes", block_bytes, "1 or more")
    slots = max((limit_bytes - 2 * PAGE) // (padded(block_bytes) + SLOT.itemsize), 0)
    while slots and Layout(block_bytes, slots).file_bytes > limit_bytes:
        slots -= 1
    if not slots:
        raise BadGeometry("space limit in bytes", limit_bytes, f"{2 * PAGE + padded(block_bytes)} for one slot")
    return Layout(block_bytes, slots)


def file_header(layout: Layout) -> bytes:
    """The first page of a tier's file."""
    head = _FILE.pack(MAGIC, VERSION, 0, layout.block_bytes, layout.slots)
    return (head + struct.pack("<I", zlib.crc32(head))).ljust(PAGE, b"\0")


def parsed_header(page: bytes) -> Layout | None:
    """The layout that a first page tells of; None when it is not ours, of another version, or damaged."""
    if len(page) < _FILE.size + 4 or not ours(page):
        return None
    magic, version, _, block_bytes, slots = _FILE.unpack_from(page)
    (crc,) = struct.unpack_from("<I", page, _FILE.size)
    if magic != MAGIC or version != VERSION or crc != zlib.crc32(page[: _FILE.size]) or block_bytes < 1 or slots < 1:
        return None
    return Layout(block_bytes, slots)


def ours(page: bytes) -> bool:
    """Whether a first page begins as those of tiers do, whole or not."""
    return page.startswith(MAGIC)


def slot_headers(state: int, key: int, sequence: int, sums: U8) -> NDArray[np.void]:
    """Headers of an entry's slots in their order, SLOT [n]; ``sums`` uint64 [n] are the payloads' checksums."""
    headers = np.zeros(len(sums), dtype=SLOT)
    headers["state"], headers["key"], headers["sequence"] = state, key, sequence
    headers["index"], headers["count"] = np.arange(len(sums)), len(sums)
    headers["payload"] = sums
    headers["crc"] = _crcs(headers)
    return headers


def scan(table: NDArray[np.void]) -> Found:
    """Read the slot headers SLOT [slots] of a file after a restart."""
    used = np.flatnonzero(table["state"])
    valid = used[_crcs(table[used]) == table["crc"][used]]
    newest = int(table["sequence"][valid].max(initial=0))
    held = valid[table["state"][valid] == HELD]
    entries: dict[int, Entry] = {}
    whole = 0
    by_entry: dict[tuple[int, int, int], dict[int, int]] = {}
    rows = (table[name][held].tolist() for name in ("key", "sequence", "count", "index"))
    for slot, key, sequence, count, index in zip(held.tolist(), *rows, strict=True):
        by_entry.setdefault((key, sequence, count), {})[index] = slot
    for (key, sequence, count), places in sorted(by_entry.items(), key=lambda item: item[0][1]):
        if len(places) != count or set(places) != set(range(count)):
            continue
        if key in entries:
            whole -= len(entries[key].slots)
        entries[key] = Entry(tuple(places[index] for index in range(count)), sequence)
        whole += count
    dropped = len(valid) - len(held)
    return Found(entries, len(used) - dropped - whole, newest)


def _crcs(headers: NDArray[np.void]) -> NDArray[np.uint32]:
    covered = headers.tobytes()
    size = SLOT.itemsize
    sums = [zlib.crc32(covered[at : at + _COVERED]) for at in range(0, len(covered), size)]
    return np.array(sums, dtype=np.uint32)
