"""Costs charged honestly: mapping, unmapping, the guard, failed transfers, silent ends, and neighbours that wait."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import CARDS, EngineMode, FleetConfig
from schemas.metrics import COLUMN
from services.errors import UserError
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import empty_table, one_session, plain, random_table

GROUP_8B = 128 * 2**20


def test_failed_transfers_are_repeated_and_cost_their_time() -> None:
    loaded = {}
    for share in (0.0, 0.4):
        table = one_session(6, first_prompt=4000, think_s=12.0, sessions=10, apart_s=3.0)
        fleet = Fleet(FleetConfig(transfer_failures=share, link_bytes_per_s=2e9), [table, empty_table()])
        moved = 0.0
        for _ in range(60):
            fleet.command(evict_bytes=2e9)
            fleet.advance(2.0)
            moved += fleet.metrics()[0, COLUMN["link_used_bytes_per_s"]] * 2.0
        done = float(fleet.state.worker["evicted_bytes"][0] + fleet.state.worker["loaded_bytes"][0])
        assert done > 0
        loaded[share] = moved / done
        card = fleet.state.card[0]
        assert (card["failed"] > 0) == (share > 0)
        assert card["failed"] / card["transfers"] == pytest.approx(share, abs=0.15)
        check_accounts(fleet)
    assert loaded[0.4] > 1.3 * loaded[0.0]


def test_a_share_of_failures_that_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="transfer_failures"):
        Fleet(FleetConfig(transfer_failures=1.0), [empty_table()] * 2)


def test_ended_sessions_stay_idle_when_nobody_says_so_and_give_way_when_memory_is_needed() -> None:
    table = plain(np.arange(200) * 0.5, prompt=2000, output=50)
    fleets = {silent: Fleet(FleetConfig(silent_ends=silent), [table, empty_table()]) for silent in (False, True)}
    for fleet in fleets.values():
        fleet.advance(90.0)
        check_accounts(fleet)
    told, silent = (fleets[one].metrics()[0] for one in (False, True))
    assert told[COLUMN["idle_sessions"]] == 0
    assert silent[COLUMN["idle_sessions"]] > 50
    assert silent[COLUMN["preemptions"]] == 0
    assert silent[COLUMN["finished"]] == told[COLUMN["finished"]], "dropping what has ended costs nobody anything"


def test_a_host_tier_gives_up_who_stays_away_for_long() -> None:
    table = plain(np.arange(20) * 0.2, prompt=2000, output=20)
    fleet = Fleet(FleetConfig(silent_ends=True), [table, empty_table()])
    fleet.advance(12.0)
    fleet.command(evict_bytes=1e12)
    fleet.advance(4.0)
    assert fleet.metrics()[0, COLUMN["swapped"]] == 20
    fleet.advance(400.0)
    assert fleet.metrics()[0, COLUMN["host_used_bytes"]] == 0
    check_accounts(fleet)


def test_memory_taken_from_a_neighbour_costs_the_taker_guard_unmap_and_map() -> None:
    fleet = Fleet(
        FleetConfig(guard_s=0.5, premapped_groups=0), [random_table(np.random.default_rng(1), 2.0, 20.0, 2.0)] * 2
    )
    cheap = Fleet(
        FleetConfig(guard_s=0.0, premapped_groups=0), [random_table(np.random.default_rng(1), 2.0, 20.0, 2.0)] * 2
    )
    for one in (fleet, cheap):
        one.advance(20.0)
    assert fleet.results().produced_tokens.sum() < cheap.results().produced_tokens.sum(), "waiting for the owner"
    assert CARDS["A100-80G"].unmap_page_s == 26e-6


def test_compaction_gives_a_waiting_neighbour_of_another_model_its_memory() -> None:
    """The 8B tenant has spread over the card and shrunk to holes; the 14B tenant's prompts wait for page groups."""
    rng = np.random.default_rng(5)
    spread = random_table(rng, 6.0, 60.0, 2.0)
    waiter = plain([62.0] * 12, prompt=9000, output=200)
    got = {}
    for compacts in (False, True):
        config = FleetConfig(model=("Llama-3.1-8B", "Qwen2.5-14B"), mode=EngineMode(), client_timeouts=False)
        fleet = Fleet(config, [spread, waiter])
        fleet.command(rho=1.6)
        fleet.advance(62.0)
        for _ in range(4):
            if compacts:
                fleet.command(compact_bytes=[4e9, 0.0])
            fleet.advance(2.0)
            check_accounts(fleet)
        got[compacts] = fleet.metrics()[1, COLUMN["kv_mapped_bytes"]]
        if compacts:
            assert fleet.effects().groups_freed[0] > 0
    assert got[True] >= got[False]
