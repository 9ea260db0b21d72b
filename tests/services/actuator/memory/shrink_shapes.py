"""Shapes of pool that a shrink meets, each with what must become of it.

Groups of 16 blocks of 1 MB; the link takes 1 ms a block, a copy in the card 1/16 ms, giving a group back and an
iteration 1 ms each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import Pool
from services.actuator.memory.shrink_terms import DEFAULT_LIMITS, Limits, Rates, Victim
from tests.services.actuator.memory.simulated_card import Card

RATES = Rates(copy_bytes_per_s=16e9, link_bytes_per_s=1e9, unmap_group_s=1e-3, boundary_s=1e-3)
PER_GROUP = 16
GROUPS = 20
PREFIX, FIRST_IDLE = 900, 100
Sessions = tuple[list[Victim], list[int]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """``build`` fills the card and names who may go; ``gives`` the means that must have been used."""

    name: str
    build: Callable[[Card], Sessions]
    target: int
    deadline_s: float
    held: bool
    gives: frozenset[str]
    reason: str = ""
    limits: Limits = DEFAULT_LIMITS
    per_group: int = PER_GROUP
    order: str = "lowest"
    link_slower: float = 1.0
    copy_slower: float = 1.0

    def card(self) -> Card:
        pool = Pool(Geometry(1_000_000, self.per_group, GROUPS), order=self.order, floor_groups=1)
        return Card(pool, RATES, link_slower=self.link_slower, copy_slower=self.copy_slower)


def nothing(card: Card) -> Sessions:
    card.pool.map_groups(GROUPS)
    return [], []


def idle(copied: bool | None, each: int = 8) -> Callable[[Card], Sessions]:
    """Full of idle sessions; None: every other one has a copy."""

    def build(card: Card) -> Sessions:
        owners = range(FIRST_IDLE, FIRST_IDLE + card.pool.geometry.blocks // each)
        has = {owner: owner % 2 == 0 if copied is None else copied for owner in owners}
        for owner in owners:
            card.idle(owner, each, copied=has[owner])
        return [Victim(owner, has[owner]) for owner in owners], []

    return build


def running(each: int = 8) -> Callable[[Card], Sessions]:
    """Full of running requests, the newest last."""

    def build(card: Card) -> Sessions:
        owners = list(range(card.pool.geometry.blocks // each))
        for owner in owners:
            card.run(owner, each)
        return [], owners[::-1]

    return build


def sparse(kept: int = 4, *, writing: bool = False, pinned: bool = False) -> Callable[[Card], Sessions]:
    """Each group holds ``kept`` blocks of a running request, the rest of it was freed."""

    def build(card: Card) -> Sessions:
        for group in range(GROUPS):
            card.run(group, kept, pinned=pinned)
            card.run(500 + group, PER_GROUP - kept, pinned=pinned)
        for group in range(GROUPS):
            card.pool.free(500 + group)
            if writing and group % 2:
                card.pool.fill(group, kept - 1)
        return [], list(range(GROUPS))[::-1]

    return build


def pins_apart(card: Card) -> Sessions:
    card.run(PREFIX, 3 * PER_GROUP, pinned=True)
    owners = list(range((GROUPS - 3) * 4))
    for owner in owners:
        card.run(owner, 4)
    for owner in owners[::2]:
        card.pool.free(owner)
    return [], owners[1::2][::-1]


def gathered(card: Card) -> Sessions:
    sessions = sparse()(card)
    card.pool.protect(7, np.arange(8))
    return sessions


def mixed(card: Card) -> Sessions:
    """A third each of running, idle and free, in an order that nobody chose."""
    rng = np.random.default_rng(5)
    idle_owners, running_owners, freed = [], [], []
    owner = 0
    while card.pool.used_blocks < card.pool.geometry.blocks - 8:
        kind = int(rng.integers(3))
        owner += 1
        if kind == 0:
            running_owners.append(card.run(owner, int(rng.integers(1, 9))))
        elif kind == 1:
            idle_owners.append(card.idle(owner, int(rng.integers(1, 9)), copied=owner % 3 == 0))
        else:
            freed.append(card.run(owner, int(rng.integers(1, 9))))
    for one in rng.permutation(freed).tolist():
        card.pool.free(one)
    return [Victim(one, one % 3 == 0) for one in idle_owners], running_owners[::-1]


def leaving(card: Card) -> Sessions:
    """Half of it is on its way to the host for somebody else and will be there in two iterations."""
    sessions = idle(False)(card)
    away = list(range(FIRST_IDLE, FIRST_IDLE + GROUPS))
    for owner in away:
        card.pool.begin_leave(owner)
        card.host[owner] = owner * 1_000_000 + np.arange(8, dtype=np.int64)

    def arrive() -> None:
        for owner in away:
            card.pool.complete_leave(owner)

    card.at_boundary = [lambda: None, arrive]
    return [], sessions[1]


def broken_tier(card: Card) -> Sessions:
    card.tier_works = False
    return idle(False)(card)


def broken_mover(card: Card) -> Sessions:
    card.mover_works = False
    return sparse()(card)


def coming_back(card: Card) -> Sessions:
    """Victims whose next turn begins while others are being copied out."""
    victims, rest = idle(False)(card)
    plain = card.swap_out

    def swap_out(owner: int, blocks: np.ndarray) -> bool:  # type: ignore[type-arg]
        done = plain(owner, blocks)
        if owner + 1 in card.pool.sessions and owner % 4 == 0:
            card.pool.resume(owner + 1)
            card.pool.fill(owner + 1, 8)
        return done

    card.swap_out = swap_out  # type: ignore[method-assign]
    return victims, rest


EMPTY, EVICTION, COMPACTION, PREEMPTION = "empty", "eviction", "compaction", "preemption"
KEEP = Limits(may_drop=False, may_preempt=False)
GO_ON = Limits(may_drop=False, may_preempt=False, late_limit_s=10.0)


def _of(*means: str) -> frozenset[str]:
    return frozenset(means)


SHAPES = [
    Shape("nothing in it", nothing, 5, 0.1, True, _of(EMPTY)),
    Shape("empty, down to the floor", nothing, 1, 0.1, True, _of(EMPTY)),
    Shape("full of idle KV with copies", idle(True), 10, 0.1, True, _of(EVICTION)),
    Shape("full of idle KV, time to swap it out", idle(False), 10, 1.0, True, _of(EVICTION)),
    Shape("full of idle KV, too little time to swap it out", idle(False), 10, 0.1, True, _of(EVICTION)),
    Shape("the same where nothing may be lost", idle(False), 10, 0.1, False, _of(EVICTION), "link", KEEP),
    Shape("the same, allowed to be late", idle(False), 10, 0.1, False, _of(EVICTION), "link", GO_ON),
    Shape("idle KV, half with copies, one block across two groups", idle(None, 7), 10, 1.0, True, _of(EVICTION)),
    Shape("a quarter full everywhere", sparse(), 6, 0.1, True, _of(COMPACTION)),
    Shape("the same, copies cannot make it", sparse(), 6, 0.018, False, _of(COMPACTION), "copy", KEEP),
    Shape("the same, preempting saves the copies", sparse(), 6, 0.018, True, _of(PREEMPTION)),
    Shape("full of running requests", running(), 10, 0.1, True, _of(PREEMPTION)),
    Shape("the same, nobody may be preempted", running(), 10, 0.1, False, _of(), "no_victims", KEEP),
    Shape("pins in every group", sparse(pinned=True), 6, 0.05, False, _of(), "stuck", KEEP),
    Shape("pins in groups of their own", pins_apart, 12, 0.1, True, _of(COMPACTION)),
    Shape("half of the groups are being written", sparse(writing=True), 6, 0.05, False, _of(COMPACTION), "stuck", KEEP),
    Shape("the same, writers may be preempted", sparse(writing=True), 6, 0.1, True, _of(COMPACTION)),
    Shape("a waiter has gathered eight groups", gathered, 6, 0.05, False, _of(COMPACTION), "protected", KEEP),
    Shape("a mix, lowest address first", mixed, 11, 0.2, True, _of(COMPACTION)),
    Shape("a mix out of a LIFO free list", mixed, 11, 0.2, True, _of(COMPACTION), order="lifo"),
    Shape("a mix, everything must go that can", mixed, 1, 0.5, True, _of(PREEMPTION)),
    Shape("one block is one group", idle(True, 1), 5, 0.1, True, _of(EVICTION), per_group=1),
    Shape("KV on its way out for somebody else", leaving, 12, 0.05, True, _of(EMPTY)),
    Shape("a full host tier", broken_tier, 10, 1.0, True, _of(EVICTION)),
    Shape("a mover that fails", broken_mover, 6, 0.05, False, _of(), "mover", KEEP),
    Shape("victims that come back meanwhile", coming_back, 10, 1.0, True, _of(EVICTION)),
    Shape("a link half as fast as promised", idle(False), 10, 0.2, True, _of(EVICTION), link_slower=2.0),
    Shape("a link an eighth as fast as promised", idle(False), 10, 0.2, True, _of(EVICTION), link_slower=8.0),
    Shape("copies ten times as slow as promised", sparse(), 6, 0.03, False, _of(COMPACTION), "copy", copy_slower=10.0),
    Shape("a deadline that has passed", running(), 10, 0.0, False, _of(), "time"),
]
