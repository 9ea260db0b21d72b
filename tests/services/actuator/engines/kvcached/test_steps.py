"""Two engines of a card, one on kvcached: what the node's steps command becomes its limit, and what comes of that is in
the outcomes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from schemas.actions import Hold
from services.actuator.engines.connecting import EngineSettings
from services.kvsegment import read_usage
from tests.services.actuator.engines.kvcached.conftest import POOL, Played
from tests.services.actuator.engines.kvcached.player import BLOCKS, PAGE
from tests.services.actuator.node import Node
from tests.services.actuator.quota_engine import QuotaEngine

ELASTIC, NEIGHBOUR = "n0/0/w0", "n0/0/w1"


class Card(Node):
    def __init__(self, folder: Path, played: Played) -> None:
        super().__init__(folder, [EngineSettings(worker=ELASTIC, kvcached=played.path.name)])
        self.played = played
        self.elastic = QuotaEngine(ELASTIC, self.clock, POOL // 4, POOL)
        self.neighbour = QuotaEngine(NEIGHBOUR, self.clock, POOL // 4, POOL)

    async def told(self, neighbour_pages: int = 0, **changes: object) -> str:
        """A step with so much mapped by the neighbour; the words of the elastic one's outcome."""
        self.neighbour.mapped_bytes = neighbour_pages * PAGE
        outcome = (await self.step([changes, {}]))[0]
        assert outcome.refusal == 0
        return outcome.detail

    @property
    def limit_pages(self) -> float:
        return read_usage(self.played.path).limit_bytes / PAGE


@pytest.fixture
async def card(tmp_path: Path, played: Played) -> AsyncIterator[Card]:
    made = Card(tmp_path, played)
    await made.serve(made.elastic, made.neighbour)
    yield made
    await made.close()


async def test_the_limit_follows_what_the_card_has_left(card: Card) -> None:
    assert await card.told(6) == ""
    assert (card.limit_pages, card.elastic.quota.hard_bytes) == (10, 10 * PAGE)
    assert await card.told(2) == "kvcached: the raise is written, not yet in use"
    assert card.limit_pages == 14
    assert await card.told(2) == "", "told once: nobody needs it yet"
    assert card.outcomes[0].quota_hard_bytes == 14 * PAGE
    known = card.steps.members[ELASTIC].known
    assert known is not None
    assert "grow" in known.capabilities


async def test_a_raise_that_a_waiting_engine_does_not_follow_is_told_and_counted_once(card: Card) -> None:
    await card.told(8)
    card.played.say(f"alloc {5 * BLOCKS}")
    card.elastic.said["waiting"] = 3
    for pages in (6, 5, 4):  # a raise in each step is one growth
        said = await card.told(pages)
    assert "is not taken: 3 requests wait" not in said, "not before it had time"
    said = await card.told(4)
    expected = f"kvcached: the raise from {8 * PAGE} to {12 * PAGE} bytes is not taken: 3 requests wait, {5 * PAGE} "
    assert said == expected + "bytes are mapped"
    assert await card.told(4) == said
    assert card.connector.kvcached.not_taken == 1
    card.played.say(f"alloc {4 * BLOCKS}")
    assert await card.told(4) == "", "now it is"


async def test_somebody_else_who_writes_the_limit_is_told_and_ends_the_writing(card: Card) -> None:
    await card.told(4)
    for number in range(3):
        card.played.say(f"kvctl {(3 + number) * PAGE}")
        said = await card.told(4)
        assert f"{number + 1} changes by others" in said
    assert "contested" in said
    assert card.limit_pages == 5, "left to whoever insists"
    assert card.outcomes[0].quota_hard_bytes == 5 * PAGE
    assert "contested" in await card.told(4), "in every step, until it is mended"
    counts = card.connector.kvcached
    assert (counts.foreign_writes, counts.contests) == (3, 1)


async def test_a_shrink_below_use_says_how_it_ended(card: Card) -> None:
    card.elastic.capabilities = ("set_quota",)
    card.played.say(f"alloc {12 * BLOCKS}")
    said = await card.told(8)
    assert f"{4 * PAGE} bytes above the limit are being given back" in said
    said = await card.told(8)
    assert "the engine can neither evict nor compact: left to kvcached" in said


async def test_in_shadow_its_limit_and_its_segment_are_nobodys(card: Card) -> None:
    for number in range(6):
        assert await card.told(number, hold=Hold.SHADOW) == ""
        card.played.say(f"kvctl {(3 + number) * PAGE}")
    assert card.limit_pages == 8, "as its owner left it"
    assert card.elastic.quota.generation == 0
    owner = card.played.path.with_name(f".{card.played.path.name}.tidegate")
    assert not owner.exists(), "the right to write it was not even taken"


async def test_without_its_segment_an_engine_does_not_grow_and_goes_on(card: Card) -> None:
    card.played.path.unlink()
    assert "vanished" in await card.told(4)
    known = card.steps.members[ELASTIC].known
    assert known is not None
    assert "grow" not in known.capabilities
