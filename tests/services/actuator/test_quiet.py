"""Steps that repeat the one before are taken the short way, and nobody can tell by what comes out."""

from __future__ import annotations

import msgspec

from schemas.actions import ALL_ACTIONS, Action, MaskReason, WorkerAction, action_batch, columns_of
from schemas.engine import Receipt, SetQuota
from schemas.identity import action_id
from schemas.outcomes import Refusal, Status, WorkerOutcome, outcomes_of
from services.actuator.effects import EffectSettings
from services.actuator.engines.loopback import LoopbackEngine
from services.actuator.steps import NodeSteps
from services.errors import EngineUnreachable
from services.spans import NULL_SPAN

BOOT = 7
WORKERS = ("n0/0/w0", "n0/0/w1", "n0/1/w2")


class Recorder(LoopbackEngine):
    """Keeps what it was told; fails when told to."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.told: list[SetQuota] = []
        self.gone = False
        self.foreign = 0
        """Generations that somebody else's commands added."""

    async def set_quota(self, command: SetQuota) -> Receipt:
        if self.gone:
            raise EngineUnreachable(self.worker, "gone")
        self.told.append(command)
        receipt = await super().set_quota(command)
        return msgspec.structs.replace(receipt, generation=receipt.generation + self.foreign)


class Node:
    """Three recording engines on two cards."""

    def __init__(self) -> None:
        self.engines = {worker: Recorder(worker) for worker in WORKERS}
        self.steps = NodeSteps("n0", self.engines.get, EffectSettings())

    @property
    def short(self) -> bool:
        """Whether the next step may be a repetition."""
        return self.steps._quiet is not None

    async def step(self, step: int, rho: float = 1.1, **changes: object) -> list[WorkerOutcome]:
        generation = max(engine._generation for engine in self.engines.values())
        rows = [
            WorkerAction(
                worker, action_id(worker, BOOT, step), Action.HOLD, rho, 256, generation, 1000 + step, 2000 + step,
                "heuristic", 1.0, ALL_ACTIONS, (0,) * 5,
            )._replace(**changes)
            for worker in WORKERS
        ]  # fmt: skip
        batch = action_batch("n0", BOOT, step, step, rows)
        outcomes = await self.steps.execute(batch, columns_of(batch), NULL_SPAN)
        assert (outcomes.boot_id, outcomes.step) == (BOOT, step)
        return outcomes_of(outcomes)


async def quiet_node() -> Node:
    node = Node()
    for step in range(3):
        await node.step(step)
    assert node.short, "the same three times over"
    return node


async def test_a_repeated_step_renews_every_lease_and_reports_as_the_long_way_does() -> None:
    node = await quiet_node()
    before = await node.step(3)
    after = await node.step(4, mask=3, probability=0.5, hold=2)
    assert node.short
    told = [engine.told[-1] for engine in node.engines.values()]
    assert [one.lease_ns for one in told] == [2004] * 3
    assert [one.deadline_ns for one in told] == [1004] * 3
    assert [one.action_id for one in told] == [action_id(worker, BOOT, 4) for worker in WORKERS]
    changes = [{"action_id": action_id(w, BOOT, 4), "mask": 3, "probability": 0.5, "hold": 2} for w in WORKERS]
    assert after == [one._replace(**change) for one, change in zip(before, changes, strict=True)]


async def test_another_command_is_executed_at_once() -> None:
    node = await quiet_node()
    (first, *_) = await node.step(3, rho=1.2)
    assert (first.status, first.effective_rho) == (Status.ACCEPTED, 1.2)
    (first, *_) = await node.step(4, rho=1.2, action=Action.WIDEN)
    assert (first.executed_action, first.effective_rho) == (Action.WIDEN, 1.2)


async def test_what_must_not_act_is_refused_though_it_repeats() -> None:
    node = await quiet_node()
    node.engines[WORKERS[1]].t_ns = 1500  # type: ignore[misc]  # its clock went on
    outcomes = await node.step(3)
    assert [one.refusal for one in outcomes] == [Refusal.NONE, Refusal.LATE, Refusal.NONE]
    assert node.engines[WORKERS[1]].told[-1].lease_ns == 0, "a lease that is over renews nothing"
    assert not node.short


async def test_an_engine_that_answers_otherwise_or_not_at_all_ends_the_quiet() -> None:
    node = await quiet_node()
    node.engines[WORKERS[0]].foreign = 1
    outcomes = await node.step(3)
    assert outcomes[0].effective_generation > outcomes[1].effective_generation, "somebody else commanded it"
    node = await quiet_node()
    node.engines[WORKERS[2]].gone = True
    outcomes = await node.step(3)
    assert [one.refusal for one in outcomes] == [Refusal.NONE, Refusal.NONE, Refusal.ENGINE_UNREACHABLE]
    assert outcomes[2].executed_action == Action.HOLD


async def test_a_card_in_trouble_is_planned_anew() -> None:
    node = await quiet_node()
    await node.step(3, mask_reasons=(0, int(MaskReason.LATENCY_AT_LIMIT), 0, 0, 0))
    assert not node.short
    assert node.steps.account.cards[0].scale < 1.0
