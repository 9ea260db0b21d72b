"""When things on the card and its link are done: serial resources, and the costs they are charged at.

Mapping, unmapping, in-card copies and each direction of the host link go on side by side, each one thing after
another. Measured costs: shared/calibration (A100, one 2 MiB page: create 193 us, set access 36 us, unmap 26 us; an SM
copy kernel reaches 0.82 of the HBM's peak; Gen4 host link 25 GB/s).
"""

from __future__ import annotations

import dataclasses
from typing import Final

import msgspec

from loadgen.engine.specs import PAGE_BYTES


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


HBM_SHARE: Final = 0.82


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
