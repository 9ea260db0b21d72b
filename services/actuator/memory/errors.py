"""Errors of the memory plane; each carries its numbers, and what it was raised from is unchanged.

MemoryPlaneError            (services/errors.py)
├── BadGeometry             blocks, groups and bytes that do not fit together
├── BadMoves                a plan that overlaps itself or touches blocks it must not
├── UnknownTicket           a relocation that was never prepared, or has ended
├── StaleGeneration         a quota command made on another generation than the one in force
├── OutOfBlocks             more blocks than quota, floor and arena leave
├── IllegalTransition       a block, group or session that is not in the state the call needs
├── SegmentGone             a shared arena that vanished, was cut short or was overwritten
└── InvariantBroken         the pool contradicts itself: a bug, never a caller's mistake
"""

from __future__ import annotations

from services.errors import MemoryPlaneError


class BadGeometry(MemoryPlaneError):
    """``what`` was ``found`` where ``expected`` (a rule in words) is needed."""

    def __init__(self, what: str, found: int, expected: str) -> None:
        super().__init__(f"{what}: found {found}, expected {expected}")
        self.what = what
        self.found = found
        self.expected = expected


class BadMoves(MemoryPlaneError):
    """``count`` of a plan's moves break a rule; ``index`` and ``block`` are the first of them (0, 0 when the
    plan as a whole is malformed)."""

    def __init__(self, reason: str, count: int = 0, index: int = 0, block: int = 0) -> None:
        super().__init__(f"{reason}: {count} moves, the first is number {index} with block {block}")
        self.reason = reason
        self.count = count
        self.index = index
        self.block = block


class UnknownTicket(MemoryPlaneError):
    """Ticket ``number`` is not open; ``newest`` is the last one given out, ``open_tickets`` how many are."""

    def __init__(self, number: int, newest: int, open_tickets: int) -> None:
        super().__init__(f"ticket {number} is not open: {open_tickets} are, the newest given out is {newest}")
        self.number = number
        self.newest = newest
        self.open_tickets = open_tickets


class StaleGeneration(MemoryPlaneError):
    """A command was made on generation ``found``; ``current`` is in force."""

    def __init__(self, found: int, current: int) -> None:
        super().__init__(f"the command was made on generation {found}, {current} is in force")
        self.found = found
        self.current = current


class OutOfBlocks(MemoryPlaneError):
    """``wanted`` were asked for and ``available`` are left under ``limit`` (a label), in ``unit``."""

    def __init__(self, wanted: int, available: int, limit: str, unit: str = "blocks") -> None:
        super().__init__(f"{wanted} {unit} wanted, {available} available under {limit}")
        self.wanted = wanted
        self.available = available
        self.limit = limit
        self.unit = unit


class IllegalTransition(MemoryPlaneError):
    """``subject`` (block, group or session) ``number`` is ``found`` and cannot do ``wanted``."""

    def __init__(self, subject: str, number: int, found: str, wanted: str, count: int = 1) -> None:
        more = f" (the first of {count})" if count > 1 else ""
        super().__init__(f"{subject} {number}{more} is {found}: cannot {wanted}")
        self.subject = subject
        self.number = number
        self.found = found
        self.wanted = wanted
        self.count = count


class SegmentGone(MemoryPlaneError):
    """Shared segment ``name`` has ``found`` bytes where ``expected`` are needed, or its header says otherwise."""

    def __init__(self, name: str, found: int, expected: int, detail: str = "") -> None:
        super().__init__(f"{name}: found {found} bytes, expected {expected}" + (f" ({detail})" if detail else ""))
        self.name = name
        self.found = found
        self.expected = expected
        self.detail = detail


class InvariantBroken(MemoryPlaneError):
    """``rule`` does not hold: ``found`` against ``expected``; ``index`` is the first place."""

    def __init__(self, rule: str, found: int, expected: int, index: int = 0) -> None:
        super().__init__(f"{rule}: found {found}, expected {expected} (first at {index})")
        self.rule = rule
        self.found = found
        self.expected = expected
        self.index = index
