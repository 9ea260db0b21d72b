"""Sessions by name: swapped out and brought back as told, refused where it would harm, counted when complete."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Lane
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.classes import ServiceClass
from schemas.metrics import COLUMN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import one_session, plain

SESSIONS = 6


def _fleet(kind: ServiceClass = ServiceClass.CHAT, think_s: float = 300.0, **config: object) -> Fleet:
    """Worker 0 with idle sessions of about 4,000 tokens, worker 1 with one; without the engine's own prefetch."""
    tables = [one_session(2, 4000, think_s=think_s, kind=kind, sessions=n) for n in (SESSIONS, 1)]
    mode = config.pop("mode", EngineMode(prefetch=False))
    fleet = Fleet(FleetConfig(mode=mode, **config), tables)  # type: ignore[arg-type]
    fleet.advance(20.0)
    assert fleet.sessions(0).idle.all(), "all have had their first turn"
    return fleet


def test_named_sessions_leave_and_the_others_stay() -> None:
    fleet = _fleet()
    fleet.effects()
    held = fleet.sessions(0).blocks * fleet.metrics()[0, COLUMN["block_bytes"]]
    started = fleet.evict_sessions(0, [4, 1])
    assert started.tolist() == [held[4], held[1]]
    assert fleet.effects().evict_started_bytes[0] == started.sum(), "booked as the engine's own evictions are"
    assert (fleet.sessions(0).lane[[1, 4]] == int(Lane.SWAP_OUT)).all()
    assert fleet.snapshot(0).link_backlog_bytes == started.sum()
    fleet.advance()
    now = fleet.sessions(0)
    assert now.blocks[[1, 4]].sum() == 0
    assert (now.host_blocks[[1, 4]] > 0).all()
    assert now.idle.tolist() == [True, False, True, True, False, True]
    assert fleet.effects().evicted_bytes[0] == started.sum()
    check_accounts(fleet)


def test_only_completed_transfers_count() -> None:
    fleet = _fleet(link_bytes_per_s=200e6)
    fleet.evict_sessions(0, [0, 1])
    fleet.advance()
    assert fleet.sessions(0).copies.tolist() == [0] * SESSIONS, "500 MB take 2.6 s"
    fleet.advance(4.0)
    assert fleet.sessions(0).copies.tolist() == [1, 1, 0, 0, 0, 0]
    fleet.prefetch_sessions(0, [1])
    assert fleet.sessions(0).loads.sum() == 0
    fleet.advance(4.0)
    now = fleet.sessions(0)
    assert now.loads.tolist() == [0, 1, 0, 0, 0, 0]
    assert now.idle[1]
    check_accounts(fleet)


def test_a_session_whose_copy_is_complete_leaves_at_once_and_without_a_transfer() -> None:
    fleet = _fleet(mode=EngineMode(prefetch=False, offload=True))
    assert (fleet.sessions(0).copies == 2).all(), "write-through copies: of the prompt, then of the answer"
    started = fleet.evict_sessions(0, [2])
    assert started[0] > 0
    now = fleet.sessions(0)
    assert (now.blocks[2], now.copies[2], now.lane[2]) == (0, 2, -1)
    assert fleet.snapshot(0).link_backlog_bytes == 0
    check_accounts(fleet)


def test_sessions_that_may_not_leave_are_left_alone() -> None:
    fleet = _fleet()
    assert fleet.evict_sessions(0, [SESSIONS]).tolist() == [0], "the neighbour's"
    assert (fleet.evict_sessions(0, [3, 3]) > 0).tolist() == [True, False], "in a transfer already"
    fleet.advance()
    assert fleet.evict_sessions(0, [3]).tolist() == [0], "not on the card"
    assert (fleet.evict_sessions(1, [SESSIONS]) > 0).all()
    fleet.advance(280.0)
    fleet.advance(0.1)
    while fleet.sessions(0).idle.any():
        fleet.advance(0.1)
    assert fleet.evict_sessions(0, np.arange(SESSIONS)).sum() == 0, "running, or over"
    for kind in (ServiceClass.COPILOT, ServiceClass.TRAINING):
        forbidden = _fleet(kind)
        assert forbidden.evict_sessions(0, np.arange(SESSIONS)).sum() == 0, "its class forbids it"


def test_a_session_whose_turn_waits_does_not_leave() -> None:
    fleet = _fleet(think_s=30.0, client_timeouts=False)
    fleet.state.worker["starting_until"] = np.inf  # nobody is admitted
    fleet.advance(30.0)
    assert fleet.snapshot(0).waiting == SESSIONS
    assert fleet.evict_sessions(0, np.arange(SESSIONS)).sum() == 0
    check_accounts(fleet)


def test_a_full_host_tier_refuses_one_session_and_takes_the_next_that_fits() -> None:
    tables = [one_session(2, 4000, think_s=300.0, sessions=3), plain([])]
    tables[0].prompt_tokens[2] = 40_000
    tables[0].prompt_tokens[3] = tables[0].cached_tokens[3] = 40_050
    fleet = Fleet(FleetConfig(mode=EngineMode(prefetch=False), host_bytes_per_card=1.5e9), tables)
    fleet.advance(30.0)
    assert (fleet.evict_sessions(0, [0, 1, 2]) > 0).tolist() == [True, False, True]
    check_accounts(fleet)


def test_named_sessions_come_back_without_being_due() -> None:
    fleet = _fleet()
    assert fleet.prefetch_sessions(0, [0]).tolist() == [0], "it is on the card"
    fleet.evict_sessions(0, [0, 1])
    fleet.evict_sessions(1, [SESSIONS])
    assert fleet.prefetch_sessions(0, [0]).tolist() == [0], "it is in a transfer"
    fleet.advance()
    assert fleet.prefetch_sessions(0, [SESSIONS]).tolist() == [0], "the neighbour's"
    tokens = {one.sequence: one.host_tokens for one in fleet.away(0, 1e9)}
    started = fleet.prefetch_sessions(0, [0, 1, 0])
    token_bytes = fleet.metrics()[0, COLUMN["kv_bytes_per_token"]]
    assert started.tolist() == [tokens[0] * token_bytes, tokens[1] * token_bytes, 0]
    fleet.advance()
    now = fleet.sessions(0)
    assert now.idle.all()
    assert now.loads.tolist() == [1, 1, 0, 0, 0, 0]
    fleet.advance(400.0)
    assert fleet.prefetch_sessions(0, np.arange(SESSIONS)).sum() == 0, "sessions that are over have no copy"
    check_accounts(fleet)


def test_a_session_does_not_come_back_over_a_queue_or_into_memory_that_is_needed() -> None:
    fleet = _fleet()
    fleet.evict_sessions(0, [0, 1])
    fleet.advance()
    need = int(fleet.sessions(0).host_blocks[0])
    fleet.command(hard_bytes=0.0)
    spare = int(fleet.state.worker[0]["free"]) - int(
        0.05 * fleet.state.worker[0]["q0"] / fleet.state.worker[0]["block_bytes"]
    )
    assert spare < need, "what is left is the share that a prefetch leaves free"
    assert fleet.prefetch_sessions(0, [0]).tolist() == [0]
    fleet.command(hard_bytes=np.inf)
    fleet.state.worker["q_len"][0] += 1
    assert fleet.prefetch_sessions(0, [0]).tolist() == [0], "somebody waits"
    fleet.state.worker["q_len"][0] -= 1
    assert (fleet.prefetch_sessions(0, [0]) > 0).all()
    assert fleet.sessions(0).idle[2:].all(), "nobody gave way"
    check_accounts(fleet)


def test_numbers_outside_the_fleet_are_a_callers_mistake() -> None:
    fleet = _fleet()
    for bad in (-1, SESSIONS + 1):
        for call in (fleet.evict_sessions, fleet.prefetch_sessions):
            with pytest.raises(ValueError, match=f"sequences .{bad}.*0 to {SESSIONS}"):
                call(0, [0, bad])
    assert fleet.sessions(0).lane.max() == -1
