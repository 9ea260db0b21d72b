"""The service on a bus: answers, swaps of policy while it runs, and input that must not harm it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save as save_tensors

from schemas.actions import ACTION_BATCH, Action, ActionBatch, actions_of
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.states import STATE_BATCH
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, subject, wildcard
from services import qweights
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.decision.service import Settings, build
from services.observe import Observe
from services.qweights import Weights
from services.shell import Shell
from tests.services.decision.rows import message, pointer, state, state_batch, weights

V1, V2 = weights("v1", [0, 0, 0, 0, 1]), weights("v2", [0, 0, 0, 1, 0])
"""v1 always evicts, v2 always compacts."""
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


class Running:
    """The service on an in-memory bus, its neighbours' bus, and what came out."""

    def __init__(self, settings: Settings, network: MemoryNetwork) -> None:
        self.bus = MemoryBus(network)
        self.observe = Observe("decision")
        self.shell = Shell("decision", "d0", bus=MemoryBus(network), observe=self.observe, clock=ManualClock())
        self.service = build(settings)
        self.answers: asyncio.Queue[Message] = asyncio.Queue()
        self.step = 0

    async def start(self) -> None:
        async def on_batch(messages: list[Message]) -> None:
            for each in messages:
                self.answers.put_nowait(each)

        await self.bus.subscribe(wildcard("action"), on_batch)
        await self.service.start(self.shell)

    async def stop(self) -> None:
        await self.service.stop()
        await self.shell.cancel_tasks()
        await self.shell.bus.drain()
        await self.bus.drain()

    async def ask(self, headers: dict[str, str] | None = None) -> Message:
        """The answer to the next step's state."""
        self.step += 1
        await self.send(message(state_batch(state(), step=self.step), headers))
        return await asyncio.wait_for(self.answers.get(), 5)

    async def send(self, sent: Message) -> None:
        await self.bus.publish(*sent)

    async def decision(self) -> ActionBatch:
        return ACTION_BATCH.decode((await self.ask()).data)

    async def put(self, key: str, network: Weights, data: bytes | None = None, **changes: object) -> None:
        await self.bus.object_put(BUCKET_WEIGHTS, network.version, data or qweights.save(network))
        await self.point(key, pointer(network, **changes))

    async def point(self, key: str, to: PolicyPointer) -> None:
        await self.bus.kv_put(BUCKET_POLICY, key, msgspec.json.encode(to))

    def metric(self, name: str, **labels: str) -> float:
        return self.observe.registry.get_sample_value(f"tidegate_decision_{name}", labels) or 0.0

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not true():  # noqa: ASYNC110 - a metric has no event to wait for
                await asyncio.sleep(0)

    async def acts(self, version: str) -> None:
        await self.until(lambda: self.metric("policy_info", role="acting", version=version) == 1)

    async def refused(self, key: str, times: int = 1) -> None:
        await self.until(lambda: self.metric("policies_refused_total", pointer=key) == times)


@pytest.fixture
def settings() -> Settings:
    return Settings(fetch_tries=2, fetch_pause_s=0.0)


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Running]:
    service = Running(settings, MemoryNetwork())
    await service.start()
    yield service
    await service.stop()
    assert service.shell.failed is None


async def test_a_state_is_answered_on_the_nodes_action_subject_in_the_same_trace(running: Running) -> None:
    answer = await running.ask(HEADERS)
    batch = ACTION_BATCH.decode(answer.data)
    assert answer.subject == subject("action", "n0")
    assert (batch.step, batch.policy_version) == (1, "heuristic")
    assert answer.headers == HEADERS
    assert running.metric("batches_total") == 1
    assert running.metric("decisions_total", action="hold") == 1


async def test_the_champion_is_swapped_between_two_steps_without_a_pause(running: Running) -> None:
    assert (await running.decision()).policy_version == "heuristic"
    for network, action in ((V1, Action.EVICT), (V2, Action.COMPACT), (V1, Action.EVICT)):
        await running.put(KEY_CHAMPION, network)
        await running.acts(network.version)
        batch = await running.decision()
        assert (batch.policy_version, actions_of(batch)[0].action) == (network.version, action)
    await running.point(KEY_CHAMPION, PolicyPointer(version="heuristic", kind="heuristic"))
    await running.acts("heuristic")
    assert actions_of(await running.decision())[0].shadows[0].policy.startswith("dqn:"), "it goes on as a shadow"


async def test_a_candidate_travels_as_a_shadow_and_does_not_act(running: Running) -> None:
    await running.put(KEY_CANDIDATE, V1)
    await running.until(lambda: running.metric("policy_info", role="shadow", version="v1") == 1)
    batch = await running.decision()
    assert (batch.policy_version, actions_of(batch)[0].action) == ("heuristic", Action.HOLD)
    assert [(s.policy, s.action) for s in actions_of(batch)[0].shadows] == [("dqn:v1", Action.EVICT)]
    assert len(actions_of(batch)[0].shadows[0].q_values) == 5


@pytest.mark.parametrize("settings", [Settings(policy="dqn")])
async def test_dqn_forces_the_candidate_to_act(running: Running) -> None:
    assert (await running.decision()).policy_version == "heuristic", "until there is one"
    await running.put(KEY_CANDIDATE, V1)
    await running.acts("v1")
    assert actions_of(await running.decision())[0].action == Action.EVICT


async def test_bad_weights_are_refused_and_the_former_champion_goes_on(running: Running) -> None:
    await running.put(KEY_CHAMPION, V1)
    await running.acts("v1")
    good = qweights.save(V2)
    cut, noise = good[:-8], bytes(len(good))
    poisoned = msgspec.structs.replace(V2, tensors={**V2.tensors, "value.bias": np.array([np.nan], np.float32)})
    about = {"format": "tidegate-q-1", "feature_hash": "0" * 16, "version": "v2", "hidden": [4]}
    other_table = save_tensors(dict(V2.tensors), {"tidegate": msgspec.json.encode(about).decode()})
    nan = save_tensors(dict(poisoned.tensors), qweights_metadata(good))
    for times, (data, changes) in enumerate(
        [
            (good, {"sha256": "0" * 64}),  # forged pointer
            (good, {"feature_hash": "0" * 16}),
            (cut, {"sha256": qweights.digest(cut)}),
            (noise, {"sha256": qweights.digest(noise)}),
            (nan, {"sha256": qweights.digest(nan)}),
            (other_table, {"sha256": qweights.digest(other_table)}),
        ],
        start=1,
    ):
        await running.put(KEY_CHAMPION, V2, data, **changes)
        await running.refused(KEY_CHAMPION, times)
        assert (await running.decision()).policy_version == "v1", f"case {times}"
    await running.put(KEY_CHAMPION, V2)
    await running.acts("v2")


def qweights_metadata(data: bytes) -> dict[str, str]:
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header["__metadata__"]
    return metadata


async def test_a_pointer_without_its_object_or_without_sense_is_refused(running: Running) -> None:
    await running.point(KEY_CHAMPION, pointer(V1))
    await running.refused(KEY_CHAMPION)
    await running.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, b"champion!")
    await running.refused(KEY_CHAMPION, 2)
    await running.point(KEY_CHAMPION, PolicyPointer(version="9.9", kind="fixed"))
    await running.refused(KEY_CHAMPION, 3)
    assert (await running.decision()).policy_version == "heuristic"


async def test_weights_are_fetched_once_the_server_is_back(running: Running) -> None:
    network = running.shell.bus._network  # type: ignore[attr-defined]
    await running.bus.object_put(BUCKET_WEIGHTS, "v1", qweights.save(V1))
    await running.point(KEY_CHAMPION, pointer(V1))
    network.pause()
    for _ in range(20):
        await asyncio.sleep(0)
    network.resume()
    await running.acts("v1")
    assert running.metric("policies_refused_total", pointer=KEY_CHAMPION) == 0


async def test_garbage_is_counted_and_the_next_state_is_answered(running: Running) -> None:
    here = subject("state", "n0")
    good = state_batch(state(), step=1)
    old = msgspec.structs.replace(good, schema_version=99)
    for data in (b"", b"\xc1garbage", b"\xff" * 100, STATE_BATCH.encode(old), STATE_BATCH.encode(good)[:-5]):
        await running.send(Message(here, data, None))
    await running.send(Message(subject("state", "n1"), STATE_BATCH.encode(good), {"traceparent": "no trace"}))
    assert (await running.decision()).step == 1
    assert running.metric("rejected_total", reason="malformed") == 4
    assert running.metric("rejected_total", reason="unknown_version") == 1
    assert running.metric("rejected_total", reason="wrong_node") == 1
    assert running.shell.bus.counters()["callback_errors"] == 0


async def test_a_repeated_state_is_answered_once(running: Running) -> None:
    for step in (1, 1, 2, 1):
        await running.send(message(state_batch(state(), step=step)))
    steps = [ACTION_BATCH.decode((await asyncio.wait_for(running.answers.get(), 5)).data).step for _ in range(2)]
    assert steps == [1, 2]
    await running.until(lambda: running.metric("rejected_total", reason="stale") == 2)
    assert running.answers.empty()


async def test_two_copies_share_the_nodes_and_answer_each_state_once(settings: Settings) -> None:
    network = MemoryNetwork()
    first, second = Running(settings, network), Running(settings, network)
    await first.start()
    await second.service.start(second.shell)
    for k in range(10):
        await first.send(message(state_batch(state(), node=f"n{k}")))
    nodes = [ACTION_BATCH.decode((await asyncio.wait_for(first.answers.get(), 5)).data).node for _ in range(10)]
    assert sorted(nodes) == sorted(f"n{k}" for k in range(10))
    assert first.metric("batches_total") + second.metric("batches_total") == 10
    assert first.metric("batches_total") == 5, "the queue group shares the work"
    await first.stop()
    await second.stop()


async def test_a_champion_on_probation_acts_beside_the_former_one(running: Running) -> None:
    await running.bus.object_put(BUCKET_WEIGHTS, "v1", qweights.save(V1))
    await running.put(KEY_CHAMPION, V2, share=0.5, part_cards=True, former=pointer(V1))
    await running.acts("v2")
    assert running.metric("policy_info", role="former", version="v1") == 1
    await running.send(message(state_batch(np.repeat(state(), 2, axis=0), step=100)))
    told = actions_of(ACTION_BATCH.decode((await asyncio.wait_for(running.answers.get(), 5)).data))
    assert {(one.policy, one.action) for one in told} == {("dqn:v1", Action.EVICT), ("dqn:v2", Action.COMPACT)}
    await running.point(KEY_CHAMPION, pointer(V2))
    await running.until(lambda: running.metric("policy_info", role="former", version="v1") == 0)
    await running.send(message(state_batch(np.repeat(state(), 2, axis=0), step=101)))
    batch = ACTION_BATCH.decode((await asyncio.wait_for(running.answers.get(), 5)).data)
    assert (batch.policies, batch.policy_index) == (("dqn:v2",), b"")


async def test_a_former_policy_that_cannot_be_honoured_leaves_the_heuristic(running: Running) -> None:
    await running.put(KEY_CHAMPION, V2, share=0.5, part_cards=True, former=pointer(V1))  # v1's weights are nowhere
    await running.acts("v2")
    assert running.metric("policies_refused_total", pointer="former") == 1
    assert running.metric("policy_info", role="former", version="heuristic") == 1
