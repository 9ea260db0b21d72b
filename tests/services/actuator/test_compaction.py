"""A node's steps compact in the arena of an engine in another process, and that process dies."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from schemas.actions import ALL_ACTIONS, Action, WorkerAction, action_batch, columns_of
from schemas.engine import Description, SetQuota
from schemas.identity import action_id
from schemas.outcomes import Refusal, Status, WorkerOutcome, outcomes_of
from services.actuator.effects import EffectSettings
from services.actuator.engines.protocol import SocketEngine
from services.actuator.memory.attachment import gate_path
from services.actuator.steps import NodeSteps
from services.observe import Observe
from services.settings import CommonSettings
from services.spans import NULL_SPAN, Span

from .memory.relocation.processes import WORKER, EngineProcess, assert_served_right, connect
from .spans import spans_in

BOOT = 7


class Watched:
    """The engine's adapter, with the quotas that were sent, and a description that a test may falsify."""

    def __init__(self, engine: SocketEngine) -> None:
        self._engine = engine
        self.quotas: list[SetQuota] = []
        self.falsified: dict[str, object] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def describe(self) -> Description:
        return msgspec.structs.replace(await self._engine.describe(), **self.falsified)

    async def set_quota(self, command: SetQuota) -> object:
        self.quotas.append(command)
        return await self._engine.set_quota(command)


class Rig:
    def __init__(self, path: Path) -> None:
        self.process = EngineProcess(path, "--seed", "4", "--plan", "compact")
        self.engine = Watched(connect(path))
        self.steps = NodeSteps("n0", {WORKER: self.engine}.get, EffectSettings())
        self.step = 0
        self.generation = 0

    async def act(self, action: Action, span: Span = NULL_SPAN) -> WorkerOutcome:
        self.step += 1
        now_ns = time.monotonic_ns()
        row = WorkerAction(
            WORKER, action_id(WORKER, BOOT, self.step), action, 1.0, 16, self.generation, now_ns + 10**10,
            now_ns + 2 * 10**10, "heuristic", 1.0, ALL_ACTIONS, (0,) * 5,
        )  # fmt: skip
        batch = action_batch("n0", BOOT, self.step, now_ns, [row])
        (outcome,) = outcomes_of(await self.steps.execute(batch, columns_of(batch), span))
        self.generation = max(self.generation, outcome.effective_generation)
        assert self.engine.quotas[-1].step == self.step, "whatever became of it, the lease was to be renewed"
        return outcome

    async def compacted(self, span: Span = NULL_SPAN) -> WorkerOutcome:
        """Compact until there is something to gain: the engine's sessions come and go."""
        while True:
            outcome = await self.act(Action.COMPACT, span)
            if outcome.status != Status.DEFERRED:
                return outcome


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path / "0-w0.sock")
    try:
        rig.process.start()
        yield rig
        await rig.steps.close()
    finally:
        rig.process.close()


async def test_the_actuator_copies_in_the_engines_arena_and_says_so(rig: Rig, tmp_path: Path) -> None:
    observe = Observe("actuator")
    common = CommonSettings(trace_file=str(tmp_path / "spans.jsonl"), trace_ratio=1.0)
    observe.start(common, {}, instance="t", rng=random.Random(1))
    with observe.span("actuate") as span:
        outcome = await rig.compacted(span)
    observe.stop(5.0)
    assert (outcome.status, outcome.executed_action) == (Status.ACCEPTED, Action.COMPACT), outcome.detail
    (moved,) = outcome.moved
    assert (moved.kind, moved.path, moved.asked_by, moved.scale) == ("move", "batch", outcome.action_id, 1)
    assert moved.bytes == moved.pieces * 4096 >= outcome.compacted_bytes > 0
    assert moved.seconds > 0
    sums = rig.steps.ledger.transfers["move", "batch"]
    assert (sums.transfers, sums.bytes, rig.steps.ledger.moved_bytes) == (1, moved.bytes, outcome.compacted_bytes)
    told = spans_in(tmp_path / "spans.jsonl", "compact")[-1]
    assert (told["tidegate.bytes"], told["tidegate.pieces"]) == (moved.bytes, moved.pieces)
    assert (told["tidegate.path"], told["tidegate.scale"]) == ("batch", 1)
    assert told["tidegate.pause_us"] == pytest.approx(outcome.pause_us)
    for _ in range(20):
        await rig.compacted()
    assert_served_right(rig.process.report())


async def test_an_arena_that_vanished_refuses_the_compaction_and_not_the_lease(rig: Rig) -> None:
    await rig.compacted()
    rig.process.segment.unlink()
    outcome = await rig.compacted()
    assert (outcome.status, outcome.refusal) == (Status.REFUSED, Refusal.ENGINE_REFUSED)
    assert outcome.executed_action == Action.HOLD
    assert "removed it" in outcome.detail
    assert rig.engine.quotas[-1].lease_ns > 0
    assert not rig.process.report().open_ticket, "what was prepared was given up"
    again = await rig.compacted()
    assert "No such file" in again.detail, "it is looked for anew, and is not there"
    held = await rig.act(Action.HOLD)
    assert held.status == Status.ACCEPTED
    assert_served_right(rig.process.report())


async def test_an_arena_of_another_scale_than_described_is_not_touched(rig: Rig) -> None:
    rig.engine.falsified = {"arena_scale": 2}
    outcome = await rig.act(Action.COMPACT)
    while outcome.status == Status.DEFERRED:  # no holes at that moment
        outcome = await rig.act(Action.COMPACT)
    assert (outcome.status, outcome.refusal) == (Status.REFUSED, Refusal.ENGINE_REFUSED)
    assert "found 4096, expected 4096 as described at a scale of 2" in outcome.detail
    assert rig.process.report().relocation.prepared == 0


async def test_a_killed_engine_is_told_and_its_next_life_is_compacted_in_its_own_arena(rig: Rig) -> None:
    await rig.compacted()
    relocate = rig.steps.members[WORKER].relocator.relocate

    async def killed_before(*arguments: object, **named: object) -> object:
        rig.process.kill()
        return await relocate(*arguments, **named)

    rig.steps.members[WORKER].relocator.relocate = killed_before  # type: ignore[assignment,method-assign]
    outcome = await rig.compacted()
    assert (outcome.status, outcome.refusal) == (Status.REFUSED, Refusal.ENGINE_UNREACHABLE)
    rig.steps.members[WORKER].relocator.relocate = relocate  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="lease"):
        await rig.act(Action.HOLD)  # nobody there: described on no connection, nothing is sent
    gate_path(rig.process.arena).unlink()
    rig.process.start()
    rig.generation = 0
    again = await rig.compacted()
    assert again.status == Status.ACCEPTED, again.detail
    assert_served_right(rig.process.report())
