"""Long random histories of a pool: no block owned twice, none lost, no group given back in use, accounts add up.

``TIDEGATE_POOL_HISTORIES=<examples>x<steps>`` sets the state machine's size (default 40x30, always the
same ones), and
``TIDEGATE_POOL_WALK=<calls>`` the length of each seeded walk (default 1200).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import BlockState
from tests.services.actuator.memory.history import AFTER, History

SIZE = os.environ.get("TIDEGATE_POOL_HISTORIES", "")
EXAMPLES, STEPS = (int(part) for part in (SIZE or "40x30").split("x"))
WALK = int(os.environ.get("TIDEGATE_POOL_WALK", "1200"))

OWNERS = st.integers(0, 7)
WAITERS = st.sampled_from([None, 0, 1])
BITS = st.integers(0, 2**16 - 1)


class PoolMachine(RuleBasedStateMachine):
    """Every call of the pool, in any order, with owners and groups that may or may not suit it."""

    @initialize(
        order=st.sampled_from(["fullest", "lowest", "lifo"]),
        groups=st.integers(2, 6),
        per_group=st.integers(1, 5),
        floor=st.integers(0, 2),
        reserve=st.integers(0, 2),
    )
    def begin(self, order: str, groups: int, per_group: int, floor: int, reserve: int) -> None:
        geometry = Geometry(block_bytes=16, blocks_per_group=per_group, groups=groups)
        self.history = History(geometry, order=order, floor_groups=floor, reserve_groups=reserve)
        for owner in range(4):
            self.history.allocate(owner, per_group // 2 + 1, pinned=owner == 0)
        self.history.free(2)
        self.history.tick()

    @rule(owner=OWNERS, count=st.integers(0, 5), pinned=st.booleans(), waiter=WAITERS)
    def allocate(self, owner: int, count: int, pinned: bool, waiter: int | None) -> None:
        self.history.allocate(owner, count, pinned and owner < 3, waiter)

    @rule(owner=OWNERS, full=st.integers(0, 8))
    def fill(self, owner: int, full: int) -> None:
        self.history.fill(owner, full)

    @rule(owner=OWNERS, first=st.integers(0, 5), told=st.booleans())
    def write(self, owner: int, first: int, told: bool) -> None:
        if told:
            self.history.written(owner, first)
        else:
            self.history.scribble(owner)

    @rule(owner=OWNERS)
    def free(self, owner: int) -> None:
        self.history.free(owner)

    @rule(owner=OWNERS, wanted=st.sampled_from(sorted(AFTER)))
    def turn(self, owner: int, wanted: str) -> None:
        self.history.turn(owner, wanted)

    @precondition(lambda self: self.history.turns())
    @rule(which=BITS)
    def turn_as_may_be(self, which: int) -> None:
        turns = self.history.turns()
        self.history.turn(*turns[which % len(turns)])

    @rule(seed=BITS, between=st.sampled_from(["", "free", "write", "turn", "tick"]), which=BITS)
    def relocate(self, seed: int, between: str, which: int) -> None:
        """A whole relocation with something happening to a session while it is under way."""
        history = self.history
        self.prepare(seed, 8)
        number = next(reversed(history.open))
        history.copy(number, 1)
        moving = np.flatnonzero(history.pool.state == BlockState.MOVING)
        owners = history.pool.owner[moving[history.pool.owner[moving] >= 0]]
        if len(owners):
            owner = int(owners[which % len(owners)])
            if between == "free":
                history.free(owner)
            elif between == "write":
                history.written(owner, 0)
            elif between == "turn":
                wanted = "make_idle" if history.known[owner].state == "live" else "resume"
                history.turn(owner, wanted)
                history.scribble(owner)
        if between == "tick":
            history.tick()
        history.check()
        history.commit(number)
        history.check()
        history.allocate(7, 2)

    @rule(owner=st.integers(8, 9), blocks=st.integers(0, 4))
    def adopt(self, owner: int, blocks: int) -> None:
        self.history.adopt(owner, blocks)

    @rule(owner=OWNERS, prefix=st.integers(0, 2), attach=st.booleans())
    def share(self, owner: int, prefix: int, attach: bool) -> None:
        if attach:
            self.history.attach(owner, prefix)
        else:
            self.history.detach(owner)

    @rule(seed=BITS, count=st.integers(1, 8))
    def prepare(self, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        sources = rng.permutation(np.flatnonzero(self.history.pool.movable()))[:count]
        self.history.prepare(sources, rng.permutation(np.flatnonzero(self.history.pool.holes())))

    @rule(source=BITS, destination=BITS)
    def prepare_badly(self, source: int, destination: int) -> None:
        blocks = self.history.pool.geometry.blocks
        self.history.prepare_badly(source % blocks, destination % blocks)

    @precondition(lambda self: self.history.open)
    @rule(which=BITS, every=st.integers(1, 3))
    def copy(self, which: int, every: int) -> None:
        numbers = list(self.history.open)
        self.history.copy(numbers[which % len(numbers)], every)

    @rule(which=BITS)
    def commit(self, which: int) -> None:
        numbers = [*self.history.open, 10**6]
        self.history.commit(numbers[which % len(numbers)])

    @rule(which=BITS, stopped=st.booleans())
    def abort(self, which: int, stopped: bool) -> None:
        numbers = [*self.history.open, 10**6]
        self.history.abort(numbers[which % len(numbers)], stopped)

    @rule(which=BITS)
    def copier_stops(self, which: int) -> None:
        numbers = [*self.history.held, 10**6]
        self.history.copier_stops(numbers[which % len(numbers)])

    @rule()
    def tick(self) -> None:
        self.history.tick()

    @rule(count=st.integers(0, 3), reserve=st.booleans())
    def map(self, count: int, reserve: bool) -> None:
        if reserve:
            self.history.refill()
        else:
            self.history.map(count)

    @rule(count=st.integers(0, 4), keep=st.booleans())
    def give_back(self, count: int, keep: bool) -> None:
        self.history.give_back(count, keep)

    @rule(group=BITS, waiter=WAITERS)
    def give_back_named(self, group: int, waiter: int | None) -> None:
        self.history.give_back_named(group % self.history.pool.geometry.groups, waiter)

    @rule(group=BITS, waiter=st.integers(0, 1), release=st.booleans())
    def gather(self, group: int, waiter: int, release: bool) -> None:
        if release:
            self.history.release(waiter)
        else:
            self.history.protect(waiter, group % self.history.pool.geometry.groups)

    @rule(hard=st.integers(0, 7), soft=st.none() | st.integers(0, 20), behind=st.sampled_from([0, 0, 0, 1]))
    def quota(self, hard: int, soft: int | None, behind: int) -> None:
        self.history.set_quota(hard, soft, self.history.pool.generation - behind)

    @rule(owner=OWNERS, blocks=st.integers(0, 12))
    def promise(self, owner: int, blocks: int) -> None:
        self.history.promise(owner, blocks)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "history"):
            self.history.check()


PoolMachine.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    derandomize=not SIZE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestPoolMachine = PoolMachine.TestCase


def walk(history: History, rng: np.random.Generator, calls: int, owners: int, largest: int, check_every: int) -> None:
    """``calls`` random calls, most of them such as an engine under load makes."""
    pool = history.pool
    groups = pool.geometry.groups

    def any_of(numbers: Iterable[int]) -> int:
        listed = list(numbers)
        return int(rng.choice(listed)) if listed else 10**6

    def pick() -> int:
        return int(rng.integers(owners))

    def prepare() -> None:
        sources = rng.permutation(np.flatnonzero(pool.movable()))[: int(rng.integers(1, 2 * largest))]
        history.prepare(sources, rng.permutation(np.flatnonzero(pool.holes())))

    def prepare_badly() -> None:
        source = int(rng.integers(pool.geometry.blocks)) if rng.random() < 0.5 else any_of(np.flatnonzero(pool.pinned))
        holes = np.flatnonzero(pool.holes())
        destination = int(rng.choice(holes)) if len(holes) and rng.random() < 0.7 else source
        history.prepare_badly(source % pool.geometry.blocks, destination % pool.geometry.blocks)

    def allocate() -> None:
        count = 1 if rng.random() < 0.5 else int(rng.integers(0, largest))
        history.allocate(pick(), count, bool(rng.random() < 0.1), None if rng.random() < 0.7 else 0)

    moves: list[tuple[float, Callable[[], None]]] = [
        (6, allocate),
        (2, lambda: history.free(pick())),
        (10, lambda: history.turn(pick(), str(rng.choice(sorted(AFTER))))),
        (1, lambda: history.fill(pick(), int(rng.integers(largest)))),
        (1, lambda: history.written(pick(), int(rng.integers(largest)))),
        (2, lambda: history.scribble(pick())),
        (0.3, lambda: history.adopt(pick(), int(rng.integers(largest)))),
        (2, lambda: history.attach(pick(), any_of(one for one, known in history.known.items() if known.pinned))),
        (0.5, lambda: history.detach(pick())),
        (2, prepare),
        (2, prepare_badly),
        (2, lambda: history.copy(any_of(history.open), 2) if history.open else None),
        (2, lambda: history.commit(any_of(history.open))),
        (0.7, lambda: history.abort(any_of(history.open), bool(rng.random() < 0.5))),
        (0.7, lambda: history.copier_stops(any_of(history.held))),
        (3, history.tick),
        (0.5, lambda: history.map(int(rng.integers(3)))),
        (0.5, history.refill),
        (1, lambda: history.give_back(int(rng.integers(4)), bool(rng.random() < 0.5))),
        (1, lambda: history.give_back_named(int(rng.integers(groups)), None if rng.random() < 0.5 else 0)),
        (0.5, lambda: history.protect(int(rng.integers(2)), int(rng.integers(groups)))),
        (0.5, lambda: history.release(int(rng.integers(2)))),
        (0.5, lambda: history.set_quota(int(rng.integers(groups // 2, groups + 1)), None, pool.generation)),
        (0.5, lambda: history.promise(pick(), int(rng.integers(largest)))),
    ]
    weights = np.array([weight for weight, _ in moves])
    for number, which in enumerate(rng.choice(len(moves), size=calls, p=weights / weights.sum())):
        moves[which][1]()
        if number % check_every == 0:
            history.check()
    history.check()


@pytest.mark.parametrize("order", ["fullest", "lowest", "lifo"])
@pytest.mark.timeout(0)
def test_long_walk_over_a_middling_pool_loses_no_block(order: str) -> None:
    history = History(Geometry(64, 16, 24), order=order, floor_groups=2, reserve_groups=1)
    walk(history, np.random.default_rng([7, len(order)]), WALK, owners=24, largest=20, check_every=3)
    assert history.calls > WALK / 2, "most calls reached the pool"
