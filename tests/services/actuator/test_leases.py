"""Which commands may act."""

from __future__ import annotations

import pytest

from schemas.actions import Action
from schemas.outcomes import Refusal
from services.actuator.leases import Orders, refusal_of

IN_ORDER = {
    "action": 1, "target_rho": 1.2, "target_max_running": 256, "base_generation": 5, "deadline_ns": 100,
    "lease_ns": 200, "t_ns": 50, "generation": 5, "swap_allowed": True, "q0_bytes": 10.0, "floor_bytes": 2.0,
}  # fmt: skip


def refusal(**changes) -> Refusal:
    return Refusal(refusal_of(**(IN_ORDER | changes)))


def test_a_command_in_time_and_in_range_acts():
    assert refusal() is Refusal.NONE
    assert refusal(target_rho=1.6000000238) is Refusal.NONE, "1.6 that went through float32 is 1.6"
    assert refusal(t_ns=100) is Refusal.NONE, "the deadline itself is in time"
    assert refusal(base_generation=9) is Refusal.NONE, "an engine that restarted counts from below"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_rho": 0.9}, Refusal.OUT_OF_RANGE),
        ({"target_rho": 1.7}, Refusal.OUT_OF_RANGE),
        ({"target_rho": float("nan")}, Refusal.OUT_OF_RANGE),
        ({"target_max_running": 3}, Refusal.OUT_OF_RANGE),
        ({"action": 5}, Refusal.OUT_OF_RANGE),
        ({"action": -1}, Refusal.OUT_OF_RANGE),
        ({"base_generation": -1}, Refusal.OUT_OF_RANGE),
        ({"deadline_ns": 49}, Refusal.LATE),
        ({"lease_ns": 50}, Refusal.LATE),
        ({"base_generation": 4}, Refusal.OLDER_GENERATION),
    ],
)
def test_a_command_that_must_not_act_says_why(changes, expected):
    assert refusal(**changes) is expected


def test_a_class_that_forbids_swap_forbids_evicting_and_nothing_else():
    refused = {one for one in Action if refusal(action=one, swap_allowed=False) is Refusal.CLASS_FORBIDS}
    assert refused == {Action.EVICT}


def test_a_quota_below_the_floor_is_refused():
    assert refusal(target_rho=1.0, q0_bytes=1.0, floor_bytes=2.0) is Refusal.BELOW_FLOOR


def test_an_order_acts_once_and_never_after_a_newer_one():
    orders = Orders()
    told = [orders.admit("n0", boot, step) for boot, step in [(1, 5), (1, 5), (1, 4), (1, 6), (2, 0), (1, 7), (2, 0)]]
    assert told == [True, False, False, True, True, False, False]
    assert orders.admit("n1", 1, 0), "each node has its own order"
