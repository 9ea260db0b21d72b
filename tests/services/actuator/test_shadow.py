"""Whom an operator keeps from being commanded is left as it is, beside a neighbour that is commanded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.actions import Action, Hold
from schemas.engine import AwaySession, SetQuota
from schemas.outcomes import Status, WorkerOutcome
from tests.services.actuator.node import Node
from tests.services.actuator.quota_engine import MIB, QuotaEngine

WATCHED, STEERED = "n0/0/w0", "n0/0/w1"
Q0, CAPACITY = 400 * MIB, 1000 * MIB


class Card(Node):
    """Two engines of one card: one that may be watched only, and its neighbour."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.watched = QuotaEngine(WATCHED, self.clock, Q0, CAPACITY, start=128)
        self.steered = QuotaEngine(STEERED, self.clock, Q0, CAPACITY)

    async def act(self, rho: float = 1.0, **changes: object) -> list[WorkerOutcome]:
        """One step: ``changes`` to the watched one's command, the other one enforced to ``rho``."""
        return await self.step([changes, {"target_rho": rho}])


@pytest.fixture
async def card(tmp_path: Path) -> AsyncIterator[Card]:
    made = Card(tmp_path)
    await made.serve(made.watched, made.steered)
    yield made
    await made.close()


@pytest.mark.parametrize(
    "said",
    [
        {"hold": Hold.SHADOW},
        {"hold": Hold.MODE_OFF},
        {"hold": Hold.KILLED},
        {"hold": Hold.WINDOW_FILLING, "order": Hold.SHADOW},
    ],
    ids=["shadow", "off", "kill switch", "shadow under a doubt"],
)
async def test_quota_and_generation_of_a_watched_engine_never_change(card: Card, said: dict[str, int]) -> None:
    before, others = card.watched.in_force, set()
    for number in range(12):
        card.steered.mapped_bytes = 40 * number * MIB
        card.watched.mapped_bytes = 30 * number * MIB
        watched, steered = await card.act(1.0 + 0.1 * (number % 3), **said)
        assert card.watched.in_force == before
        assert (watched.status, watched.executed_action) == (Status.ACCEPTED, Action.HOLD), "nothing was refused"
        assert (watched.effective_generation, watched.quota_hard_bytes) == (0, CAPACITY)
        assert steered.status == Status.ACCEPTED
        others.add(card.steered.in_force)
    assert len(others) == 12, "while its neighbour is commanded: what the watched one maps counts"
    assert card.steered.quota.hard_bytes == CAPACITY - 30 * 11 * MIB
    assert {type(one) for one in card.watched.told} == {SetQuota}, "it hears that its step is answered, no more"


async def test_a_doubt_alone_is_no_order(card: Card) -> None:
    card.steered.mapped_bytes = 300 * MIB
    await card.act(hold=Hold.WINDOW_FILLING)
    assert card.watched.quota.hard_bytes == CAPACITY - 300 * MIB


async def test_memory_promised_beyond_q0_is_taken_back_at_once_and_the_ceiling_with_its_lease(card: Card) -> None:
    card.steered.mapped_bytes = 300 * MIB
    await card.act(target_rho=1.4, target_max_running=64)
    hard = card.watched.quota.hard_bytes
    assert (card.watched.quota.rho, hard) == (1.4, CAPACITY - 300 * MIB)
    card.steered.mapped_bytes = 500 * MIB
    await card.act(hold=Hold.KILLED)
    assert (card.watched.quota.rho, card.watched.quota.soft_bytes) == (1.0, Q0)
    assert card.watched.quota.hard_bytes == hard, "what is in force stays"
    await card.act(target_max_running=64)
    assert card.watched.quota.max_running == 64
    for _ in range(4):
        await card.act(hold=Hold.SHADOW)
    assert card.watched.quota.max_running == 128, "the engine's own ceiling, which only the engine knows"
    settled = card.watched.in_force
    for _ in range(4):
        await card.act(hold=Hold.SHADOW)
    assert card.watched.in_force == settled


async def test_nothing_is_fetched_for_a_watched_engine(card: Card) -> None:
    card.watched.said = {"away": (AwaySession(1, 10 * MIB, 0.5, 4000),), "prefill_tokens_per_s": 8000.0}
    for _ in range(3):
        await card.act(hold=Hold.SHADOW)
    assert {type(one) for one in card.watched.told} == {SetQuota}
    await card.act()
    assert {type(one).__name__ for one in card.watched.told} > {"SetQuota"}, "commanded, it is"
