"""Shrinking by a deadline over many shapes of pool: held, or missed by a stated amount for a stated reason."""

from __future__ import annotations

import math

import numpy as np
import pytest

from services.actuator.memory.errors import BadGeometry, OutOfBlocks, StaleGeneration
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.planner import plan_blocks
from services.actuator.memory.pool import Pool, SessionState
from services.actuator.memory.shrink import Shrinker
from services.actuator.memory.shrink_terms import Limits, ShrinkReceipt
from tests.services.actuator.memory.shrink_shapes import (
    GROUPS,
    PER_GROUP,
    RATES,
    SHAPES,
    Shape,
    idle,
    mixed,
    running,
    sparse,
)
from tests.services.actuator.memory.simulated_card import Card

NAMED = {shape.name: shape for shape in SHAPES}


def shrink(shape: Shape) -> tuple[Card, ShrinkReceipt]:
    card = shape.card()
    victims, live = shape.build(card)
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES, limits=shape.limits)
    deadline_ns = card.clock.now_ns() + round(shape.deadline_s * 1e9)
    receipt = shrinker.shrink(shape.target, None, 0, deadline_ns=deadline_ns, idle=victims, running=live)
    return card, receipt


def test_there_are_at_least_20_shapes() -> None:
    assert len(NAMED) == len(SHAPES) >= 20


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_meets_the_deadline_or_says_by_how_much_it_missed_and_why(shape: Shape) -> None:
    card, receipt = shrink(shape)
    card.verify()
    stages = {name: getattr(receipt, name) for name in ("empty", "eviction", "compaction", "preemption")}
    assert receipt.held is shape.held, f"{receipt}"
    assert receipt.reason == shape.reason
    assert receipt.mapped_groups == card.pool.mapped_groups
    assert receipt.from_groups - receipt.mapped_groups == sum(stage.groups for stage in stages.values())
    gave = {name for name, stage in stages.items() if stage.groups or stage.pieces}
    assert gave >= shape.gives, f"{receipt}: {stages}"
    assert sum(stage.seconds for stage in stages.values()) <= receipt.took_s + 1e-9
    if shape.held:
        assert receipt.mapped_groups == shape.target
        assert receipt.took_s <= shape.deadline_s
        assert receipt.late_s == 0.0
    else:
        assert receipt.short_groups > 0
        assert receipt.late_s > 0.0
        assert f"{receipt.short_groups} of" in str(receipt)
        assert shape.reason in str(receipt)


def test_a_shape_allowed_to_be_late_reaches_its_target_and_says_how_late() -> None:
    card, receipt = shrink(NAMED["the same, allowed to be late"])
    assert card.pool.mapped_groups == receipt.target_groups
    assert 0.0 < receipt.late_s < math.inf
    assert receipt.late_s == pytest.approx(receipt.took_s - receipt.given_s, abs=2e-3)


def test_empty_groups_go_even_when_the_deadline_has_passed() -> None:
    card = NAMED["nothing in it"].card()
    card.pool.map_groups(GROUPS)
    receipt = Shrinker(card.pool, card, card.clock, rates=RATES).shrink(5, None, 0, deadline_ns=card.clock.now_ns())
    assert receipt.mapped_groups == 5
    assert receipt.short_groups == 15, "they went, but not in time"
    assert 0.0 < receipt.late_s < math.inf


def test_idle_kv_is_dropped_unsaved_only_where_swapping_out_would_miss_the_deadline() -> None:
    card, receipt = shrink(NAMED["full of idle KV, time to swap it out"])
    assert receipt.forgotten_bytes == 0
    assert receipt.copied_out_bytes == receipt.evicted_bytes == 10 * PER_GROUP * 1_000_000
    card, receipt = shrink(NAMED["full of idle KV, too little time to swap it out"])
    assert 0 < receipt.copied_out_bytes < receipt.evicted_bytes == receipt.copied_out_bytes + receipt.forgotten_bytes
    assert len(card.forgotten) * 8_000_000 == receipt.forgotten_bytes


def test_evicts_exactly_the_deficit_and_what_has_a_copy_first() -> None:
    card, receipt = shrink(NAMED["idle KV, half with copies, one block across two groups"])
    blocks_freed = receipt.evicted_bytes // 1_000_000
    holes = GROUPS * PER_GROUP % 7
    deficit = 10 * PER_GROUP - holes
    assert deficit <= blocks_freed < deficit + 7, "at most the rest of one session more than the deficit"
    assert receipt.copied_out_bytes == 0, "enough sessions had a copy"
    gone = [owner for owner, one in card.pool.sessions.items() if one.state == SessionState.AWAY]
    assert all(owner % 2 == 0 for owner in gone)


def test_running_requests_are_preempted_only_when_idle_kv_does_not_suffice_and_the_newest_first() -> None:
    card, receipt = shrink(NAMED["a mix, lowest address first"])
    assert receipt.preemption.pieces == 0
    card, receipt = shrink(NAMED["full of running requests"])
    assert card.preempted == list(range(39, 19, -1))
    assert receipt.preemption.bytes == 10 * PER_GROUP * 1_000_000


def test_a_tier_that_refuses_is_asked_once_and_the_session_it_refused_is_not_left_half_way() -> None:
    card, receipt = shrink(NAMED["a full host tier"])
    assert card.swaps_asked == 1, "no retry storm"
    assert receipt.copied_out_bytes == 0
    assert receipt.forgotten_bytes == receipt.evicted_bytes > 0
    assert {one.state for one in card.pool.sessions.values()} == {SessionState.IDLE}


def test_a_copy_that_fails_is_aborted_and_tried_no_more() -> None:
    card, receipt = shrink(NAMED["a mover that fails"])
    assert card.pool.relocations.tickets == {}
    assert card.pool.used_blocks == GROUPS * 4, "destinations are free again"
    assert receipt.moved_bytes == 0


def test_moves_as_few_bytes_as_the_planner_says_are_needed() -> None:
    shape = NAMED["a quarter full everywhere"]
    card = shape.card()
    shape.build(card)
    needed = plan_blocks(card.pool.blocks, want_groups=GROUPS - shape.target)
    assert shrink(shape)[1].moved_bytes == needed.bytes == needed.lower_bound_bytes


def test_a_lowered_quota_binds_at_once_and_a_raised_one_lets_more_be_allocated_than_before() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    victims, _ = idle(True)(card)
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES)
    receipt = shrinker.shrink(8, None, 0, deadline_ns=card.clock.now_ns() + 10**9, idle=victims)
    assert receipt.held
    assert receipt.generation == card.pool.generation == 1
    with pytest.raises(OutOfBlocks):
        card.pool.allocate(1, 1)
    raised = card.pool.set_quota(12, None, receipt.generation)
    assert raised == 2
    before = card.pool.mapped_groups
    assert len(card.pool.allocate(1, 4 * PER_GROUP)) == 4 * PER_GROUP, "beyond the former quota"
    assert card.pool.mapped_groups == before + 4 == 12
    with pytest.raises(OutOfBlocks):
        card.pool.allocate(1, 1)
    card.pool.check()


def test_a_quota_that_the_pool_refuses_changes_nothing() -> None:
    card = NAMED["full of running requests"].card()
    _, live = running()(card)
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES)
    deadline_ns = card.clock.now_ns() + 10**9
    with pytest.raises(BadGeometry):
        shrinker.shrink(0, None, 0, deadline_ns=deadline_ns, running=live)
    card.pool.set_quota(15, None, 0)
    with pytest.raises(StaleGeneration):
        shrinker.shrink(10, None, 0, deadline_ns=deadline_ns, running=live)
    assert card.preempted == []
    assert card.pool.mapped_groups == GROUPS


def test_without_leave_to_wait_it_returns_at_once_when_nothing_can_be_done() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    sparse(pinned=True)(card)
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES, limits=Limits(may_wait=False))
    receipt = shrinker.shrink(6, None, 0, deadline_ns=card.clock.now_ns() + 10**9)
    assert receipt.took_s == 0.0
    assert (receipt.short_groups, receipt.late_s, receipt.reason) == (14, math.inf, "stuck")


def test_moves_whose_source_was_freed_under_the_copy_are_counted_and_its_group_goes_all_the_same() -> None:
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS)), RATES)
    sparse()(card)
    card.at_boundary = [lambda: card.pool.free(GROUPS - 1)]
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES)
    receipt = shrinker.shrink(6, None, 0, deadline_ns=card.clock.now_ns() + 10**8)
    assert receipt.held
    assert receipt.dropped_moves == 4
    card.verify()


@pytest.mark.parametrize("seed", range(8))
def test_random_pools_lose_nothing_and_keep_their_accounts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    card = Card(Pool(Geometry(1_000_000, PER_GROUP, GROUPS), order=["fullest", "lifo"][seed % 2]), RATES)
    victims, live = mixed(card)
    target, deadline_s = int(rng.integers(0, GROUPS)), float(rng.choice([0.002, 0.01, 0.05, 0.2]))
    shrinker = Shrinker(card.pool, card, card.clock, rates=RATES)
    deadline_ns = card.clock.now_ns() + round(deadline_s * 1e9)
    receipt = shrinker.shrink(target, None, 0, deadline_ns=deadline_ns, idle=victims, running=live)
    card.verify()
    assert receipt.held is (receipt.mapped_groups == target and receipt.took_s <= deadline_s)
    assert receipt.took_s <= deadline_s + 1e-9, "rates are exact here, so nothing is begun that ends too late"
