"""Shared prefixes: loaded once, waited for by all, and nobody held up by somebody else's."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.actuator.memory.errors import IllegalTransition
from services.actuator.memory.loads import Ended, Loads


def test_a_prefix_is_loaded_once_for_all_who_need_it() -> None:
    loads = Loads()
    assert loads.ask(1, [100]).start == (100,)
    assert loads.ask(2, [100]).start == ()
    assert loads.ask(3, [100]).start == ()
    assert loads.loaded(100).ready == (1, 2, 3)
    assert loads.users(100) == 3
    assert loads.ask(4, [100]).ready, "it is there now"


def test_a_slow_prefix_holds_up_only_those_who_need_it() -> None:
    loads = Loads()
    loads.ask(1, [100, 200])
    loads.ask(2, [200])
    assert loads.loaded(200).ready == (2,)
    assert loads.loaded(100).ready == (1,)


def test_who_can_wait_no_longer_recomputes_while_the_others_wait_on() -> None:
    loads = Loads()
    loads.ask(1, [100], deadline_s=5.0)
    loads.ask(2, [100], deadline_s=9.0)
    assert loads.expire(5.0) == Ended(recompute=(1,))
    assert loads.loaded(100).ready == (2,)


def test_a_load_that_nobody_waits_for_any_more_may_stop() -> None:
    loads = Loads()
    loads.ask(1, [100], deadline_s=5.0)
    assert loads.expire(6.0).cancel == (100,)
    loads.ask(2, [100])
    with pytest.raises(IllegalTransition):
        loads.cancelled(100)  # somebody joined in the meantime
    assert loads.loaded(100).ready == (2,)


def test_a_failed_load_makes_each_of_its_waiters_recompute_once() -> None:
    loads = Loads()
    loads.ask(1, [100, 200])
    loads.ask(2, [100])
    ended = loads.failed(100)
    assert ended.recompute == (1, 2)
    assert ended.cancel == (200,)
    assert loads.waiting == 0


def test_a_prefix_in_use_cannot_leave_and_who_gave_up_uses_it_no_more() -> None:
    loads = Loads()
    loads.appeared(100)
    loads.ask(1, [100, 200], deadline_s=1.0)
    with pytest.raises(IllegalTransition):
        loads.left(100)
    loads.expire(2.0)
    loads.left(100)
    assert not loads.resident(100)


def test_the_nearest_deadline_comes_first_over_the_link_and_prefetches_last() -> None:
    loads = Loads()
    assert loads.prefetch(300)
    assert not loads.prefetch(300)
    loads.ask(1, [100], deadline_s=9.0)
    loads.ask(2, [200], deadline_s=5.0)
    assert loads.loading == (200, 100, 300)
    loads.ask(3, [300], deadline_s=1.0)
    assert loads.loading == (300, 200, 100), "somebody came for what was fetched ahead"


class LoadMachine(RuleBasedStateMachine):
    """Every request that asked is answered exactly once, and uses add up."""

    KEYS = st.integers(0, 4)

    def __init__(self) -> None:
        super().__init__()
        self.loads = Loads()
        self.waiting: dict[int, tuple[set[int], float]] = {}
        self.using: dict[int, set[int]] = {}
        self.next = 0

    def ended(self, ended: Ended) -> None:
        for number in ended.ready:
            self.using[number] = self.waiting.pop(number)[0]
        for number in ended.recompute:
            self.waiting.pop(number)
        for key in ended.cancel:
            self.loads.cancelled(key)

    @rule(keys=st.sets(KEYS, min_size=1, max_size=3), deadline_s=st.floats(0, 10))
    def ask(self, keys: set[int], deadline_s: float) -> None:
        self.next += 1
        asked = self.loads.ask(self.next, sorted(keys), deadline_s)
        if asked.ready:
            self.using[self.next] = keys
        else:
            self.waiting[self.next] = keys, deadline_s

    @rule(data=st.data(), well=st.booleans())
    def end(self, data: st.DataObject, well: bool) -> None:
        if under_way := self.loads.loading:
            key = data.draw(st.sampled_from(under_way))
            self.ended(self.loads.loaded(key) if well else self.loads.failed(key))

    @rule(now_s=st.floats(0, 10))
    def expire(self, now_s: float) -> None:
        self.ended(self.loads.expire(now_s))
        assert all(deadline_s > now_s for _, deadline_s in self.waiting.values())

    @rule(key=KEYS)
    def ahead(self, key: int) -> None:
        self.loads.prefetch(key)

    @rule()
    def finish(self) -> None:
        if self.using:
            self.loads.done_with(sorted(self.using.pop(min(self.using))))

    @rule(key=KEYS)
    def leave(self, key: int) -> None:
        if not self.loads.users(key):
            self.loads.left(key)

    @invariant()
    def adds_up(self) -> None:
        assert self.loads.waiting == len(self.waiting)
        for key in range(5):
            waiting_with = sum(key in keys and self.loads.resident(key) for keys, _ in self.waiting.values())
            using = sum(key in keys for keys in self.using.values())
            assert using <= self.loads.users(key) <= using + waiting_with


TestLoadMachine = LoadMachine.TestCase
TestLoadMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
