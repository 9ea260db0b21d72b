"""The reclaim benchmark: its keys, and what must hold between methods and references on any demand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadgen.bench import reclaim
from loadgen.bench.reclaim_arena import PoolArena
from loadgen.bench.reclaim_card import Card
from loadgen.bench.reclaim_engine import BLOCK_TOKENS, Engine
from loadgen.bench.reclaim_methods import METHODS, Clocks, Host
from loadgen.bench.reclaim_run import CARD, GIVEN_BYTES, MODEL, Run, Setup, run_method, run_reference
from loadgen.bench.reclaim_tenants import TENANTS, Demand, Idle, demand
from loadgen.engine.calibration import coefficients
from services.errors import UserError

SECONDS = 90.0
LOAD = 0.8
IDLE_GROUPS = 4
BY_NAME = {method.name: method for method in METHODS}


@pytest.fixture(scope="module")
def setup() -> Setup:
    """Three tenants on a card with 400 of its 712 page groups, so that memory is short after half a minute."""
    setup = Setup(TENANTS[:3], reclaim.RESERVE_GROUPS)
    setup.capacity_groups = 400
    return setup


def _asked(setup: Setup, load: float, seed: int) -> Demand:
    return demand(setup.specs, SECONDS, 20.0, GIVEN_BYTES / setup.model.kv_bytes_per_token, load, seed)


@pytest.fixture(scope="module")
def runs(setup: Setup) -> dict[str, Run]:
    """All methods on one demand; the accounts are verified every second."""
    asked = _asked(setup, LOAD, 3)
    return {
        name: run_method(setup, asked, method, "fullest", SECONDS, check_every=10) for name, method in BY_NAME.items()
    }


def _given_s(run: Run) -> list[float]:
    return [max(want.ready_s) - want.asked_s if len(want.ready_s) >= want.groups else math.inf for want in run.wants]


def test_compaction_and_eviction_is_never_slower_than_waiting(runs: dict[str, Run]) -> None:
    waiting, best = _given_s(runs["wait_only"]), _given_s(runs["compaction_eviction"])
    assert len(waiting) == len(best) > 2
    # The demand is one, but what runs at a shift differs between the runs by what was admitted before.
    assert sorted(best)[len(best) // 2] <= sorted(waiting)[len(waiting) // 2]
    assert max(best) <= max(waiting)


def test_nothing_is_given_faster_than_it_can_be_mapped(runs: dict[str, Run], setup: Setup) -> None:
    groups = setup.geometry.groups_for(math.ceil(GIVEN_BYTES / setup.geometry.block_bytes))
    least_s = (groups - setup.reserve_groups) * setup.costs.map_group_s
    for name, run in runs.items():
        assert min(_given_s(run)) >= least_s - 1e-6, f"{name}: mapping is serial, the reserve hides its own part alone"


def test_with_compaction_no_more_is_sent_away_than_is_freed(runs: dict[str, Run], setup: Setup) -> None:
    account = runs["compaction_eviction"].account
    freed_blocks = account.freed_groups * setup.blocks_per_group
    assert account.evicted_blocks <= freed_blocks, "the holes come first, and only the deficit is evicted"


def test_footprints_are_not_below_the_packed_floor(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert (run.in_use >= 1.0).all()
        assert (run.unreserved >= run.in_use).all()
        assert (run.mapped >= run.unreserved).all()
        assert ((run.stranded >= 0.0) & (run.stranded < 1.0)).all()


def test_only_compacting_methods_move_and_only_evicting_ones_evict(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        assert bool(run.account.moved_blocks) == BY_NAME[name].compaction, name
        assert bool(run.account.evicted_blocks) == (BY_NAME[name].eviction != "none"), name


def test_perfect_packing_bounds_goodput_and_waits(setup: Setup) -> None:
    asked = _asked(setup, 0.45, 1)
    perfect = reclaim._service([run_reference(setup, asked, None, SECONDS)], SECONDS)
    static = reclaim._service([run_reference(setup, asked, (1 / 3,) * 3, SECONDS)], SECONDS)
    run = run_method(setup, asked, BY_NAME["compaction_eviction"], "fullest", SECONDS)
    best = reclaim._service([run], SECONDS)
    for other in (static, best):
        # Other batches form when memory comes at other instants: the bound holds up to that noise.
        assert other["goodput_tokens_per_s"] <= 1.03 * perfect["goodput_tokens_per_s"]
        assert other["wait_s"]["p99"] >= 0.9 * perfect["wait_s"]["p99"]


def test_every_request_ends_waits_or_runs_and_every_turn_is_counted_once(setup: Setup) -> None:
    asked = _asked(setup, LOAD, 3)
    run = run_reference(setup, asked, None, SECONDS)
    for sessions, results in zip(asked.sessions, run.results, strict=True):
        turns = sum(len(session.turns) for session in sessions)
        assert results.met <= results.finished <= turns
        assert results.finished + results.gave_up <= turns
        assert results.good_tokens <= results.tokens


@pytest.mark.parametrize("name", ["lru_eviction", "page_aware_eviction", "compaction_eviction"])
def test_every_evicting_method_refills_a_reserve_by_one_rule(setup: Setup, name: str) -> None:
    card = _full_card(setup, name)
    donor = card.arenas[0]
    held = donor.occupied()
    card.step(0.1, 0.02)
    assert donor.occupied() == held, "between two control instants a reserve evicts nothing"
    card.step(2.0, 0.02)
    short = setup.reserve_groups * setup.blocks_per_group
    assert held - donor.occupied() == short, "no more is evicted than the reserve lacks"
    card.step(2.1, 0.02)  # the second half is mapped
    card.step(4.0, 0.02)
    assert card.reserve[1] == setup.reserve_groups
    assert held - donor.occupied() == short, "and nothing once it is full"
    card.check()


def test_methods_that_do_not_evict_leave_a_reserve_empty_on_a_full_card(setup: Setup) -> None:
    for name in ("wait_only", "compaction"):
        card = _full_card(setup, name)
        held = card.arenas[0].occupied()
        for at_s in (0.1, 2.0, 4.0):
            card.step(at_s, 0.02)
        assert card.reserve[1] == 0, name
        assert card.arenas[0].occupied() == held, name


def test_empty_groups_fill_the_reserves_and_what_nobody_needs_goes_back_to_the_card(setup: Setup) -> None:
    card = _full_card(setup, "wait_only")
    for session in range(5):
        del card.engines[0].idle[session]
        card.arenas[0].drop(session)
    card.step(0.1, 0.02)
    card.step(0.3, 0.02)
    card.step(0.5, 0.02)
    assert card.reserve[:2] == [setup.reserve_groups] * 2, "the tenant's own first, then its neighbour's"
    assert card.free_groups == 5 * IDLE_GROUPS - 2 * setup.reserve_groups
    card.check()


def _full_card(setup: Setup, name: str) -> Card:
    """Two tenants at rest; the first one's idle sessions, of IDLE_GROUPS whole groups each, hold the card."""
    arenas = [PoolArena(setup.geometry, "fullest") for _ in range(2)]
    engines = [Engine(number, TENANTS[number], coefficients(CARD, MODEL), arenas[number], ()) for number in range(2)]
    sessions = setup.capacity_groups // IDLE_GROUPS
    card = Card(
        engines, arenas, BY_NAME[name], setup.costs, sessions * IDLE_GROUPS, setup.reserve_groups,
        setup.model.kv_bytes_per_token, Host(setup.host_tokens),
    )  # fmt: skip
    arenas[0].map(card.free_groups)
    card.free_groups = 0
    blocks = IDLE_GROUPS * setup.blocks_per_group
    for session in range(sessions):
        arenas[0].take(session, blocks)
        arenas[0].rest(session)
        engines[0].idle[session] = Idle(blocks, blocks * BLOCK_TOKENS, 0.0)
    return card


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reclaim, "METHODS", (BY_NAME["compaction_eviction"],))
        patch.setattr(reclaim, "ORDERS", ("fullest",))
        patch.setattr(reclaim, "TUNING_SEEDS", (0,))
        return reclaim.bench_reclaim(tenants=(3,), seeds=(5,), seconds=200.0, processes=1)


def test_the_report_has_the_documented_keys(report: dict[str, Any]) -> None:
    case = report["cases"]["3"]
    row = case["methods"]["fullest"]["compaction_eviction"]
    assert {
        "stranded_share",
        "footprint",
        "footprint_less_reserve",
        "footprint_in_use",
        "give_10gb_s",
        "first_1gb_s",
        "moved_per_byte_freed",
        "evicted_per_byte_freed",
        "goodput_tokens_per_s",
        "wait_s",
        "goodput_over_static",
        "goodput_over_perfect",
    } <= set(row)
    assert set(row["footprint"]) == {"mean", "p50", "p99"}
    for reference in reclaim.REFERENCES:
        assert {"goodput_tokens_per_s", "wait_s"} <= set(case[reference])
    assert sum(case["static_shares"]) == pytest.approx(1.0, abs=0.01)
    assert set(case["numbers"]["give_10gb_p50_s"]) == {"found", "limit", "met"}


def test_the_report_and_its_table_state_both_sets_of_seeds(report: dict[str, Any]) -> None:
    assert report["seeds"] == {"tuning": [0], "reporting": [5]}
    lines = reclaim.table(report).splitlines()
    assert "tuned on seeds 0; figures of seeds 5, pooled" in lines
    assert max(map(len, lines)) <= 80


def test_one_seed_gives_one_answer(setup: Setup) -> None:
    asked = _asked(setup, LOAD, 5)
    first, again = (run_method(setup, asked, BY_NAME["compaction_eviction"], "fullest", SECONDS) for _ in range(2))
    assert first.results == again.results
    assert first.wants == again.wants
    assert first.account == again.account


def test_impossible_numbers_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="--tenants: found 5, expected 2 to 4"):
        reclaim.bench_reclaim(tenants=(5,))
    with pytest.raises(UserError, match="--seconds"):
        reclaim.bench_reclaim(seconds=1.0)


@pytest.mark.parametrize("seeds", [(), (7, 7), (-1,), (201, reclaim.TUNING_SEEDS[0])])
def test_no_figures_on_seeds_that_the_rules_were_tuned_on(seeds: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="--seeds"):
        reclaim.bench_reclaim(seeds=seeds)


def test_clock_charges_each_resource_one_thing_after_another(setup: Setup) -> None:
    clocks = Clocks(setup.costs)
    first, second = clocks.mapped(1.0), clocks.mapped(0.0)
    assert first == pytest.approx(1.0 + 64 * 229e-6), "64 pages of 2 MiB at 193 + 36 us"
    assert second == pytest.approx(first + 64 * 229e-6), "it waits for the first"
    assert clocks.unmapped(0.0) == pytest.approx(64 * 26e-6), "unmapping goes on beside mapping"
