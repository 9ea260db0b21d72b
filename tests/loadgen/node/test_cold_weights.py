"""The whole of it, over sockets: a long-tail model idles, its neighbour is out of memory, the weights leave and come
back on the first request, and every byte is where it should be all the time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Weights
from loadgen.engine.specs import EngineMode, FleetConfig
from loadgen.node import memory
from loadgen.node.emulation import Emulation
from loadgen.node.replay import Replay
from schemas.actions import ALL_ACTIONS, Action, Hold, WorkerAction, action_batch, columns_of
from schemas.classes import ServiceClass
from schemas.engine import Failure, Receipt, SetWeights
from schemas.identity import STEP_NS, STEP_S, action_id
from schemas.metrics import COLUMN
from schemas.outcomes import outcomes_of
from services.actuator.cold_weights import ColdWeightSettings
from services.actuator.effects import EffectSettings
from services.actuator.engines import emulated
from services.actuator.steps import NodeSteps
from services.spans import NULL_SPAN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import plain, random_table

BOOT = 7
WORKERS = ("n0/0/w0", "n0/0/w1")
BUSY, RARE = 0, 1
ASKED_S = 160.05
SIZE = 29.5e9
SETTINGS = ColdWeightSettings(enabled=True, idle_before_sleep_s=20.0, min_awake_s=30.0)


class Rig:
    """A node's sockets and the steps that command it, in lockstep."""

    def __init__(self, folder: Path) -> None:
        config = FleetConfig(
            workers_per_card=2,
            model=("Llama-3.1-8B", "Qwen2.5-14B"),
            shares=(0.8, 0.2),
            mode=EngineMode(prefetch=False),
            client_timeouts=False,
        )
        busy = random_table(np.random.default_rng(0), 3.5, 260.0, 3.0)
        self.fleet = Fleet(config, [busy, plain([ASKED_S], kind=ServiceClass.AGENT)])
        self.engines = Emulation(self.fleet, WORKERS, (ServiceClass.CHAT, ServiceClass.AGENT), config.limits)
        self.engines.memory = self.memory = memory.create(
            self.fleet, str(folder), self.engines.base_receipt, self.engines.asker, budget_bytes=8 << 20
        )
        self.engines.asked_by(BOOT)
        self.replay = Replay(self.engines, duration_s=1000, step_timeout_s=30, speed=0)
        self.folder = folder
        self.hold = Hold.NONE
        self.told: list[str] = []
        self.start_actuator()

    def start_actuator(self) -> None:
        self.steps = NodeSteps(
            "n0", lambda worker: emulated.connect(self.folder, worker, 60.0), EffectSettings(), cold=SETTINGS
        )

    async def step(self) -> None:
        engines = self.engines
        rows = [
            WorkerAction(
                worker, action_id(worker, BOOT, engines.step), Action.HOLD, rho, quota.max_running, quota.generation,
                engines.t_ns + STEP_NS, engines.t_ns + 3 * STEP_NS, "heuristic", 1.0, ALL_ACTIONS, (0,) * 5,
                hold=self.hold,
            )
            for worker, quota, rho in zip(WORKERS, engines.quotas, (1.4, 1.0), strict=True)
        ]  # fmt: skip
        batch = action_batch("n0", BOOT, engines.step, engines.t_ns, rows)
        outcomes = outcomes_of(await self.steps.execute(batch, columns_of(batch), NULL_SPAN))
        self.told += [one.detail for one in outcomes if one.detail]
        assert not any(one.refusal for one in outcomes), "quotas that the engines take"
        assert engines.commanded
        engines.advance()
        check_accounts(self.fleet)

    async def until(self, state: Weights, limit_s: float) -> None:
        while self.fleet.weights(RARE).state != state:
            await self.step()
            assert self.t_s < limit_s, f"still {self.fleet.weights(RARE)}: {self.told}"

    @property
    def t_s(self) -> float:
        return self.engines.step * STEP_S

    def metric(self, worker: int, name: str) -> float:
        return float(self.engines.metrics[worker, COLUMN[name]])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    try:
        await made.replay.open(tmp_path)
        yield made
        await made.steps.close()
        await made.replay.close()
    finally:
        made.memory.close()


@pytest.mark.timeout(300)  # the engine may have to be compiled
async def test_weights_leave_for_a_neighbour_in_need_and_the_first_request_brings_them_back(rig: Rig) -> None:
    before = rig.metric(BUSY, "card_kv_capacity_bytes")
    await rig.until(Weights.ASLEEP, ASKED_S)
    assert rig.metric(BUSY, "card_kv_capacity_bytes") == before + SIZE
    await rig.step()
    await rig.step()
    assert rig.engines.quotas[BUSY].hard_bytes > before, "the neighbour may map what they left"
    while rig.t_s < ASKED_S:
        await rig.step()
    assert rig.metric(BUSY, "kv_mapped_bytes") > before, "and it does"
    await rig.until(Weights.AWAKE, ASKED_S + 30.0)
    for _ in range(5):
        await rig.step()
    found = rig.fleet.results()
    first_token_s = float(found.first_token_s[found.worker == RARE][0])
    copy_s = SIZE / 25e9
    assert first_token_s - ASKED_S > copy_s, "it waited for the copy"
    assert first_token_s - ASKED_S < copy_s + 5 * STEP_S, "and for the neighbour to give the room up"
    assert rig.engines.quotas[BUSY].hard_bytes < before
    assert found.oom.sum() == 0
    assert rig.memory.figures()["wrong"] == 0
    assert f"weights: asleep: {SIZE / 1e9:.1f} GB off the card" in rig.told
    assert f"weights: awake: weights on the card: {SIZE / 1e9:.1f} GB" in rig.told


@pytest.mark.timeout(300)
async def test_an_actuator_that_was_killed_finds_the_sleeper_and_wakes_it(rig: Rig) -> None:
    await rig.until(Weights.ASLEEP, ASKED_S)
    await rig.steps.close()
    rig.start_actuator()
    await rig.steps.rebuild(WORKERS)
    await rig.step()
    before = rig.fleet.config.kv_capacity_bytes()
    assert rig.engines.quotas[BUSY].hard_bytes > before, "rebuilt from what the engines say"
    while rig.t_s < ASKED_S:
        await rig.step()
    await rig.until(Weights.AWAKE, ASKED_S + 40.0)


@pytest.mark.timeout(300)
async def test_in_shadow_nothing_leaves(rig: Rig) -> None:
    rig.hold = Hold.SHADOW
    while rig.t_s < ASKED_S:
        await rig.step()
    assert rig.fleet.weights(RARE).state == Weights.AWAKE


async def test_the_verb_tells_why_it_cannot_and_its_receipt_is_done_when_memory_shows_it(rig: Rig) -> None:
    engines, worker = rig.engines, WORKERS[RARE]
    said = engines.answer(worker, SetWeights(False, "a"))
    assert isinstance(said, Receipt)
    assert not said.done, "an acknowledgement is not an effect"
    assert engines.answer(worker, SetWeights(True, "b")) == Failure("busy", "a copy the other way is under way")
    engines.advance()
    receipt = engines._receipt(RARE, "a")
    assert (receipt.done, receipt.detail) == (True, "weights off the card: 29.5 GB")
    again = engines.answer(worker, SetWeights(False, "a"))
    assert isinstance(again, Receipt), "a repeat does nothing"
    assert again.done
