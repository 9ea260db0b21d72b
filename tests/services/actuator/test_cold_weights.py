"""Who goes to sleep and who comes back, from what snapshots say."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.engine import SnapshotReply
from services.actuator.cold_weights import CardWeights, ColdWeightSettings, Order, Phase, Seat

GB = 10**9
BUSY, RARE = "n0/0/w0", "n0/0/w1"
CAPACITY = 35.0 * GB
WEIGHTS = 29 * GB
SETTINGS = ColdWeightSettings(enabled=True, min_awake_s=60.0)
PLAIN = SnapshotReply(
    generation=0, rho=1.0, quota_soft_bytes=30 * GB, quota_hard_bytes=34 * GB, max_running=256, live_bytes=0,
    idle_bytes=0, leaving_bytes=0, away_bytes=0, returning_bytes=0, relocating_bytes=0, mapped_bytes=0,
    free_block_bytes=0, floor_bytes=GB, lease_until_ns=0, weights_bytes=WEIGHTS,
)  # fmt: skip


class Card:
    """A card in steps of two seconds; what its workers show is set by the test."""

    def __init__(self, settings: ColdWeightSettings = SETTINGS) -> None:
        self.ledger = CardWeights(settings)
        self.t_s = 0.0
        self.busy: dict[str, Any] = {"mapped_bytes": 34 * GB, "live_bytes": 30 * GB, "waiting": 5}
        self.rare: dict[str, Any] = {"quiet_s": 500.0}
        self.commanded = {BUSY: True, RARE: True}
        self.may_grow = self.answers = self.may_sleep = True
        self.words: list[str] = []

    def step(self):
        self.t_s += 2.0
        seats = [self._seat(BUSY, self.busy, False), self._seat(RARE, self.rare, self.may_sleep)]
        self.words = list(self.ledger.see(seats, self.t_s).values())
        plan = self.ledger.plan(seats, CAPACITY, self.t_s)
        self.words += plan.words.values()
        return plan

    def until_order(self, steps: int = 200) -> Order | None:
        for _ in range(steps):
            plan = self.step()
            if plan.orders:
                return plan.orders[0]
        return None

    def fall_asleep(self) -> None:
        assert self.until_order() == Order(RARE, False)
        self.rare["weights_on_card"] = False
        self.step()
        for _ in range(10):
            self.step()

    @property
    def phase(self) -> Phase:
        return self.ledger.sleepers[RARE].phase

    def receipt(self, done: bool, detail: str = "") -> str:
        return self.ledger.receipt(RARE, done, detail, self.t_s)

    def _seat(self, worker: str, shown: dict[str, Any], may_sleep: bool) -> Seat:
        said = msgspec.structs.replace(PLAIN, **shown)
        answered = said if self.answers or worker == BUSY else None
        return Seat(worker, may_sleep, self.may_grow, self.commanded[worker], answered, said.mapped_bytes, GB, 0.1 * GB)


@pytest.fixture
def card() -> Card:
    return Card()


def test_a_model_nobody_asks_leaves_for_a_neighbour_that_waits_with_all_its_quota_mapped(card):
    assert card.until_order() == Order(RARE, False)
    assert card.t_s > SETTINGS.min_awake_s, "who was only just seen is left awake"
    assert card.ledger.extra_bytes == 0, "an order is no effect"
    card.rare["weights_on_card"] = False
    card.step()
    assert card.ledger.extra_bytes == WEIGHTS
    assert card.words == ["asleep: 29.0 GB off the card"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda card: card.rare.update(quiet_s=100.0), "not quiet for long enough"),
        (lambda card: card.rare.update(quiet_s=0.0), "nobody knows since when it is quiet"),
        (lambda card: card.rare.update(waiting=1), "it is being asked"),
        (lambda card: card.rare.update(live_bytes=GB), "it computes"),
        (lambda card: card.rare.update(weights_bytes=0), "nobody knows what would be freed"),
        (lambda card: card.busy.update(waiting=0), "the neighbour waits for nothing"),
        (lambda card: card.busy.update(mapped_bytes=20 * GB), "the neighbour's quota is not all mapped"),
        (lambda card: setattr(card, "may_grow", False), "the neighbour's pool is fixed: it could not use the room"),
        (lambda card: setattr(card, "may_sleep", False), "its class or engine forbids it"),
        (lambda card: card.commanded.update({RARE: False}), "it is held or in shadow"),
    ],
)
def test_it_stays(card, change, why):
    change(card)
    assert card.until_order() is None, why


def test_its_first_request_brings_it_back_at_once_where_there_is_room(card):
    card.fall_asleep()
    card.rare["waiting"] = 1
    assert card.step().orders == (Order(RARE, True),)
    assert card.ledger.extra_bytes == 0, "from now on it counts as on the card"
    card.rare.update(weights_on_card=True)
    card.step()
    assert card.receipt(False) == ""
    assert card.receipt(True, "29 GB") == "awake: 29 GB"
    assert card.phase is Phase.AWAKE


def test_room_is_reserved_first_where_a_neighbour_has_it(card):
    card.fall_asleep()
    card.busy["mapped_bytes"] = 60 * GB
    card.rare["waiting"] = 1
    plan = card.step()
    assert plan.orders == ()
    assert plan.shrink_bytes == {BUSY: 25 * GB}
    assert card.ledger.extra_bytes == 0, "the account takes the room away from the neighbours' quotas"
    card.busy["mapped_bytes"] = 34 * GB
    assert card.step().orders == (Order(RARE, True),)


def test_room_that_does_not_come_is_given_back_with_a_clear_word_and_asked_for_again_later(card):
    card.fall_asleep()
    card.busy["mapped_bytes"] = 60 * GB
    card.rare["waiting"] = 1
    card.step()
    while card.phase is Phase.RESERVED:
        card.step()
    assert card.words == ["waking refused: 25.0 GB of room lacking after 32 s, quotas restored"]
    assert card.ledger.extra_bytes == WEIGHTS, "the neighbours have their quotas back"
    refused_s = card.t_s
    while card.phase is not Phase.RESERVED:
        card.step()
    first_s = card.t_s - refused_s
    assert first_s >= SETTINGS.retry_s
    while card.phase is Phase.RESERVED:
        card.step()
    refused_s = card.t_s
    while card.phase is not Phase.RESERVED:
        card.step()
    assert card.t_s - refused_s >= 2 * SETTINGS.retry_s, "twice as long after each failure"


def test_a_failed_waking_gives_the_room_up_and_stays_asleep(card):
    card.fall_asleep()
    card.rare["waiting"] = 1
    card.step()
    card.step()
    assert card.receipt(True, "status 500") == "not awake, its room is given up: status 500"
    assert card.phase is Phase.ASLEEP
    assert card.ledger.extra_bytes == WEIGHTS
    assert card.step().orders == (), "not at once again"
    assert card.until_order(20) == Order(RARE, True)


def test_a_sleep_that_freed_little_is_told_and_not_believed(card):
    card.until_order()
    card.step()
    assert card.receipt(True, "answered 200, but freed 0.0 of 29.0 GB") == (
        "not asleep: answered 200, but freed 0.0 of 29.0 GB"
    )
    assert card.phase is Phase.AWAKE
    assert card.ledger.extra_bytes == 0
    assert card.step().orders == (), "tried again after a while only"


def test_an_order_without_any_effect_or_answer_ends(card):
    card.until_order()
    while not card.receipt(False):
        card.step()
        assert card.t_s < 400
    assert card.phase is Phase.AWAKE


def test_room_that_was_taken_in_the_last_moment_is_waited_for(card):
    card.fall_asleep()
    card.rare["waiting"] = 1
    card.step()
    card.ledger.refused(RARE, "busy", card.t_s)
    assert card.phase is Phase.RESERVED
    assert card.step().orders == (Order(RARE, True),)


def test_who_woke_is_left_awake_for_a_while(card):
    card.fall_asleep()
    card.rare["waiting"] = 1
    card.step()
    card.rare.update(weights_on_card=True)
    card.step()
    card.receipt(True)
    woke_s = card.t_s
    card.rare["waiting"] = 0
    assert card.until_order() == Order(RARE, False)
    assert card.t_s - woke_s >= SETTINGS.min_awake_s


def test_a_restarted_actuator_reserves_for_a_sleeper_whose_requests_wait(card):
    card.rare.update(weights_on_card=False, waiting=3)
    assert card.step().orders == (Order(RARE, True),), "seen for the first time"


def test_in_shadow_nobody_is_woken_who_was_not_put_to_sleep_by_us(card):
    card.commanded = {BUSY: False, RARE: False}
    card.rare.update(weights_on_card=False, waiting=3)
    assert card.until_order(50) is None


def test_who_was_put_to_sleep_by_us_is_woken_also_when_held_since(card):
    card.fall_asleep()
    card.commanded = {BUSY: False, RARE: False}
    card.rare["waiting"] = 1
    assert card.until_order(20) == Order(RARE, True)


def test_a_sleeper_that_does_not_answer_lends_nothing(card):
    card.fall_asleep()
    card.answers = False
    card.step()
    assert card.ledger.extra_bytes == 0, "it may have restarted with its weights on the card"


def test_a_sleeper_that_somebody_else_woke_is_seen_to_be_awake(card):
    card.fall_asleep()
    card.rare["weights_on_card"] = True
    card.step()
    assert card.phase is Phase.AWAKE
    assert card.ledger.extra_bytes == 0


def test_clients_that_gave_up_end_the_reservation(card):
    card.fall_asleep()
    card.busy["mapped_bytes"] = 60 * GB
    card.rare["waiting"] = 1
    card.step()
    assert card.phase is Phase.RESERVED
    card.rare["waiting"] = 0
    card.step()
    assert card.phase is Phase.ASLEEP
    assert card.ledger.extra_bytes == WEIGHTS
