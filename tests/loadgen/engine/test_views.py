"""What a fleet tells of one worker: sessions on the card and off it, the link, the queue, its prefill rate."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.metrics import COLUMN
from tests.loadgen.engine.tables import empty_table, one_session, plain


def _away(think_s: float = 200.0, sessions: int = 5) -> Fleet:
    """Sessions that ended their first turn half a second apart, all swapped out."""
    table = one_session(2, 4000, think_s=think_s, sessions=sessions)
    fleet = Fleet(FleetConfig(mode=EngineMode(prefetch=False)), [table, empty_table()])
    fleet.advance(20.0)
    fleet.evict_sessions(0, np.arange(sessions))
    fleet.advance()
    return fleet


def test_idle_sessions_tell_what_computing_them_again_would_prefill() -> None:
    fleet = Fleet(FleetConfig(), [one_session(2, 4000, output=50, think_s=60.0), empty_table()])
    fleet.advance(10.0)
    (one,) = fleet.snapshot(0).idle
    assert one.tokens == one.blocks * 16 == 4048, "no block is taken for the last token, whose KV is never computed"


def test_sessions_off_the_card_are_listed_by_when_they_are_expected() -> None:
    fleet = _away()
    found = fleet.away(0, 1e9)
    due = fleet.state.sequence["due"][[one.sequence for one in found]]
    back = [one.expected_return_s for one in found]
    assert sorted(one.sequence for one in found) == [0, 1, 2, 3, 4]
    assert back == pytest.approx(due - fleet.t_s)
    assert [abs(one) for one in back] == sorted(abs(one) for one in back), "nearest to its time first"
    assert all(one.host_tokens in (4048, 4049) and one.host_blocks == -(-one.host_tokens // 16) for one in found)
    near = sorted(back)[2]
    assert {one.sequence for one in fleet.away(0, near)} == {
        one.sequence for one in found if one.expected_return_s <= near
    }
    assert fleet.away(1, 1e9) == (), "the neighbour has none"


def test_overdue_sessions_are_listed_with_a_time_below_zero() -> None:
    fleet = _away()
    fleet.advance(100.0)
    assert fleet.away(0, 0.0), "30 s were expected of a chat nobody knows"
    assert all(one.expected_return_s < 0 for one in fleet.away(0, 0.0))


def test_sessions_that_come_back_or_are_in_a_transfer_are_not_away() -> None:
    fleet = _away()
    fleet.prefetch_sessions(0, [2])
    assert 2 not in {one.sequence for one in fleet.away(0, 1e9)}
    fleet.advance(400.0)
    assert fleet.done
    assert fleet.away(0, 1e9) == ()


def test_at_most_256_sessions_are_listed() -> None:
    table = one_session(2, 200, think_s=500.0, sessions=300, apart_s=0.02)
    fleet = Fleet(FleetConfig(mode=EngineMode(prefetch=False)), [table, empty_table()])
    fleet.advance(60.0)
    assert (fleet.evict_sessions(0, np.arange(300)) > 0).all()
    fleet.advance(10.0)
    assert len(fleet.away(0, 1e9)) == 256


def test_a_snapshot_tells_what_the_whole_card_queued_on_the_link() -> None:
    table = one_session(2, 4000, think_s=60.0, sessions=2)
    fleet = Fleet(FleetConfig(link_bytes_per_s=50e6), [table, table])
    fleet.advance(10.0)
    assert fleet.snapshot(0).link_backlog_bytes == 0
    started = fleet.evict_sessions(0, [0, 1]).sum() + fleet.evict_sessions(1, [2]).sum()
    assert fleet.snapshot(0).link_backlog_bytes == fleet.snapshot(1).link_backlog_bytes == started
    fleet.advance(2.0)
    assert fleet.snapshot(0).link_backlog_bytes == pytest.approx(started - 100e6, abs=1)


def test_a_snapshot_tells_how_many_wait() -> None:
    fleet = Fleet(FleetConfig(), [plain([0.0] * 50), empty_table()])
    fleet.command(max_running=4)
    fleet.advance(0.2)
    assert fleet.snapshot(0).waiting == fleet.metrics()[0, COLUMN["waiting"]] == 46


def test_views_do_not_change_as_time_goes_on() -> None:
    fleet = _away()
    before = fleet.sessions(0)
    kept = before.blocks.copy(), before.lane.copy()
    fleet.prefetch_sessions(0, np.arange(5))
    fleet.advance()
    assert (before.blocks == kept[0]).all()
    assert (before.lane == kept[1]).all()


@pytest.mark.parametrize("card", ["A100-80G", "H200-141G"])
def test_the_prefill_rate_is_what_the_engine_does(card: str) -> None:
    """Prompts of one chunk, one output token each, more than it can compute."""
    table = plain(np.arange(1500) * 0.01, prompt=2048, output=1, max_tokens=1)
    fleet = Fleet(FleetConfig(card=card, client_timeouts=False), [table, empty_table()])
    fleet.advance(8.0)  # by then it has mapped what it may
    before = fleet.metrics()[0, COLUMN["prompt_tokens"]]
    fleet.advance(6.0)
    rate = (fleet.metrics()[0, COLUMN["prompt_tokens"]] - before) / 6.0
    assert fleet.snapshot(0).waiting > 0
    assert fleet.prefill_tokens_per_s(0) == pytest.approx(rate, rel=0.03)
