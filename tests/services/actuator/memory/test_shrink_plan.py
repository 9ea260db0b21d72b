"""The pure half of a shrink: who goes, in which order, and that predictions come true at the stated rates."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.actuator.memory.geometry import Geometry
from services.actuator.memory.planner import deficit_blocks, plan_blocks
from services.actuator.memory.pool import Pool
from services.actuator.memory.shrink import Shrinker
from services.actuator.memory.shrink_plan import plan_shrink
from services.actuator.memory.shrink_terms import Limits, Rates, ShrinkPlan, Victim
from tests.services.actuator.memory.shrink_shapes import RATES
from tests.services.actuator.memory.simulated_card import Card

PER_GROUP, GROUPS = 8, 10
FOR_EVER = 1e9


@dataclasses.dataclass
class Case:
    """A random pool with who may go from it, and a wish."""

    card: Card
    idle: list[Victim]
    running: list[int]
    groups: int

    def plan(self, within_s: float = FOR_EVER, limits: Limits | None = None) -> ShrinkPlan:
        return plan_shrink(
            self.card.pool.blocks,
            self.groups,
            within_s=within_s,
            idle=self.idle,
            running=self.running,
            rates=RATES,
            limits=limits or Limits(),
        )

    def size(self, owner: int) -> int:
        return len(self.card.pool.table(owner))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pool = Pool(Geometry(1_000_000, PER_GROUP, GROUPS), order=draw(st.sampled_from(["fullest", "lowest", "lifo"])))
    card = Card(pool, RATES)
    idle, running, freed = [], [], []
    wanted = draw(st.lists(st.tuples(st.sampled_from("icrf"), st.integers(1, 12)), max_size=30))
    for owner, (kind, size) in enumerate(wanted):
        if pool.used_blocks + size > pool.geometry.blocks:
            break
        if kind in "ic":
            idle.append(Victim(card.idle(owner, size, copied=kind == "c"), kind == "c"))
        else:
            (running if kind == "r" else freed).append(card.run(owner, size))
    for one in freed:
        pool.free(one)
    return Case(card, idle, running[::-1], draw(st.integers(0, pool.mapped_groups)))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_with_time_enough_exactly_the_deficit_goes_and_all_that_is_wanted_is_had(case: Case) -> None:
    plan = case.plan()
    pool = case.card.pool
    assert plan.groups == case.groups, "everything in these pools may go or move"
    assert plan.deficit_blocks == deficit_blocks(pool.occupancy(), pool.geometry, case.groups)
    gone = [*plan.drops, *plan.swaps, *plan.preempts]
    freed = sum(case.size(owner) for owner in gone)
    assert freed >= plan.deficit_blocks
    assert plan.forgets == (), "nothing is lost that there is time to save"
    for owner in gone:
        assert freed - case.size(owner) < plan.deficit_blocks, f"session {owner} need not have gone"
    idle_blocks = sum(case.size(one.owner) for one in case.idle)
    if idle_blocks >= plan.deficit_blocks:
        assert plan.preempts == (), "a running request was preempted though idle KV suffices"
    if sum(case.size(one.owner) for one in case.idle if one.has_copy) >= plan.deficit_blocks:
        assert plan.swaps == (), "KV without a copy went though KV with one suffices"


@settings(max_examples=150, deadline=None)
@given(cases(), st.sampled_from([0.0, 0.003, 0.01, 0.03, 0.1]), st.booleans(), st.booleans())
def test_what_is_planned_within_a_deadline_takes_no_longer_and_gives_what_it_says(
    case: Case, within_s: float, may_drop: bool, may_preempt: bool
) -> None:
    limits = Limits(may_drop=may_drop, may_preempt=may_preempt, may_wait=False)
    plan = case.plan(within_s, limits)
    assert plan.seconds <= within_s
    assert (plan.reason == "") is (plan.groups >= case.groups)
    assert may_drop or plan.forgets == ()
    assert may_preempt or plan.preempts == ()
    card = case.card
    before = card.pool.mapped_groups
    receipt = Shrinker(card.pool, card, card.clock, rates=RATES, limits=limits).shrink(
        before - case.groups,
        None,
        0,
        deadline_ns=card.clock.now_ns() + round(within_s * 1e9),
        idle=case.idle,
        running=case.running,
    )
    card.verify()
    assert before - card.pool.mapped_groups >= plan.groups, f"{plan} promised more than {receipt}"
    assert set(card.preempted) <= set(case.running)


def test_victims_go_in_the_callers_order_after_those_with_a_copy() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    for owner in range(1, 11):
        card.idle(owner, PER_GROUP, copied=owner in (2, 9))
    order = [5, 9, 1, 2, 3, 4, 6, 7, 8, 10]
    idle = [Victim(owner, owner in (2, 9)) for owner in order]
    plan = plan_shrink(card.pool.blocks, 4, within_s=FOR_EVER, idle=idle, rates=RATES)
    assert plan.drops == (9, 2)
    assert plan.swaps == (5, 1)


def test_room_in_the_host_tier_bounds_what_is_swapped_out() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    idle = [Victim(card.idle(owner, PER_GROUP)) for owner in range(1, 11)]
    room = Limits(host_free_bytes=2 * PER_GROUP * 1_000_000)
    plan = plan_shrink(card.pool.blocks, 5, within_s=FOR_EVER, idle=idle, rates=RATES, limits=room)
    assert (plan.forgets, plan.swaps) == ((1, 2, 3), (4, 5)), "the best victims are the least likely to be missed"
    keep = Limits(host_free_bytes=2 * PER_GROUP * 1_000_000, may_drop=False)
    plan = plan_shrink(card.pool.blocks, 5, within_s=FOR_EVER, idle=idle, rates=RATES, limits=keep)
    assert (plan.groups, plan.swaps, plan.reason) == (2, (1, 2), "no_victims")


def test_a_class_that_forbids_swapping_has_a_link_rate_of_zero_and_swaps_nothing() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    idle = [Victim(card.idle(owner, PER_GROUP)) for owner in range(1, 11)]
    plan = plan_shrink(card.pool.blocks, 3, within_s=FOR_EVER, idle=idle, rates=Rates(link_bytes_per_s=0.0))
    assert plan.swaps == ()
    assert plan.forgets == (1, 2, 3)


def test_kv_in_a_waiters_groups_is_no_help_and_stays() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS), order="lowest"), RATES)
    idle = [Victim(card.idle(owner, PER_GROUP), True) for owner in range(1, 11)]
    card.pool.protect(7, np.arange(2))
    plan = plan_shrink(card.pool.blocks, 1, within_s=FOR_EVER, idle=idle, rates=RATES)
    assert plan.drops == (3,), "the sessions in groups 0 and 1 free nothing that can be given back"


def test_a_pinned_prefix_stays_whoever_is_named() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    card.run(1, 2 * PER_GROUP, pinned=True)
    plan = plan_shrink(card.pool.blocks, 1, within_s=FOR_EVER, running=[1], rates=RATES)
    assert (plan.groups, plan.preempts, plan.reason) == (0, (), "no_victims")


def test_all_freed_but_every_40th_block_of_6400_gives_back_97_of_100_groups_in_a_real_pool() -> None:
    card = Card(Pool(Geometry(65_536, 64, 100)), RATES)
    for at in range(160):
        card.run(at, 1)
        card.run(1000 + at, 39)
    for at in range(160):
        card.pool.free(1000 + at)
    card.pool.tick()
    assert (card.pool.mapped_groups, card.pool.used_blocks) == (100, 160)
    assert plan_blocks(card.pool.blocks, want_groups=0).groups_empty == 0
    for at in range(160):
        card.pool.make_idle(at)
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES)
    receipt = shrinker.shrink(3, None, 0, deadline_ns=card.clock.now_ns() + 10**9)
    card.verify()
    assert receipt.held
    assert (receipt.empty.groups, receipt.compaction.groups, card.pool.mapped_groups) == (0, 97, 3)
    assert receipt.evicted_bytes == 0


def test_a_wish_or_rates_that_make_no_sense_are_refused_with_their_numbers() -> None:
    pool = Pool(Geometry(1_000_000, PER_GROUP, GROUPS))
    with pytest.raises(ValueError, match="-1 groups"):
        plan_shrink(pool.blocks, -1, within_s=1.0)
    with pytest.raises(ValueError, match="nan s"):
        plan_shrink(pool.blocks, 1, within_s=np.nan)
    with pytest.raises(ValueError, match="copy_bytes_per_s=0"):
        Rates(copy_bytes_per_s=0.0)
