"""The actuator's service on an in-memory bus, commanding a real node over its sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.node.emulation import Emulation
from loadgen.node.replay import Replay
from schemas.actions import ACTION_BATCH, ALL_ACTIONS, Action, MaskReason, WorkerAction, action_batch
from schemas.classes import ServiceClass
from schemas.identity import STEP_NS, action_id
from schemas.outcomes import AUDIT_RECORD, OUTCOME_BATCH, OutcomeBatch, OutcomeKind, Refusal, Status, outcomes_of
from schemas.subjects import STREAM_AUDIT, subject
from services.actuator.service import ActuatorService, Settings
from services.bus.api import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.observe import Observe
from services.shell import Shell

from .fake_fleet import GIB, FakeFleet

BOOT = 7
WORKERS = ("n0/0/w0", "n0/0/w1")


class Rig:
    """A node, an actuator, and the hands of decision and telemetry."""

    def __init__(self, folder: Path, classes: tuple[int, ...]) -> None:
        fleet = FakeFleet(2)
        # Without it nothing is priced, and the engine chooses by bytes: test_actuator_memory has sessions by name.
        fleet.prefill_tokens_per_s = lambda worker: 0.0
        self.engines = Emulation(fleet, WORKERS, classes)
        self.engines.asked_by(BOOT)
        self.replay = Replay(self.engines, duration_s=100, step_timeout_s=30, speed=0)
        self.folder = folder
        self.network = MemoryNetwork()
        self.bus = MemoryBus(self.network)
        self.outcomes: asyncio.Queue[tuple[OutcomeBatch, Message]] = asyncio.Queue()
        self.service: ActuatorService
        self.shell: Shell

    async def open(self) -> None:
        await self.replay.open(self.folder)
        await self.bus.subscribe(subject("outcome", "n0"), self._arrived)
        await self.start_actuator()

    async def start_actuator(self) -> None:
        self.service = ActuatorService(Settings(node="n0", sockets=str(self.folder), engine_timeout_s=5.0))
        observe = Observe("actuator")
        self.shell = Shell("actuator", "t", bus=MemoryBus(self.network), observe=observe, clock=ManualClock())
        await self.service.start(self.shell)

    async def close(self) -> None:
        await self.service.stop()
        await self.shell.cancel_tasks()
        await self.shell.bus.drain()
        await self.bus.drain()
        await self.replay.close()
        assert self.shell.failed is None

    async def _arrived(self, messages: list[Message]) -> None:
        for message in messages:
            self.outcomes.put_nowait((OUTCOME_BATCH.decode(message.data), message))

    def action(self, i: int, action: int = 0, rho: float | None = None, **changes: Any) -> WorkerAction:
        engines, quota = self.engines, self.engines.quotas[i]
        fields: dict[str, Any] = {
            "worker": WORKERS[i],
            "action_id": action_id(WORKERS[i], BOOT, engines.step),
            "action": action,
            "target_rho": quota.rho if rho is None else rho,
            "target_max_running": quota.max_running,
            "base_generation": quota.generation,
            "deadline_ns": engines.t_ns + STEP_NS,
            "lease_ns": engines.t_ns + 3 * STEP_NS,
            "policy": "heuristic",
            "probability": 1.0,
            "mask": ALL_ACTIONS,
            "mask_reasons": (0,) * 5,
        }
        return WorkerAction(**(fields | changes))

    async def send(self, *actions: WorkerAction, step: int | None = None, headers=None) -> bytes:
        step = self.engines.step if step is None else step
        deadline_ns, lease_ns = min(one.deadline_ns for one in actions), min(one.lease_ns for one in actions)
        rows = [one._replace(deadline_ns=deadline_ns, lease_ns=lease_ns) for one in actions]
        batch = action_batch("n0", BOOT, step, self.engines.t_ns, rows)
        data = ACTION_BATCH.encode(batch)
        await self.bus.publish(subject("action", "n0"), data, headers)
        return data

    async def step(self, *actions: WorkerAction) -> OutcomeBatch:
        """Command, let the step end, and give what was reported."""
        await self.send(*actions)
        outcome, _ = await asyncio.wait_for(self.outcomes.get(), 10)
        assert self.engines.commanded, "every worker's last frame of a step is its quota"
        self.engines.advance()
        return outcome


@pytest.fixture
async def rig(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(tmp_path, getattr(request, "param", (0, 0)))
    await made.open()
    yield made
    await made.close()


async def test_a_wider_quota_is_reported_as_the_engine_confirmed_it(rig):
    outcome = await rig.step(rig.action(0, Action.WIDEN, 1.1), rig.action(1))
    first, second = outcomes_of(outcome)
    assert (first.status, first.executed_action, first.effective_rho) == (Status.ACCEPTED, Action.WIDEN, 1.1)
    assert first.effective_generation == rig.engines.quotas[0].generation == 1
    assert first.quota_soft_bytes == 22 * GIB
    assert first.quota_hard_bytes == (26 * GIB - 10**9) // (128 << 20) * (128 << 20), "what the neighbour leaves"
    assert (second.status, second.executed_action, second.effective_rho) == (Status.ACCEPTED, Action.HOLD, 1.0)
    assert (outcome.boot_id, outcome.step, outcome.node) == (BOOT, 0, "n0")


async def test_an_eviction_answers_at_once_and_completes_by_its_action_id_later(rig):
    first = await rig.step(rig.action(0, Action.EVICT), rig.action(1))
    receipt = outcomes_of(first)[0]
    assert (receipt.status, receipt.executed_action, receipt.evicted_bytes) == (Status.ACCEPTED, Action.EVICT, 0)
    assert rig.engines.fleet.told[-1]["evict_bytes"][0] == 3 * GIB, "half of the idle KV"
    second = await rig.step(rig.action(0), rig.action(1))
    assert [one.kind for one in outcomes_of(second)] == [OutcomeKind.RECEIPT] * 2, "2 of 3 GiB are out: not done"
    third = await rig.step(rig.action(0), rig.action(1))
    completion = outcomes_of(third)[-1]
    assert (completion.kind, completion.action_id) == (OutcomeKind.COMPLETION, receipt.action_id)
    assert completion.evicted_bytes == 3 * GIB


async def test_a_compaction_that_the_engine_refuses_is_told_and_its_quota_renewed(rig):
    outcome = outcomes_of(await rig.step(rig.action(0, Action.COMPACT), rig.action(1)))[0]
    assert (outcome.status, outcome.refusal) == (Status.REFUSED, Refusal.ENGINE_REFUSED), "no memory behind its blocks"
    assert outcome.executed_action == Action.HOLD
    assert rig.engines.quotas[0].lease_until_ns == 3 * STEP_NS


@pytest.mark.parametrize("rig", [(ServiceClass.COPILOT, 0)], indirect=True)
async def test_a_copilot_worker_never_evicts(rig):
    for _ in range(4):
        outcome = outcomes_of(await rig.step(rig.action(0, Action.EVICT), rig.action(1)))[0]
        assert (outcome.status, outcome.refusal) == (Status.REFUSED, Refusal.CLASS_FORBIDS)
        assert outcome.executed_action == Action.HOLD
        assert outcome.effective_rho == 1.0, "its quota is renewed all the same"
    assert sum(told["evict_bytes"][0] for told in rig.engines.fleet.told) == 0


@pytest.mark.parametrize("rig", [(ServiceClass.COPILOT, 0)], indirect=True)
async def test_a_class_caps_rho_and_the_outcome_says_so(rig):
    outcome = outcomes_of(await rig.step(rig.action(0, Action.WIDEN, 1.5), rig.action(1)))[0]
    assert (outcome.status, outcome.refusal) == (Status.CLIPPED, Refusal.CLASS_FORBIDS)
    assert (outcome.requested_rho, outcome.effective_rho) == (1.5, 1.3)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"deadline_ns": STEP_NS - 1}, Refusal.LATE),
        ({"lease_ns": STEP_NS}, Refusal.LATE),
        ({"target_rho": 1.7}, Refusal.OUT_OF_RANGE),
        ({"target_rho": float("nan")}, Refusal.OUT_OF_RANGE),
        ({"target_max_running": 2000}, Refusal.OUT_OF_RANGE),
        ({"action": 9}, Refusal.OUT_OF_RANGE),
        ({"base_generation": 0}, Refusal.OLDER_GENERATION),
    ],
)
async def test_what_must_not_act_is_refused_holds_and_renews_nothing(rig, changes, refusal):
    await rig.step(rig.action(0, Action.WIDEN, 1.2), rig.action(1))
    quota = rig.engines.quotas[0]
    before = (quota.rho, quota.generation, quota.lease_until_ns)
    refused = rig.action(0, **({"action": Action.WIDEN, "target_rho": 1.3} | changes))
    outcome = outcomes_of(await rig.step(refused, rig.action(1)))[0]
    assert (outcome.status, outcome.refusal, outcome.executed_action) == (Status.REFUSED, refusal, Action.HOLD)
    assert (quota.rho, quota.generation, quota.lease_until_ns) == before
    assert outcome.effective_rho == 1.2, "the effective quota is the one in force, whatever was asked"


async def test_a_repeated_or_older_batch_does_nothing(rig):
    data = await rig.send(rig.action(0, Action.EVICT), rig.action(1))
    await asyncio.wait_for(rig.outcomes.get(), 10)
    await rig.bus.publish(subject("action", "n0"), data)
    rig.engines.advance()
    await rig.send(rig.action(0), rig.action(1))
    outcome, _ = await asyncio.wait_for(rig.outcomes.get(), 10)
    assert outcome.step == 1, "the repeat gave no outcome"
    assert rig.service.counts.duplicates == 1
    assert rig.engines.fleet.told[-1]["evict_bytes"][0] == 3 * GIB, "one eviction, not two"


async def test_bytes_that_are_no_batch_and_workers_that_are_not_there_are_counted(rig):
    await rig.bus.publish(subject("action", "n0"), b"\xc1 garbage")
    stranger = rig.action(0, worker="n0/3/w9")
    foreign = rig.action(0, worker="elsewhere/0/w0")
    outcome = await rig.step(rig.action(0), rig.action(1), stranger, foreign)
    assert [one.refusal for one in outcomes_of(outcome)[2:]] == [Refusal.UNKNOWN_WORKER] * 2
    assert (rig.service.counts.decode_errors, rig.service.counts.unknown_workers) == (1, 2)


async def test_an_engine_that_is_gone_does_not_hold_up_the_others(rig):
    await rig.step(rig.action(0), rig.action(1))
    await rig.replay.close()
    await rig.send(rig.action(0), rig.action(1))
    outcome, _ = await asyncio.wait_for(rig.outcomes.get(), 10)
    assert [one.refusal for one in outcomes_of(outcome)] == [Refusal.ENGINE_UNREACHABLE] * 2
    assert [one.executed_action for one in outcomes_of(outcome)] == [Action.HOLD] * 2
    await rig.replay.open(rig.folder)
    rig.engines.advance()
    back = await rig.step(rig.action(0), rig.action(1))
    assert [one.status for one in outcomes_of(back)] == [Status.ACCEPTED] * 2


async def test_tpot_beyond_its_limit_halves_what_the_card_may_move(rig):
    reasons = (0, int(MaskReason.LATENCY_AT_LIMIT), 0, 0, 0)
    for _ in range(3):
        await rig.step(rig.action(0), rig.action(1, mask_reasons=reasons))
    await rig.step(rig.action(0, Action.EVICT), rig.action(1, mask_reasons=reasons))
    assert rig.engines.fleet.told[-1]["evict_bytes"][0] == pytest.approx(25e9 / 2**4, rel=1e-6)


async def test_every_step_is_kept_in_the_audit_stream(rig):
    data = await rig.send(rig.action(0, Action.WIDEN, 1.1), rig.action(1))
    outcome, message = await asyncio.wait_for(rig.outcomes.get(), 10)
    consumer = await rig.bus.pull_consumer(STREAM_AUDIT, "test")
    (delivery,) = await consumer.fetch(1, 5.0)
    record = AUDIT_RECORD.decode(delivery.data)
    assert (record.actions, record.outcomes, record.gaps) == (data, message.data, 0)
    assert (record.node, record.step) == (outcome.node, outcome.step)
    await consumer.stop()


async def test_an_actuator_that_starts_describes_every_engine_first(rig):
    await rig.step(rig.action(0, Action.WIDEN, 1.4), rig.action(1))
    await rig.service.stop()
    await rig.shell.cancel_tasks()
    await rig.start_actuator()
    known = [member.known for member in rig.service._nodes["n0"].steps.members.values()]
    assert [one.rho for one in known] == [1.4, 1.0], "it takes up what is in force and changes nothing by itself"
    assert rig.engines.quotas[0].rho == 1.4
