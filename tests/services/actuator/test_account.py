"""What the actuator knows of a card, and the pages it grants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import Action
from schemas.engine import Description
from services.actuator.account import Account
from services.actuator.effects import EffectSettings

GIB = 1 << 30
GROUP = 128 << 20
WORKERS = ("n0/0/w0", "n0/0/w1")


def description(worker: str, **changes: int) -> Description:
    fields = {
        "service_class": 0, "engine": "test", "block_bytes": 2 << 20, "page_group_bytes": GROUP,
        "kv_bytes_per_token": 1 << 17, "q0_bytes": 20 * GIB, "card_kv_capacity_bytes": 40 * GIB,
        "mapped_bytes": 4 * GIB, "floor_bytes": GIB, "generation": 3, "capabilities": ("grants",),
    }  # fmt: skip
    return Description(worker=worker, **(fields | changes))


def account(*workers: str, **changes: int) -> Account:
    made = Account()
    made.expect(WORKERS)
    for worker in workers:
        made.describe(worker, description(worker, **changes))
    return made


def test_nothing_is_granted_before_every_worker_of_the_card_was_described():
    assert account(WORKERS[0]).cards[0].grants() == {}
    assert account(*WORKERS).cards[0].grants() == dict.fromkeys(WORKERS, 20 * GIB)


def test_free_pages_go_by_the_share_of_q0_above_what_each_has():
    made = account(*WORKERS)
    made.describe(WORKERS[0], description(WORKERS[0], q0_bytes=30 * GIB, mapped_bytes=8 * GIB))
    made.describe(WORKERS[1], description(WORKERS[1], q0_bytes=10 * GIB, mapped_bytes=0))
    free = 40 - 8 - 1
    grants = made.cards[0].grants()
    assert grants[WORKERS[0]] == (8 * GIB + free * GIB * 3 // 4) // GROUP * GROUP
    assert grants[WORKERS[1]] == (GIB + free * GIB // 4) // GROUP * GROUP


def test_what_a_neighbour_was_granted_is_not_granted_twice():
    made = account(*WORKERS)
    first, second = (made.cards[0].members[worker] for worker in WORKERS)
    first.granted_bytes = 39 * GIB
    lowered = made.cards[0].grants()
    assert lowered == {WORKERS[0]: 20 * GIB, WORKERS[1]: 4 * GIB}, "only what it has mapped, until pages came back"
    first.granted_bytes, second.granted_bytes = lowered.values()
    assert made.cards[0].grants() == {WORKERS[1]: 20 * GIB}


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 2), st.integers(1, 20)), min_size=2, max_size=2))
def test_grants_never_promise_more_than_the_card_has(card):
    made = Account()
    made.expect(WORKERS)
    for worker, (mapped, floor, q0) in zip(WORKERS, card, strict=True):
        made.describe(
            worker,
            description(worker, mapped_bytes=mapped * GIB, floor_bytes=floor * GIB, q0_bytes=q0 * GIB,
                        granted_bytes=mapped * GIB),
        )  # fmt: skip
    for _ in range(3):
        for worker, granted in made.cards[0].grants().items():
            made.cards[0].members[worker].granted_bytes = granted
        held = [max(one.granted_bytes, one.view.mapped_bytes) for one in made.cards[0].members.values()]
        assert sum(held) <= 40 * GIB


def test_a_description_that_makes_no_sense_is_refused():
    made = Account()
    made.expect(WORKERS)
    for changes in ({"page_group_bytes": 0}, {"q0_bytes": 0}, {"service_class": 9}):
        with pytest.raises(ValueError, match="expected bytes above 0"):
            made.describe(WORKERS[0], description(WORKERS[0], **changes))


def test_a_card_with_a_worker_nobody_can_see_raises_no_hard_quota():
    made = account(WORKERS[0])
    known = made.cards[0].members[WORKERS[0]]
    known.hard_bytes = 10 * GIB
    known.target = (Action.HOLD, 1.0, 256)
    made.cards[0].plan(EffectSettings())
    assert known.command.hard_bytes == 10 * GIB
    made.describe(WORKERS[1], description(WORKERS[1]))
    known.target = (Action.HOLD, 1.0, 256)
    made.cards[0].plan(EffectSettings(reserve_bytes=0))
    assert known.command.hard_bytes == 36 * GIB


def test_a_quiet_step_keeps_its_commands_and_a_change_makes_new_ones():
    made = account(*WORKERS)
    card = made.cards[0]
    first, second = card.members.values()

    def step(*targets) -> None:
        first.target, second.target = targets
        card.plan(EffectSettings(reserve_bytes=0))

    quiet = (Action.HOLD, 1.2, 256)
    step(quiet, quiet)
    kept = first.command
    step(quiet, quiet)
    assert first.command is kept
    second.view.mapped_bytes = 10 * GIB
    step(quiet, quiet)
    assert first.command.hard_bytes == 30 * GIB
    step((Action.EVICT, 1.2, 256), quiet)
    assert first.command.evict_bytes == 0, "there is nothing idle"
    first.view.idle_bytes = 4.0 * GIB
    step((Action.EVICT, 1.2, 256), quiet)
    assert first.command.evict_bytes == 2 * GIB, "the same command again finds what is idle now"
    step(None, quiet)
    assert first.command is None, "who is not commanded gets nothing"
