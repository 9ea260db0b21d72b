"""The words of a shrink: who may go, what predictions rest on, the plan, and the receipt. Pure."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, Literal

import msgspec

from services.actuator.memory.planner import COPY_BYTES_PER_S

Reason = Literal["", "protected", "stuck", "no_victims", "link", "copy", "time", "mover"]
"""Why groups are missing: a waiter's groups; pinned, written or travelling blocks; nobody (more) may be sent away;
the host link, the copying, or the mapping calls and iteration boundaries alone take longer than there is; transfers
failed."""


class Victim(msgspec.Struct, frozen=True):
    """An idle session; ``has_copy``: a lower tier holds all its KV, so that dropping it loses nothing."""

    owner: int
    has_copy: bool = False


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What predictions rest on; each above 0 unless said otherwise."""

    copy_bytes_per_s: float = COPY_BYTES_PER_S
    """Payload rate of in-card copies."""
    link_bytes_per_s: float = 25e9
    """Rate of swap-outs over the host link; 0: nothing may be swapped out."""
    unmap_group_s: float = 0.015
    """To give one page group back, 0 or more (A100: about 230 us a page)."""
    boundary_s: float = 0.03
    """From one iteration boundary to the next, 0 or more: freed blocks are usable one boundary later."""

    def __post_init__(self) -> None:
        if not (self.copy_bytes_per_s > 0 and min(self.link_bytes_per_s, self.unmap_group_s, self.boundary_s) >= 0):
            raise ValueError(f"{self}: expected a copying rate above 0 and the others 0 or more")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a shrink may do."""

    may_drop: bool = True
    """Idle KV without a copy may be dropped and recomputed on return, where swapping out would miss the deadline."""
    may_preempt: bool = True
    """Running requests may be preempted when idle KV does not suffice."""
    host_free_bytes: float = math.inf
    """Room for swap-outs in the lower tier."""
    may_wait: bool = True
    """With nothing left to do, wait until the deadline for what may free itself: requests end, copies finish."""
    late_limit_s: float = 0.0
    """How long after a missed deadline to go on; 0: what is begun is finished, nothing more is begun."""


@dataclasses.dataclass(frozen=True, eq=False)
class ShrinkPlan:
    """What to do for ``groups`` of the ``wanted`` groups, and how long each part is predicted to take."""

    wanted: int
    groups: int
    empty: int
    """Of these, groups that are empty as it is."""
    deficit_blocks: int
    """Blocks that must go for want of holes."""
    drops: tuple[int, ...]
    """Idle owners whose copy in a lower tier stays; like the next three in the order in which they go."""
    swaps: tuple[int, ...]
    """Idle owners to copy to the host first."""
    forgets: tuple[int, ...]
    """Idle owners to drop without a copy: their next turn recomputes it."""
    preempts: tuple[int, ...]
    """Running owners."""
    moved_bytes: int
    """Compaction, once they are gone."""
    swap_s: float
    copy_s: float
    other_s: float
    """Giving groups back and waiting for iteration boundaries."""
    reason: Reason
    """Why not all that is wanted."""

    @property
    def seconds(self) -> float:
        """Of all parts, one after the other."""
        return self.swap_s + self.copy_s + self.other_s


DEFAULT_RATES: Final = Rates()
DEFAULT_LIMITS: Final = Limits()


class Stage(msgspec.Struct):
    """What one means gave."""

    groups: int = 0
    """Page groups that became empty by it and were given back."""
    seconds: float = 0.0
    """Until they were given back."""
    bytes: int = 0
    """KV that was moved in the card, or that left it."""
    pieces: int = 0
    """Blocks moved, or sessions that left."""


class ShrinkReceipt(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a command to come down to ``target_groups``."""

    generation: int
    """Of the quota that the command put in force."""
    from_groups: int
    """Mapped when it came."""
    target_groups: int
    mapped_groups: int
    """Mapped when it ended."""
    empty: Stage
    eviction: Stage
    compaction: Stage
    preemption: Stage
    copied_out_bytes: int
    """Of the evicted bytes, those that were copied to the host for it."""
    forgotten_bytes: int
    """Of the evicted bytes, those dropped without a copy: recomputed on return."""
    dropped_moves: int
    """Moves whose source changed under the copy."""
    given_s: float
    """Seconds that the deadline left when the command came."""
    took_s: float
    short_groups: int
    """Groups still to give back when the deadline came."""
    late_s: float
    """How long after the deadline the target was reached: 0 in time, inf when it was not."""
    reason: Reason
    """Why it was missed."""

    @property
    def held(self) -> bool:
        """Whether the target was reached by the deadline."""
        return self.short_groups == 0

    @property
    def evicted_bytes(self) -> int:
        return self.eviction.bytes

    @property
    def moved_bytes(self) -> int:
        return self.compaction.bytes

    def __str__(self) -> str:
        if self.held:
            return f"{self.from_groups} to {self.mapped_groups} groups in {self.took_s:.3f} of {self.given_s:.3f} s"
        late = f"{self.late_s:.3f} s late" if self.late_s < math.inf else f"still {self.mapped_groups}"
        wanted = self.from_groups - self.target_groups
        return f"{self.short_groups} of {wanted} groups missing after {self.given_s:.3f} s ({self.reason}), {late}"
