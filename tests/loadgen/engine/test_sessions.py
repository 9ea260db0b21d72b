"""Conversations between turns: reuse on the card, eviction by copying, loading, recomputing, prefetch."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.classes import ServiceClass
from schemas.metrics import COLUMN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import empty_table, one_session

PROMPT, ADDED, OUTPUT = 4000, 100, 50
LAST = 2.1
"""Tokens at the end of a turn that the next one computes: the last one never is in the same turn."""


def _fleet(table_turns: int = 2, *, mode: EngineMode | None = None, **config: object) -> Fleet:
    table = one_session(table_turns, PROMPT, ADDED, OUTPUT, think_s=30.0)
    kept = FleetConfig(mode=mode or EngineMode(prefetch=False), **config)  # type: ignore[arg-type]
    return Fleet(kept, [table, empty_table()])


def _computed(fleet: Fleet) -> float:
    return float(fleet.state.worker["prompt_tokens"][0])


def test_second_turn_computes_only_what_is_new() -> None:
    fleet = _fleet()
    fleet.advance(10.0)
    row = fleet.metrics()[0]
    assert row[COLUMN["idle_sessions"]] == 1
    assert row[COLUMN["kv_idle_bytes"]] == row[COLUMN["kv_bytes"]] > 0
    fleet.advance(60.0)
    assert fleet.done
    assert _computed(fleet) == pytest.approx(PROMPT + ADDED, abs=LAST)


def test_eviction_frees_the_card_only_when_the_copy_is_done() -> None:
    fleet = _fleet(link_bytes_per_s=100e6)
    fleet.advance(10.0)
    held = fleet.metrics()[0, COLUMN["kv_bytes"]]
    fleet.command(evict_bytes=1.0)
    fleet.advance(2.0)
    row = fleet.metrics()[0]
    assert row[COLUMN["kv_bytes"]] == held, "the copy takes five seconds"
    assert row[COLUMN["host_used_bytes"]] == held, "host space is taken when the copy starts"
    assert row[COLUMN["link_used_bytes_per_s"]] == pytest.approx(100e6)
    assert fleet.snapshot(0).blocks_in_transfer == fleet.snapshot(0).blocks_idle > 0
    assert fleet.effects().evicted_bytes[0] == 0
    fleet.advance(6.0)
    row = fleet.metrics()[0]
    assert row[COLUMN["kv_bytes"]] == 0
    assert row[COLUMN["swapped"]] == 1
    assert fleet.effects().evicted_bytes[0] == held
    check_accounts(fleet)


def test_a_session_that_returns_calls_its_eviction_off() -> None:
    fleet = _fleet(link_bytes_per_s=10e6)
    fleet.advance(20.0)
    fleet.command(evict_bytes=1.0)
    fleet.advance(60.0)
    assert fleet.done
    assert _computed(fleet) == pytest.approx(PROMPT + ADDED, abs=LAST), "its KV never left"
    assert fleet.state.worker["evicted_bytes"][0] == 0


def test_an_evicted_session_is_loaded_back_over_the_link() -> None:
    fleet = _fleet()
    fleet.advance(10.0)
    fleet.command(evict_bytes=1.0)
    fleet.advance(90.0)
    assert fleet.done
    assert fleet.state.worker["loaded_bytes"][0] > 0
    assert _computed(fleet) == pytest.approx(PROMPT + ADDED, abs=LAST)


def test_a_load_slower_than_its_patience_is_recomputed_instead() -> None:
    fleet = _fleet(link_bytes_per_s=150e6)
    fleet.advance(10.0)
    fleet.command(evict_bytes=1.0)
    fleet.advance(90.0)
    assert fleet.done
    assert fleet.state.worker["loaded_bytes"][0] == 0
    assert _computed(fleet) == pytest.approx(2 * PROMPT + ADDED + OUTPUT)


def test_prefetch_brings_a_session_back_before_it_returns() -> None:
    first, later = {}, {}
    for prefetch in (False, True):
        table = one_session(4, 20_000, ADDED, OUTPUT, think_s=30.0)
        config = FleetConfig(mode=EngineMode(prefetch=prefetch), link_bytes_per_s=2e9)
        fleet = Fleet(config, [table, empty_table()])
        for _ in range(150):
            fleet.command(evict_bytes=np.where(fleet.state.worker["arrived"] < 4, 1.0, 0.0))
            fleet.advance(2.0)
        results = fleet.results()
        assert fleet.done
        ttft = results.first_token_s - results.arrival_s
        first[prefetch], later[prefetch] = ttft[0], ttft[3]
    assert first[True] == first[False]
    assert later[False] > 1.0, "20,000 tokens over 2 GB/s take 1.3 s"
    assert later[True] < 0.5, "by then the estimate of its thinking is good enough"


@pytest.mark.parametrize("kind", [ServiceClass.COPILOT, ServiceClass.TRAINING])
def test_classes_that_forbid_swap_are_never_evicted(kind: ServiceClass) -> None:
    table = one_session(3, think_s=30.0, kind=kind, sessions=5)
    for offload in (False, True):
        fleet = Fleet(FleetConfig(mode=EngineMode(offload=offload)), [table, empty_table()])
        for _ in range(60):
            fleet.command(evict_bytes=1e12)
            fleet.advance(2.0)
        assert fleet.done
        assert fleet.state.worker["evicted_bytes"].sum() == 0
        assert fleet.state.card["moved"].sum() == 0


def test_sessions_are_left_alone_for_some_seconds_after_a_turn() -> None:
    fleet = _fleet()
    while fleet.metrics()[0, COLUMN["idle_sessions"]] == 0:
        fleet.advance(0.1)
    fleet.command(evict_bytes=1e12)
    assert fleet.effects().evict_started_bytes[0] == 0, "chat: not within 5 s"
    fleet.advance(6.0)
    fleet.command(evict_bytes=1e12)
    assert fleet.effects().evict_started_bytes[0] > 0


def test_a_full_host_tier_ends_eviction() -> None:
    table = one_session(2, think_s=60.0, sessions=20)
    fleet = Fleet(FleetConfig(host_bytes_per_card=2e9), [table, empty_table()])
    fleet.advance(30.0)
    fleet.command(evict_bytes=1e12)
    fleet.advance(2.0)
    row = fleet.metrics()[0]
    assert 1e9 < row[COLUMN["host_used_bytes"]] <= 2e9
    assert row[COLUMN["idle_sessions"]] > 10, "what does not fit stays on the card"


def test_offload_copies_turns_as_they_end_and_drops_from_the_card_for_free() -> None:
    fleet = _fleet(mode=EngineMode(admission="physical", offload=True))
    fleet.advance(10.0)
    session = fleet.snapshot(0).idle[0]
    assert session.copied
    assert fleet.metrics()[0, COLUMN["kv_bytes"]] > 0


def test_expected_return_follows_the_session() -> None:
    fleet = _fleet(5)
    fleet.advance(5.0)
    guess = fleet.snapshot(0).idle[0]
    fleet.advance(100.0)
    known = fleet.snapshot(0).idle[0]
    due = known.idle_since_s + 30.0
    assert abs(fleet.t_s + known.expected_return_s - due) < 6.0, "three pauses of 30 s were seen"
    assert guess.expected_return_s > 0


def test_without_offload_memory_pressure_drops_the_least_recently_used() -> None:
    table = one_session(2, 60_000, think_s=300.0, sessions=4, apart_s=40.0)
    fleet = Fleet(FleetConfig(mode=EngineMode(admission="physical"), client_timeouts=False), [table, empty_table()])
    fleet.advance(200.0)
    kept = [int(fleet.state.sequence[one.sequence]["request"]) // 2 for one in fleet.snapshot(0).idle]
    assert kept == [1, 2, 3] or kept == [2, 3], f"the oldest went first, kept {kept}"
    check_accounts(fleet)
