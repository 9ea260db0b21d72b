"""One owner of a limit: restarts told from rivals, raises verified, never beyond the pool."""

from __future__ import annotations

import pytest

from services.actuator.engines.kvcached.contest import ContestRule
from services.actuator.engines.kvcached.limits import Limits
from services.clock import ManualClock
from services.errors import SegmentError
from services.kvsegment import read_usage
from tests.services.actuator.engines.kvcached.conftest import POOL, Played
from tests.services.actuator.engines.kvcached.player import PAGE

S = 1_000_000_000


def limits_of(played: Played, clock: ManualClock | None = None) -> Limits:
    limits = Limits(played.path, clock or ManualClock(), ContestRule(3, 60.0))
    limits.begin()
    return limits


def test_a_limit_is_set_once_and_a_repeat_writes_nothing(played: Played) -> None:
    limits = limits_of(played)
    first = limits.set(8 * PAGE)
    again = limits.set(8 * PAGE)
    assert (first.revision, again.revision, again.usage.limit_bytes) == (1, 1, 8 * PAGE)
    limits.end()


def test_no_limit_goes_beyond_the_engines_pool(played: Played) -> None:
    limits = limits_of(played)
    limits.set(4 * PAGE)
    assert limits.set(2 * POOL).usage.limit_bytes == POOL, "kvcached would hand out pages without addresses"
    limits.end()


def test_the_next_owner_knows_the_pool_though_it_finds_a_lowered_limit(played: Played) -> None:
    first = limits_of(played)
    first.set(4 * PAGE)
    first.end()
    second = limits_of(played)
    assert second.set(2 * POOL).usage.limit_bytes == POOL
    second.end()


def test_two_owners_are_not_possible(played: Played) -> None:
    first, second = limits_of(played), Limits(played.path, ManualClock())
    with pytest.raises(SegmentError, match="owned"):
        second.begin()
    with pytest.raises(SegmentError, match="owned"):
        second.set(PAGE)
    first.end()


def test_another_writer_is_answered_twice_and_then_no_more(played: Played) -> None:
    clock = ManualClock()
    limits = limits_of(played, clock)
    played.say("alloc 1")
    limits.set(8 * PAGE)
    for second in (1, 2):
        played.say(f"kvctl {12 * PAGE}")
        clock.advance_to(second * S)
        assert limits.set(8 * PAGE).usage.limit_bytes == 8 * PAGE, "one change may be an operator's"
    played.say(f"kvctl {12 * PAGE}")
    clock.advance_to(3 * S)
    with pytest.raises(SegmentError) as caught:
        limits.set(8 * PAGE)
    assert caught.value.reason == "contested"
    assert f"3 changes by others in 2.0 s, to {12 * PAGE} bytes where {8 * PAGE} was written" in str(caught.value)
    assert read_usage(played.path).limit_bytes == 12 * PAGE, "it stopped writing"
    clock.advance_to(3600 * S)
    with pytest.raises(SegmentError, match="contested"):
        limits.set(8 * PAGE)
    limits.contest.forget()
    assert limits.set(8 * PAGE).usage.limit_bytes == 8 * PAGE, "until an operator says otherwise"
    limits.end()


def test_rare_changes_by_others_are_no_contest(played: Played) -> None:
    clock = ManualClock()
    limits = limits_of(played, clock)
    for minute in range(1, 6):
        limits.set(8 * PAGE)
        played.say(f"kvctl {12 * PAGE}")
        clock.advance_to(minute * 60 * S)
        limits.observe()
    assert not limits.contest.contested
    limits.end()


def test_an_engine_that_starts_anew_is_no_rival(played: Played) -> None:
    limits = limits_of(played)
    for _ in range(4):
        limits.set(8 * PAGE)
        played.say("alloc 3")
        limits.observe()
        played.say("restart")
        limits.observe()
    assert limits.restarts == 4
    assert not limits.contest.contested
    assert limits.set(8 * PAGE).usage.limit_bytes == 8 * PAGE
    limits.end()


def test_an_idle_engine_that_shows_a_smaller_limit_may_have_a_smaller_pool(played: Played) -> None:
    limits = limits_of(played)
    limits.set(8 * PAGE)
    played.say(f"kvctl {4 * PAGE}")
    assert limits.set(8 * PAGE).usage.limit_bytes == 4 * PAGE, "rather too little than pages without addresses"
    assert limits.contest.story().startswith("1 changes by others")
    limits.end()


def test_a_segment_that_vanishes_and_comes_back_is_taken_up_again(played: Played) -> None:
    limits = limits_of(played)
    limits.set(8 * PAGE)
    played.path.unlink()
    with pytest.raises(SegmentError, match="vanished"):
        limits.observe()
    assert limits.last is None, "what was read before says nothing now"
    played.say("alloc 5")  # kvcached makes it anew with its next report of use, with a limit of 0
    assert limits.observe()[:2] == (0, 2 * PAGE)
    assert limits.set(8 * PAGE).usage.limit_bytes == 8 * PAGE
    assert limits.set(2 * POOL).usage.limit_bytes == POOL, "the pool is still known"
    limits.end()


def test_a_killed_engine_leaves_a_segment_that_still_reads(played: Played) -> None:
    limits = limits_of(played)
    played.say("alloc 5")
    played.kill()
    assert limits.observe().used_bytes == 2 * PAGE
    limits.end()


def test_a_raise_is_pending_until_use_goes_above_the_former_limit(played: Played) -> None:
    clock = ManualClock()
    limits = limits_of(played, clock)
    limits.set(4 * PAGE)
    played.say("alloc 16")
    assert limits.verify_growth(0) == "none"
    assert limits.set(6 * PAGE).raised
    assert limits.verify_growth(3) == "pending"
    assert played.say("alloc 3").startswith("ok 5 6")
    limits.observe()
    assert limits.verify_growth(3) == "taken"
    assert limits.verify_growth(3) == "none"
    limits.end()


def test_a_raise_that_nobody_takes_though_requests_wait_is_told(played: Played) -> None:
    clock = ManualClock()
    limits = limits_of(played, clock)
    limits.set(4 * PAGE)
    limits.set(6 * PAGE)
    clock.advance_to(5 * S)
    limits.observe()
    assert limits.verify_growth(0) == "pending", "nobody needed it"
    assert limits.verify_growth(2) == "not_taken"
    limits.end()
