"""The methods by which memory goes from one tenant to another, what is asked of them, and what they are charged.

Mapping, unmapping, in-card copies and each direction of the host link go on side by side, each one thing after
another. Measured costs: shared/calibration (A100, one 2 MiB page: create 193 us, set access 36 us, unmap 26 us; an SM
copy kernel reaches 0.82 of the HBM's peak; Gen4 host link 25 GB/s).
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Final, Literal, NamedTuple

import msgspec

from loadgen.engine.specs import PAGE_BYTES

FOR_WANT: Final = 0
FOR_NEED: Final = 1
FOR_RESERVE: Final = 2
HBM_SHARE: Final = 0.82


class Mapping(NamedTuple):
    """A page group that is to be mapped in ``tenant`` once it is free."""

    ready_s: float
    tenant: int
    purpose: int


class Method(NamedTuple):
    """How memory goes from one tenant to another."""

    name: str
    compaction: bool
    eviction: Literal["none", "lru", "pages"]


METHODS: Final = (
    Method("wait_only", False, "none"),
    Method("lru_eviction", False, "lru"),
    Method("page_aware_eviction", False, "pages"),
    Method("compaction", True, "none"),
    Method("compaction_eviction", True, "lru"),
)


@dataclasses.dataclass(slots=True)
class Want:
    """A tenant is to get ``groups`` more than it had when it asked."""

    tenant: int
    asked_s: float
    groups: int
    givable: bool
    """The neighbours could have given it without preempting: below saturation."""
    scarce: bool
    """Nobody's groups did not suffice: it is about neighbours."""
    given: int = 0
    """Granted or on the way."""
    ready_s: list[float] = dataclasses.field(default_factory=list)
    """When each group was usable in the taker."""


@dataclasses.dataclass(slots=True)
class Account:
    """Bytes of what was done, in blocks, and groups."""

    moved_blocks: int = 0
    evicted_blocks: int = 0
    """For neighbours; what an engine drops for itself is not in it."""
    freed_groups: int = 0
    """Taken from donors."""
    compacted_groups: int = 0
    """Of these, emptied by moves."""


class Host:
    """The host tier: sessions' tokens, least recently written dropped first."""

    def __init__(self, capacity_tokens: float) -> None:
        self._capacity = capacity_tokens
        self._tokens: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._used = 0

    def has(self, session: int) -> int:
        return self._tokens.get(session, 0)

    def put(self, session: int, tokens: int) -> int:
        """Tokens that have to be written: what the tier has of the session already need not be."""
        had = self._tokens.pop(session, 0)
        self._tokens[session] = max(tokens, had)
        self._used += max(tokens - had, 0)
        while self._used > self._capacity:
            _, dropped = self._tokens.popitem(last=False)
            self._used -= dropped
        return max(tokens - had, 0)


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of one emulated card."""

    map_page_s: float = 193e-6 + 36e-6
    unmap_page_s: float = 26e-6
    link_bytes_per_s: float = 25e9
    """Each way."""
    copy_bytes_per_s: float
    """Payload of in-card copies: half of 0.82 x the HBM's peak, since each byte is read and written."""
    plan_s: float = 0.010
    """Planning a round of reclaim: the planner's limit for 100,000 blocks."""
    group_bytes: int

    @property
    def map_group_s(self) -> float:
        """Mapping a page group: 14.7 ms for 128 MiB."""
        return self.map_page_s * (self.group_bytes // PAGE_BYTES)

    @property
    def unmap_group_s(self) -> float:
        return self.unmap_page_s * (self.group_bytes // PAGE_BYTES)


@dataclasses.dataclass(slots=True)
class Resource:
    """One thing after another."""

    free_at_s: float = 0.0
    busy_s: float = 0.0

    def use(self, ready_s: float, seconds: float) -> float:
        """When a piece of work of ``seconds`` is done that can begin at ``ready_s``."""
        self.free_at_s = max(self.free_at_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_at_s


@dataclasses.dataclass(slots=True)
class Clocks:
    """The resources of one card."""

    costs: Costs
    map: Resource = dataclasses.field(default_factory=Resource)
    unmap: Resource = dataclasses.field(default_factory=Resource)
    copy: Resource = dataclasses.field(default_factory=Resource)
    out: Resource = dataclasses.field(default_factory=Resource)
    back: Resource = dataclasses.field(default_factory=Resource)

    def mapped(self, ready_s: float) -> float:
        """When a page group that is free at ``ready_s`` is mapped in its taker."""
        return self.map.use(ready_s, self.costs.map_group_s)

    def unmapped(self, ready_s: float) -> float:
        """When a donor's page group that is empty at ``ready_s`` is free."""
        return self.unmap.use(ready_s, self.costs.unmap_group_s)

    def moved(self, ready_s: float, size_bytes: float) -> float:
        """When an in-card copy is done."""
        return self.copy.use(ready_s, size_bytes / self.costs.copy_bytes_per_s)

    def swapped_out(self, ready_s: float, size_bytes: float) -> float:
        return self.out.use(ready_s, size_bytes / self.costs.link_bytes_per_s)

    def loaded(self, ready_s: float, size_bytes: float) -> float:
        return self.back.use(ready_s, size_bytes / self.costs.link_bytes_per_s)
