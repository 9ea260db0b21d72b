"""The guard's order of victims and its account."""

from __future__ import annotations

import pytest

from services.actuator.memory.errors import BadGeometry
from services.actuator.memory.guard import CardAccount, GuardAction, GuardStep, victims

COPIED = [(1, 4), (2, 4)]
IDLE = [(2, 4), (3, 6)]
RUNNING = [(9, 5), (8, 5), (7, 5)]
REQUESTER = (7, 5)


def test_nothing_is_taken_when_nothing_is_missing() -> None:
    assert victims(0, COPIED, IDLE, RUNNING, REQUESTER) == []


def test_idle_kv_with_a_copy_goes_first_and_only_as_much_as_needed() -> None:
    assert victims(3, COPIED, IDLE, RUNNING, REQUESTER) == [GuardStep(GuardAction.DROP_COPIED, 1, 4)]


def test_the_order_is_copied_then_idle_then_newest_then_the_requester_itself() -> None:
    steps = victims(20, COPIED, IDLE, RUNNING, REQUESTER)
    assert [(step.action, step.owner) for step in steps] == [
        (GuardAction.DROP_COPIED, 1),
        (GuardAction.DROP_COPIED, 2),
        (GuardAction.DROP_IDLE, 3),
        (GuardAction.PREEMPT_NEWEST, 9),
        (GuardAction.PREEMPT_NEWEST, 8),
    ]


def test_the_requester_gives_way_when_all_others_together_are_not_enough() -> None:
    steps = victims(100, COPIED, IDLE, RUNNING, REQUESTER)
    assert steps[-1] == GuardStep(GuardAction.PREEMPT_REQUESTER, 7, 5), "without it the card runs out of memory"
    assert GuardAction.PREEMPT_NEWEST not in {step.action for step in steps}, "others' work is not wasted for nothing"


def test_an_owner_is_a_victim_once_and_the_requester_never_before_the_end() -> None:
    steps = victims(25, COPIED, IDLE, [(7, 5), (2, 4), (9, 5), (8, 5)], REQUESTER)
    owners = [step.owner for step in steps]
    assert len(owners) == len(set(owners))
    assert 7 in owners[-1:] or 7 not in owners


def test_the_account_holds_mapped_weights_activation_and_slack_within_hbm() -> None:
    card = CardAccount(hbm_bytes=100, weights_bytes=40, activation_bytes=10, slack_bytes=5)
    assert card.mappable_bytes(30) == 15
    assert card.may_map(30, 15)
    assert not card.may_map(30, 16)
    assert card.mappable_bytes(1000) == 0
    with pytest.raises(BadGeometry, match="slack_bytes: found -1"):
        CardAccount(100, 40, 10, -1)
