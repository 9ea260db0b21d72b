"""Cold weights on a server that sleeps over HTTP, beside an engine on a real kvcached segment, through the node's
steps; its device is NVML's as a test makes it up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from schemas.engine import SetWeights
from services.actuator.cold_weights import ColdWeightSettings
from services.actuator.engines.connecting import EngineSettings
from services.errors import EngineRefused
from services.kvsegment import LAYOUT
from services.nvml import Nvml
from tests.services.actuator.engines.vllm.sleep_server import GB, KV, WEIGHTS, Server
from tests.services.actuator.node import Node
from tests.services.actuator.quota_engine import MIB, QuotaEngine
from tests.services.fake_nvml import FakeNvml, Gpu

BUSY, RARE = "n0/0/w0", "n0/0/w1"
CAPACITY, Q0 = 40 * GB, 10 * GB
OTHERS = 20 * GB
"""Of other processes on the card."""
COLD = ColdWeightSettings(
    enabled=True, idle_before_sleep_s=20.0, min_awake_s=4.0, min_asleep_s=0.0, effect_limit_s=1e9, room_limit_s=1e9
)
"""Without limits by the node's clock: here a step of it takes a millisecond."""


class Card(Node):
    """A busy engine on kvcached and a rare one that can sleep."""

    def __init__(self, folder: Path, segment: Path, server: Server, url: str) -> None:
        self.server = server
        self.segment = segment
        self.gpu = Gpu("GPU-0", total=200 * GB)
        self.fake = FakeNvml(self.gpu)
        engines = [
            EngineSettings(worker=BUSY, kvcached=str(segment)),
            EngineSettings(worker=RARE, sleep_url=url, weights_bytes=WEIGHTS),
        ]
        super().__init__(folder, engines, COLD, Nvml(self.fake))
        self.busy = QuotaEngine(BUSY, self.clock, Q0, CAPACITY)
        self.rare = QuotaEngine(RARE, self.clock, Q0, CAPACITY)
        self.busy.said["waiting"] = 5
        self.rare.said["quiet_s"] = 60.0
        self.words: list[str] = []
        self.show()

    def show(self) -> None:
        """Let NVML say what the server holds; it and its sockets are this process."""
        self.gpu.processes = [(os.getpid(), self.server.used_bytes), (1, OTHERS)]
        self.gpu.used = self.server.used_bytes + OTHERS

    async def on(self) -> None:
        limit, _, _ = LAYOUT.unpack(self.segment.read_bytes())
        with self.segment.open("r+b") as file:  # the busy one maps all that it may
            file.write(LAYOUT.pack(limit, min(limit, self.busy.quota.hard_bytes), 0))
        await self.step()
        self.words += [one.detail for one in self.outcomes if one.detail]
        self.show()

    async def until(self, words: str) -> None:
        async with asyncio.timeout(10):
            while not any(words in one for one in self.words):
                await self.on()

    @property
    def known_on_card(self) -> bool:
        known = self.steps.members[RARE].known
        assert known is not None
        assert known.said is not None
        return known.said.weights_on_card


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path(f"/dev/shm/tidegate-test-{os.getpid()}-asleep")
    path.write_bytes(LAYOUT.pack(100 * GB, 0, 0))
    yield path
    path.unlink()
    path.with_name(f".{path.name}.tidegate").unlink(missing_ok=True)


class Shown(Server):
    """Its device shows at once what it does."""

    card: Card | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "used_bytes" and self.card is not None:
            self.card.show()


@pytest.fixture
async def card(tmp_path: Path, segment: Path) -> AsyncIterator[Card]:
    server = Shown()
    runner = web.AppRunner(server.app(), shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made = server.card = Card(tmp_path, segment, server, f"http://127.0.0.1:{runner.addresses[0][1]}")
    await made.serve(made.busy, made.rare)
    yield made
    await made.close()
    await runner.cleanup()


async def test_weights_leave_for_a_neighbour_that_grows_and_the_first_request_brings_them_back(card: Card) -> None:
    await card.on()
    before = card.busy.quota.hard_bytes
    await card.until("weights: sleep ordered")
    assert card.known_on_card, "an order is no effect"
    await card.until("weights: asleep: 16.0 GB off the card")
    assert card.server.asleep
    await card.on()
    assert card.busy.quota.hard_bytes >= before + WEIGHTS - MIB, "the neighbour may map what they left"
    card.rare.said |= {"waiting": 1, "quiet_s": 0.0}
    await card.on()
    assert card.busy.quota.hard_bytes <= before, "its room is reserved before it wakes"
    await card.until("weights: wake ordered")
    await card.until("weights: awake: took 46.00 of 16.00 GB")
    assert not card.server.asleep
    assert card.known_on_card


async def test_a_sleep_that_frees_nothing_is_told_and_nothing_is_lent(card: Card) -> None:
    card.server.faults["/sleep"] = "frees_nothing"
    await card.on()
    before = card.busy.quota.hard_bytes
    await card.until("weights: not asleep: answered 200, but freed 0.00 of 16.00 GB; woken again")
    assert card.busy.quota.hard_bytes == before
    assert card.known_on_card


async def test_what_neighbours_free_meanwhile_is_not_taken_for_it(card: Card) -> None:
    card.server.faults["/sleep"] = "frees_nothing"
    await card.until("weights: sleep ordered")
    card.gpu.used -= OTHERS
    await card.until("weights: not asleep: answered 200, but freed 0.00 of 16.00 GB; woken again")


async def test_one_that_frees_nothing_and_cannot_be_woken_lends_nothing_and_is_woken_when_asked(card: Card) -> None:
    card.server.faults |= {"/sleep": "frees_nothing", "/wake_up": 500}
    await card.on()
    before = card.busy.quota.hard_bytes
    await card.until("waking it again failed")
    card.server.faults.clear()
    await card.on()
    assert not card.known_on_card, "it says that it sleeps, and its requests wait"
    assert card.busy.quota.hard_bytes == before, "but nothing was seen to leave"
    card.rare.said |= {"waiting": 1, "quiet_s": 0.0}
    async with asyncio.timeout(10):
        while card.server.asleep:
            await card.on()


async def test_an_actuator_that_starts_anew_finds_the_sleeper_by_its_processes_memory(card: Card) -> None:
    await card.until("weights: asleep: 16.0 GB off the card")
    await card.steps.close()
    card.begin()
    await card.on()
    await card.on()
    assert not card.known_on_card
    assert card.busy.quota.hard_bytes > CAPACITY
    card.rare.said |= {"waiting": 1, "quiet_s": 0.0}
    await card.until("weights: awake: took 46.00 of 16.00 GB")


async def test_a_server_found_asleep_whose_memory_does_not_show_it_lends_nothing(card: Card) -> None:
    card.server.asleep = True
    await card.on()
    await card.on()
    known = card.steps.members[RARE].known
    assert known is not None
    assert known.said is not None
    assert (known.said.weights_on_card, known.said.weights_bytes) == (False, 0)


async def test_one_that_somebody_else_woke_is_on_the_card_again(card: Card) -> None:
    await card.until("weights: asleep: 16.0 GB off the card")
    card.server.asleep = False
    card.server.used_bytes = WEIGHTS + KV
    await card.on()
    assert card.known_on_card


@pytest.mark.parametrize("why", ["no device", "no sleep mode"])
async def test_what_cannot_be_verified_is_not_announced_and_the_log_says_why(
    card: Card, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "no device":
        card.fake.fails["nvmlInit"] = 12
    else:
        card.server.faults["/is_sleeping"] = 404
    for _ in range(3):
        await card.on()
    member = card.steps.members[RARE]
    assert member.known is not None
    assert "sleep" not in member.known.capabilities
    with pytest.raises(EngineRefused):
        await member.engine.set_weights(SetWeights(False, "a"))
    (record,) = [one for one in caplog.records if one.name.endswith("connecting")]
    reason = record.fields["reason"]
    assert ("--enable-sleep-mode" if why == "no sleep mode" else "device memory cannot be read") in reason
    assert not card.server.asleep


async def test_orders_follow_one_another_and_a_repeat_does_nothing(card: Card) -> None:
    await card.on()
    engine = card.steps.members[RARE].engine
    first = await engine.set_weights(SetWeights(False, "a"))
    again = await engine.set_weights(SetWeights(False, "b"))
    assert (first.done, again.done) == (False, False), "one order, whoever gave it"
    with pytest.raises(EngineRefused, match="busy"):
        await engine.set_weights(SetWeights(True, "c"))
    async with asyncio.timeout(5):
        while not (said := await engine.receipt("b")).done:
            await engine.snapshot()
    assert said.detail == "freed 46.00 of 16.00 GB"
    assert (await engine.receipt("a")).detail == said.detail
    assert [one for one in card.server.asked if one.startswith("/sleep")] == ["/sleep?level=1&mode=keep"]
