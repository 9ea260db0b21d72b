from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from schemas.features import FEATURE_COUNT, FEATURE_HASH
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, STREAM_SUBJECTS, STREAM_TRANSITIONS
from schemas.transitions import TRANSITION_BATCH, TransitionBatch
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.learner.service import LearnerService, Settings
from services.observe import Observe
from services.qnet import QNet, digest
from services.settings import CommonSettings
from services.shell import Shell
from tests.services.learner.batches import BOOT, batch, deliver


def settings(folder: Path | None = None, **changes: object) -> Settings:
    base = Settings(
        hidden=(16,), warmup_rows=8, batch=8, publish_updates=5, capacity_rows=256, fetch_timeout_s=0.05,
        checkpoint_dir=str(folder) if folder else "", updates_per_transition=1.0,
    )  # fmt: skip
    return msgspec.structs.replace(base, **changes)


def build(chosen: Settings) -> LearnerService:
    """At the wall clock of the batches' boot."""
    return LearnerService(chosen, wall_ns=lambda: BOOT)


class Running:
    """A learner on an in-memory network, and a featurizer's side of it."""

    def __init__(self, network: MemoryNetwork, service: LearnerService, instance: str = "l0") -> None:
        self.network, self.service = network, service
        self.bus = MemoryBus(network)
        self.clock = ManualClock(1)
        self.observe = Observe("learner")
        self.shell = Shell("learner", instance, bus=self.bus, observe=self.observe, clock=self.clock)

    async def send(self, *batches: TransitionBatch, headers: Mapping[str, str] | None = None) -> None:
        for sent in batches:
            await self.bus.publish_stream(
                deliver(sent)[0].subject,
                TRANSITION_BATCH.encode(sent),
                message_id=f"{sent.node}.{sent.boot_id}.{sent.step}",
                headers=headers,
            )

    def count(self, name: str, **labels: str) -> float:
        return self.observe.registry.get_sample_value(f"tidegate_learner_{name}", labels) or 0.0

    async def candidate(self, after: str = "") -> PolicyPointer:
        """The next candidate pointer that is not ``after``."""
        async for entry in self.bus.kv_watch(BUCKET_POLICY, KEY_CANDIDATE):
            assert entry.value is not None
            pointer = msgspec.json.decode(entry.value, type=PolicyPointer)
            if pointer.version != after:
                return pointer
        raise AssertionError("the watch ended")

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until something that has no event of its own is so."""
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(network: MemoryNetwork, chosen: Settings, instance: str = "l0") -> AsyncIterator[Running]:
    run = Running(network, build(chosen), instance)
    await run.service.start(run.shell)
    try:
        yield run
        assert run.shell.failed is None
    finally:
        await run.service.stop()


async def kill(run: Running) -> None:
    """What kill -9 leaves: nothing is saved, nothing is told."""
    await run.shell.cancel_tasks()
    run.service._executor.shutdown(wait=True)


async def test_transitions_become_a_candidate_that_loads() -> None:
    async with running(MemoryNetwork(), settings()) as run:
        await run.send(*(batch(step) for step in range(20)))
        pointer = await run.candidate()
        data = await run.bus.object_get(BUCKET_WEIGHTS, pointer.version)
        assert data is not None, "the object is there before the pointer names it"
        assert digest(data) == pointer.sha256
        assert (pointer.kind, pointer.feature_hash, pointer.parent) == ("dqn", FEATURE_HASH, "")
        net = QNet.load(data)
        assert np.isfinite(net.q_values(np.zeros((1, FEATURE_COUNT), np.float32))).all()
        await run.send(*(batch(step) for step in range(20, 40)))
        following = await run.candidate(after=pointer.version)
        assert following.parent == pointer.version
        assert following.transitions > pointer.transitions


async def test_poison_is_counted_and_the_learner_goes_on() -> None:
    async with running(MemoryNetwork(), settings()) as run:
        await run.send(*(batch(step) for step in range(20)))
        await run.bus.publish_stream("tg.v1.transition.n0", b"\xc1", message_id="junk")
        await run.send(batch(20, actions=[9]), batch(21, feature_hash="other"), batch(22))
        await run.until(lambda: run.count("transitions_total", result="accepted") == 21)
        assert run.count("messages_total", result="malformed") == 1
        assert run.count("messages_total", result="feature_table") == 1
        assert run.count("transitions_total", result="action_unknown") == 1


async def test_after_a_kill_nothing_is_lost_and_nothing_learned_twice(tmp_path: Path) -> None:
    network = MemoryNetwork()
    chosen = settings(tmp_path, publish_updates=1_000_000)
    async with running(network, chosen) as run:
        await run.send(*(batch(step) for step in range(30)))
        await run.until(lambda: run.count("transitions_total", result="accepted") == 30)
    updates = run.service.trainer.agent.updates

    killed = Running(network, build(chosen))
    await killed.service.start(killed.shell)
    await killed.send(*(batch(step) for step in range(30, 50)))
    await killed.until(lambda: killed.count("transitions_total", result="accepted") == 20)
    await kill(killed)  # the 20 were acknowledged and are in no checkpoint

    async with running(network, chosen) as again:
        await again.send(*(batch(step) for step in range(50, 60)))
        await again.until(lambda: again.count("stream_sequence") == 60)
        assert again.count("transitions_total", result="again") == 30, "the rows of the checkpoint fill the replay"
        assert again.count("transitions_total", result="accepted") == 30, "acknowledged or not, they are learned"
        await again.until(lambda: again.service.trainer.agent.updates == updates + 30)
        assert again.service.trainer.intake.replay.size == 60


async def test_a_corrupt_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = MemoryNetwork()
    for first, last in ((0, 20), (20, 30)):
        async with running(network, settings(tmp_path)) as run:
            await run.send(*(batch(step) for step in range(first, last)))
            await run.until(lambda run=run, last=last: run.count("stream_sequence") == last)  # type: ignore[misc]
    newest = max(tmp_path.glob("*.safetensors"))  # noqa: ASYNC240 - a test's own folder
    newest.write_bytes(newest.read_bytes()[:-8] + b"\0" * 8)
    async with running(network, settings(tmp_path)) as run:
        assert run.count("checkpoints_total", result="refused") == 1
        assert any("refused" in record.message for record in caplog.records)
        await run.until(lambda: run.count("stream_sequence") == 30)
        assert run.service.trainer.transitions == 30, "what the lost checkpoint had learned is learned again, once"


async def test_a_new_store_is_learned_from_its_beginning(tmp_path: Path) -> None:
    async with running(MemoryNetwork(), settings(tmp_path)) as run:
        await run.send(*(batch(step) for step in range(20)))
        await run.until(lambda: run.count("stream_sequence") == 20)
    async with running(MemoryNetwork(), settings(tmp_path), "l1") as run:
        assert run.service.trainer.agent.updates > 0, "the weights stay"
        await run.send(*(batch(step) for step in range(100, 130)))
        await run.until(lambda: run.service.trainer.transitions == 50)


async def test_while_the_bus_is_away_the_newest_candidate_waits() -> None:
    network = MemoryNetwork()
    async with running(network, settings()) as run:
        await run.send(*(batch(step) for step in range(8)))
        learn = run.service.trainer.learn

        def learn_while_the_server_dies(*args: Callable[[], bool]) -> object:
            network.pause()
            return learn(*args)

        run.service.trainer.learn = learn_while_the_server_dies  # type: ignore[method-assign,assignment]
        await run.send(*(batch(step) for step in range(8, 30)))
        await run.until(lambda: run.count("candidates_total", result="delayed") > 0)
        run.service.trainer.learn = learn  # type: ignore[method-assign]
        network.resume()
        assert (await run.candidate()).version.startswith("dqn-")


async def test_a_champion_is_where_a_learner_without_a_checkpoint_begins() -> None:
    network = MemoryNetwork()
    bus = MemoryBus(network)
    await bus.ensure_stream(STREAM_TRANSITIONS, STREAM_SUBJECTS[STREAM_TRANSITIONS], max_age_s=0, max_bytes=0)
    net = QNet((16,), version="dqn-77-abc")
    net.value.bias.data[:] = 4.5
    data = net.save()
    champion = PolicyPointer(version=net.version, kind="dqn", sha256=digest(data), feature_hash=FEATURE_HASH)
    await bus.object_put(BUCKET_WEIGHTS, net.version, data)
    await bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(champion))
    async with running(network, settings()) as run:
        assert run.service.trainer.agent.online.value.bias.item() == 4.5
        await run.send(*(batch(step) for step in range(20)))
        assert (await run.candidate()).parent == "dqn-77-abc"


async def test_a_quiet_learner_still_writes_its_checkpoint_in_time(tmp_path: Path) -> None:
    async with running(MemoryNetwork(), settings(tmp_path, checkpoint_every_s=30.0)) as run:
        assert run.count("checkpoints_total", result="written") == 0
        run.clock.advance_to(31_000_000_000)
        await run.until(lambda: run.count("checkpoints_total", result="written") == 1)


async def test_the_learn_span_links_to_the_transitions_spans(tmp_path: Path) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    file = tmp_path / "spans.jsonl"
    run = Running(MemoryNetwork(), build(settings()))
    run.observe.start(CommonSettings(trace_file=str(file)), {}, instance="l0", rng=random.Random(1))
    await run.service.start(run.shell)
    await run.send(batch(0), headers={"traceparent": parent})
    await run.send(batch(1), headers={"traceparent": "nonsense"})
    await run.until(lambda: run.count("stream_sequence") == 2)
    await run.service.stop()
    assert run.observe.stop(5.0)
    found = [
        span
        for line in file.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    assert {span["name"] for span in found} == {"learn"}
    links = [link["spanId"] for span in found for link in span.get("links", [])]
    assert links == ["b7ad6b7169203331"], "one good header, one link; a bad one is no error"
