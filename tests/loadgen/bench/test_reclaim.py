"""The reclaim benchmark: its keys, and what must hold between methods and references on any demand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from loadgen.bench import reclaim
from loadgen.bench.reclaim_clock import Clocks
from loadgen.bench.reclaim_methods import METHODS
from loadgen.bench.reclaim_run import GIVEN_BYTES, Run, Setup, run_method, run_reference
from loadgen.bench.reclaim_tenants import TENANTS, demand
from services.errors import UserError

SECONDS = 120.0
LOAD = 0.7
BY_NAME = {method.name: method for method in METHODS}


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(TENANTS, reclaim.RESERVE_GROUPS)


@pytest.fixture(scope="module")
def runs(setup: Setup) -> dict[str, Run]:
    """The methods that are compared, on one demand; the accounts are verified every second."""
    asked = demand(setup.specs, SECONDS, 20.0, GIVEN_BYTES / setup.model.kv_bytes_per_token, LOAD, 3)
    return {
        name: run_method(setup, asked, BY_NAME[name], "fullest", SECONDS, check_every=10)
        for name in ("wait_only", "lru_eviction", "page_aware_eviction", "compaction_eviction")
    }


def _given_s(run: Run) -> list[float]:
    assert run.card is not None
    wants = sorted(run.card.done + run.card.wants, key=lambda want: want.asked_s)
    return [max(want.ready_s) - want.asked_s if len(want.ready_s) >= want.groups else math.inf for want in wants]


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
    card = runs["compaction_eviction"].card
    assert card is not None
    freed_blocks = card.account.freed_groups * setup.blocks_per_group
    assert card.account.evicted_blocks <= freed_blocks, "the holes come first, and only the deficit is evicted"


def test_footprints_are_not_below_the_packed_floor(runs: dict[str, Run]) -> None:
    for run in runs.values():
        assert (run.footprint >= 1.0).all()
        assert (run.mapped >= run.footprint).all()
        assert (run.reserved >= run.mapped).all()
        assert ((run.stranded >= 0.0) & (run.stranded < 1.0)).all()


def test_only_compacting_methods_move_and_only_evicting_ones_evict(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        assert run.card is not None
        assert bool(run.card.account.moved_blocks) == BY_NAME[name].compaction, name
        assert bool(run.card.account.evicted_blocks) == (BY_NAME[name].eviction != "none"), name


def test_perfect_packing_bounds_goodput_and_waits(setup: Setup) -> None:
    asked = demand(setup.specs, SECONDS, 20.0, GIVEN_BYTES / setup.model.kv_bytes_per_token, 0.45, 1)
    perfect = reclaim._goodput(run_reference(setup, asked, None, SECONDS), SECONDS)
    static = reclaim._goodput(run_reference(setup, asked, (0.25,) * 4, SECONDS), SECONDS)
    run = run_method(setup, asked, BY_NAME["compaction_eviction"], "fullest", SECONDS)
    best = reclaim._goodput(run, SECONDS)
    for other in (static, best):
        # Other batches form when memory comes at other instants: the bound holds up to that noise.
        assert other["goodput_tokens_per_s"] <= 1.03 * perfect["goodput_tokens_per_s"]
        assert other["wait_s"]["p99"] >= 0.9 * perfect["wait_s"]["p99"]


def test_every_request_ends_waits_or_runs_and_every_turn_is_counted_once(setup: Setup) -> None:
    asked = demand(setup.specs, SECONDS, 20.0, 76_000, LOAD, 3)
    run = run_reference(setup, asked, None, SECONDS)
    for sessions, results in zip(asked.sessions, run.results, strict=True):
        turns = sum(len(session.turns) for session in sessions)
        assert results.met <= results.finished <= turns
        assert results.finished + results.gave_up <= turns
        assert results.good_tokens <= results.tokens


def test_one_seed_gives_one_answer_under_the_documented_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reclaim.ORDERS == ("lifo", "fullest")
    monkeypatch.setattr(reclaim, "METHODS", (BY_NAME["compaction_eviction"],))
    monkeypatch.setattr(reclaim, "ORDERS", ("fullest",))
    first = reclaim.bench_reclaim(seed=5, seconds=100.0, tenants=2)
    again = reclaim.bench_reclaim(seed=5, seconds=100.0, tenants=2)
    assert _without_cpu(first) == _without_cpu(again)
    row = first["methods"]["fullest"]["compaction_eviction"]
    assert {
        "stranded_share",
        "footprint",
        "footprint_mapped",
        "footprint_with_reserve",
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
    assert sum(first["static"]["shares"]) == pytest.approx(1.0, abs=0.01)
    assert set(first["numbers"]["give_10gb_p50_s"]) == {"found", "limit", "met"}


def test_impossible_numbers_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="--tenants: found 5, expected 2 to 4"):
        reclaim.bench_reclaim(tenants=5)
    with pytest.raises(UserError, match="--seconds"):
        reclaim.bench_reclaim(seconds=1.0)


def test_clock_charges_each_resource_one_thing_after_another(setup: Setup) -> None:
    clocks = Clocks(setup.costs)
    first, second = clocks.mapped(1.0), clocks.mapped(0.0)
    assert first == pytest.approx(1.0 + 64 * 229e-6), "64 pages of 2 MiB at 193 + 36 us"
    assert second == pytest.approx(first + 64 * 229e-6), "it waits for the first"
    assert clocks.unmapped(0.0) == pytest.approx(64 * 26e-6), "unmapping goes on beside mapping"


def _without_cpu(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "cpu_s"}
