"""The live half on a bus: when a champion on probation gets all workers, and when it cannot be moved."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest

from loadgen.examiner.pointers import Pointers
from loadgen.examiner.settings import Settings
from loadgen.examiner.watch import Watch
from schemas.config import KEY_PIN, PinOrder
from schemas.policies import HEURISTIC_POINTER, KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY, STREAM_SUBJECTS, STREAM_TRANSITIONS, subject
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH
from services.bus.memory import MemoryBus, MemoryNetwork
from services.learner.promotion import Limits
from tests.services.decision.rows import pointer, weights
from tests.services.learner.batches import batch

NOW = 1_800_000_000_000_000_000
SETTINGS = Settings(
    live=Limits(block_steps=2, least_blocks=2, window_blocks=4, draws=50), fetch_timeout_s=0.01, lookback_messages=0
)
NEW = "dqn:v1"
TRIED = pointer(weights("v1", [1, 0, 0, 0, 0]), parent="heuristic", share=0.5, former=HEURISTIC_POINTER)


class Running:
    def __init__(self) -> None:
        self.bus = MemoryBus(MemoryNetwork())
        self.watch = Watch(self.bus, SETTINGS, Pointers(self.bus, lambda: NOW))
        self.step = 0

    async def start(self) -> None:
        names = STREAM_SUBJECTS[STREAM_TRANSITIONS]
        await self.bus.ensure_stream(STREAM_TRANSITIONS, names, max_age_s=3600, max_bytes=1 << 20)

    async def put(self, to: PolicyPointer) -> None:
        await self.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(to))
        await self.until(lambda: self.watch._champion is not None and self.watch._champion.version == to.version)

    async def pin(self, active: bool) -> None:
        order = PinOrder(active=active, version="fixed:1.3", who="ada", when_ns=1, why="freeze")
        await self.bus.kv_put(BUCKET_CONFIG, KEY_PIN, msgspec.json.encode(order))

    async def act(self, policies: tuple[str, ...], steps: int, goodput: tuple[float, ...]) -> None:
        """Transitions of workers on cards of their own."""
        for _ in range(steps):
            parts = np.zeros((len(policies), len(REWARD_PARTS)), np.float32)
            parts[:, REWARD_PARTS.index("tokens")] = 1.0
            parts[:, REWARD_PARTS.index("goodput")] = goodput
            made = batch(self.step, rows=len(policies), policies=policies, rewards=parts)
            made = msgspec.structs.replace(made, workers=tuple(f"n0/{k}/w0" for k in range(len(policies))))
            data = TRANSITION_BATCH.encode(made)
            await self.bus.publish_stream(subject("transition", "n0"), data, message_id=str(self.step))
            self.step += 1

    async def champion(self) -> PolicyPointer:
        entry = await self.bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
        assert entry is not None
        return msgspec.json.decode(entry.value or b"", type=PolicyPointer)

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():  # noqa: ASYNC110 - a judgement has no event to wait for
                await asyncio.sleep(0.002)

    async def becomes(self, true: Callable[[PolicyPointer], bool]) -> PolicyPointer:
        """The champion, once that is true of it."""
        async with asyncio.timeout(5):
            while not true(now := await self.champion()):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        return now


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    run = Running()
    await run.start()
    task = asyncio.create_task(run.watch.run())
    await run.until(lambda: run.watch._read_backlog)
    yield run
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_sound_beside_the_former_it_gets_all_workers_for_another_window(running: Running) -> None:
    await running.put(TRIED)
    await running.act((NEW, "heuristic"), 14, (0.5, 0.5))
    now = await running.becomes(lambda now: not now.on_probation)
    assert (now.version, now.former) == ("v1", None)
    assert "sound after 4 blocks" in now.why
    await running.until(lambda: running.watch._champion is not None)
    await running.act((NEW, NEW), 14, (0.5, 0.5))
    await running.until(lambda: running.watch._sound == "v1")


async def test_worse_beside_the_former_it_goes_back_to_it_and_is_rejected(running: Running) -> None:
    await running.put(TRIED)
    await running.act((NEW, "heuristic"), 14, (0.2, 0.5))
    await running.becomes(lambda now: now.version == "heuristic")
    assert (await running.watch._pointers.rejections()).of(TRIED) is not None


async def test_worse_once_all_workers_are_on_it_it_goes_back_as_well(running: Running) -> None:
    await running.act(("heuristic", "heuristic"), 14, (0.5, 0.5))
    await running.put(TRIED)
    await running.act((NEW, "heuristic"), 14, (0.5, 0.5))
    await running.becomes(lambda now: not now.on_probation)
    await running.until(lambda: running.watch._champion is not None)
    await running.act((NEW, NEW), 14, (0.2, 0.2))
    await running.becomes(lambda now: now.version == "heuristic")


async def test_where_no_worker_came_to_act_on_it_it_gets_them_all(running: Running) -> None:
    await running.put(TRIED)
    await running.act(("heuristic",), 30, (0.5,))
    now = await running.becomes(lambda now: not now.on_probation)
    assert (now.version, "absent" in now.why) == ("v1", True)


async def test_one_that_a_pin_kept_on_probation_is_judged_again_once_the_pin_is_gone(running: Running) -> None:
    await running.put(TRIED)
    await running.pin(True)
    await running.act((NEW, "heuristic"), 14, (0.5, 0.5))
    await running.until(lambda: "ada pinned" in running.watch._kept)
    assert (await running.champion()).on_probation
    await running.pin(False)
    await running.act((NEW, "heuristic"), 14, (0.5, 0.5))
    await running.becomes(lambda now: not now.on_probation)
