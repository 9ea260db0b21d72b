"""Which sessions leave a worker's card and which come back."""

from __future__ import annotations

import math

import pytest

from schemas.actions import Action
from schemas.classes import ServiceClass
from schemas.engine import AwaySession, Description, IdleSession, Snapshot, SnapshotReply
from services.actuator.account import Account, Known
from services.actuator.effects import EffectSettings
from services.actuator.sessions import DUE_WITHIN_S, LISTED, leaving, question, returning

WORKER = "n0/0/w0"
MB = 10**6
GB = 10**9
SETTINGS = EffectSettings()


def worker(service_class: ServiceClass = ServiceClass.CHAT, **changes: object) -> Known:
    fields: dict[str, object] = {
        "engine": "test", "block_bytes": 2 << 20, "page_group_bytes": 128 << 20, "kv_bytes_per_token": 1 << 17,
        "q0_bytes": 20 * GB, "card_kv_capacity_bytes": 40 * GB, "mapped_bytes": 10 * GB, "floor_bytes": GB,
        "generation": 0, "capabilities": ("sessions", "prefetch"), "link_bytes_per_s": 10e9,
        "prefill_tokens_per_s": 10_000.0,
    }  # fmt: skip
    account = Account()
    account.expect([WORKER])
    return account.describe(WORKER, Description(WORKER, service_class, **(fields | changes)))  # type: ignore[arg-type]


def seen(known: Known, action: Action = Action.EVICT, **changes: object) -> Known:
    """The worker after a snapshot; by default with 10 GB mapped of which 2 GB are free, under a quota of 12 GB."""
    fields: dict[str, object] = {
        "generation": 0, "rho": 1.0, "quota_soft_bytes": 20 * GB, "quota_hard_bytes": 12 * GB, "max_running": 256,
        "live_bytes": 4 * GB, "idle_bytes": 4 * GB, "leaving_bytes": 0, "away_bytes": 0, "returning_bytes": 0,
        "relocating_bytes": 0, "mapped_bytes": 10 * GB, "free_block_bytes": 2 * GB, "floor_bytes": GB,
        "lease_until_ns": 0, "host_free_bytes": 100 * GB,
    }  # fmt: skip
    Account.snapshot(known, SnapshotReply(**(fields | changes)), question(known, action))  # type: ignore[arg-type]
    return known


def idle(
    session: int, size: int = GB, back_s: float = 100.0, idle_s: float = 60.0, copied: bool = False
) -> IdleSession:
    return IdleSession(session, size, idle_s, back_s, copied, size // (1 << 17))


def away(session: int, size: int = GB, back_s: float = 2.0) -> AwaySession:
    return AwaySession(session, size, back_s, size // (1 << 17))


def test_sessions_are_listed_only_where_a_choice_among_them_is_coming() -> None:
    assert question(worker(), Action.EVICT) == Snapshot(LISTED, DUE_WITHIN_S)
    assert question(worker(), Action.HOLD) == Snapshot(0, DUE_WITHIN_S)
    assert question(worker(capabilities=("sessions",)), Action.HOLD) == Snapshot()
    assert question(worker(capabilities=()), Action.EVICT) == Snapshot()
    assert question(worker(prefill_tokens_per_s=0.0), Action.EVICT) == Snapshot(), "nothing to price a choice by"
    for forbidding in (ServiceClass.COPILOT, ServiceClass.TRAINING):
        assert question(worker(forbidding), Action.EVICT) == Snapshot()


def test_the_longest_away_leave_first_and_no_more_than_needed() -> None:
    known = seen(worker(), idle=(idle(1, back_s=20.0), idle(2, back_s=400.0), idle(3, back_s=100.0)))
    assert leaving(known, 1.0 * GB, SETTINGS) == (2,)
    assert leaving(known, 1.5 * GB, SETTINGS) == (2, 3), "sessions are whole"
    assert leaving(known, 9.0 * GB, SETTINGS) == (2, 3, 1)


def test_what_the_host_tier_has_already_leaves_before_what_has_to_be_carried() -> None:
    known = seen(worker(), idle=(idle(1), idle(2, copied=True)), host_free_bytes=0)
    assert leaving(known, 2.0 * GB, SETTINGS) == (2,), "the tier is full: only its copy goes without room"


def test_a_session_is_left_alone_that_was_not_idle_for_long_or_is_back_too_soon() -> None:
    limit_s = 5.0  # of the class
    trip_s = 2 * 1 / 10 + 1.0  # 1 GB out and back at 10 GB/s, and a second
    sessions = (idle(1, idle_s=limit_s - 0.1), idle(2, idle_s=limit_s), idle(3, back_s=trip_s), idle(4, back_s=-3.0))
    assert leaving(seen(worker(), idle=sessions), 9.0 * GB, SETTINGS) == (2,)


def test_what_is_cheaper_to_compute_again_than_to_carry_stays() -> None:
    slow = worker(link_bytes_per_s=50e6)  # 20 s for what a prefill of 0.76 s makes anew
    known = seen(slow, idle=(idle(1, back_s=500.0), idle(2, size=10 * MB, back_s=500.0, copied=True)))
    assert leaving(known, 9.0 * GB, SETTINGS) == (2,)
    assert leaving(seen(slow, idle=(idle(1, back_s=500.0),)), 9.0 * GB, SETTINGS) == ()


def test_a_return_that_nobody_can_tell_is_no_reason_to_stay() -> None:
    known = seen(worker(), idle=(idle(1, back_s=math.inf), idle(2, back_s=300.0)))
    assert leaving(known, 1.0 * GB, SETTINGS) == (1,), "engines that expect nothing say so of every session"


def test_an_engine_that_was_not_asked_for_sessions_chooses_itself() -> None:
    assert leaving(seen(worker(capabilities=())), 1.0 * GB, SETTINGS) is None
    assert leaving(seen(worker(prefill_tokens_per_s=0.0)), 1.0 * GB, SETTINGS) is None
    assert leaving(seen(worker(), Action.HOLD), 1.0 * GB, SETTINGS) is None
    assert leaving(seen(worker()), 1.0 * GB, SETTINGS) == (), "it was asked and has none"


def test_what_is_due_before_the_next_look_comes_back_and_what_is_not_waits() -> None:
    known = seen(worker(), away=(away(1, back_s=2.5), away(2, back_s=4.0), away(3, back_s=-1.0), away(4, back_s=-90.0)))
    sessions, size = returning(known, math.inf, SETTINGS)
    assert (sorted(sessions), size) == ([1, 3], 2 * GB), "0.1 s of load and 0.5 s of slack; 4 will not come any more"


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("requests wait for memory", {"waiting": 1}),
        ("somebody waits for the link", {"link_backlog_bytes": 600 * MB}),
        ("a share of Q0 stays free", {"free_block_bytes": 0, "quota_hard_bytes": 10 * GB + 2 * GB - 1 * MB}),
        ("the quota is below what is mapped", {"free_block_bytes": GB, "quota_hard_bytes": 5 * GB}),
    ],
)
def test_nothing_comes_back_where_somebody_needs_what_it_takes(why: str, changes: dict[str, object]) -> None:
    known = seen(worker(), away=(away(1),), **changes)
    assert returning(known, math.inf, SETTINGS) == ((), 0), why
    assert returning(seen(known, away=(away(1),)), math.inf, SETTINGS) == ((1,), GB)


def test_prefetch_keeps_to_the_movement_budget() -> None:
    known = seen(worker(), away=tuple(away(session, back_s=1.0) for session in (1, 2, 3)))
    assert returning(known, 2.5 * GB, SETTINGS)[1] == 2 * GB
    assert returning(known, 0.5 * GB, SETTINGS) == ((), 0)
