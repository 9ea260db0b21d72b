"""Errors of the tiers, beside those of errors.py; each carries its numbers, and the tier's account is as before.

MemoryPlaneError
├── TierFull       an ordinary state: no room now; the session stays where it is
├── UnknownEntry   nothing whole is held under that key
├── TornSlot       bytes that are not what was written: dropped, never served
├── TierFailed     the operating system refused a read or a write for another reason than space
└── NotATier       a file that is no tier of ours, or one that another process has open
"""

from __future__ import annotations

from services.errors import MemoryPlaneError


class TierFull(MemoryPlaneError):
    """``wanted`` slots and ``free`` usable ones of ``capacity``. Ask ``accepts`` before trying again: it says no
    until slots were freed (or, after ``disk full``, until the file system has room)."""

    def __init__(self, tier: str, wanted: int, free: int, capacity: int, reason: str = "no free slots") -> None:
        super().__init__(f"{tier}: {wanted} slots wanted, {free} of {capacity} free: {reason}")
        self.tier = tier
        self.wanted = wanted
        self.free = free
        self.capacity = capacity
        self.reason = reason


class UnknownEntry(MemoryPlaneError):
    """Nothing whole is held under ``key``; ``entries`` others are."""

    def __init__(self, tier: str, key: int, entries: int) -> None:
        super().__init__(f"{tier}: nothing is held under key {key} ({entries} entries are)")
        self.tier = tier
        self.key = key
        self.entries = entries


class TornSlot(MemoryPlaneError):
    """``torn`` of an entry's ``slots`` failed their checksum; ``slot`` is the first."""

    def __init__(self, tier: str, key: int, slot: int, torn: int, slots: int) -> None:
        super().__init__(f"{tier}: key {key}: {torn} of {slots} slots are not what was written, the first is {slot}")
        self.tier = tier
        self.key = key
        self.slot = slot
        self.torn = torn
        self.slots = slots


class TierFailed(MemoryPlaneError):
    """The operating system refused: ``number`` is its errno."""

    def __init__(self, tier: str, number: int, detail: str) -> None:
        super().__init__(f"{tier}: {detail} (errno {number})")
        self.tier = tier
        self.number = number
        self.detail = detail


class NotATier(MemoryPlaneError):
    """``path`` cannot be opened as a tier: ``found`` where ``expected`` is needed. It was not touched."""

    def __init__(self, path: str, found: str, expected: str) -> None:
        super().__init__(f"{path}: found {found}, expected {expected}")
        self.path = path
        self.found = found
        self.expected = expected
