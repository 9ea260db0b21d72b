"""A node whose workers' engines are :class:`QuotaEngine` behind real sockets, commanded a step at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from schemas.actions import ALL_ACTIONS, MAX_RUNNING_START, Action, WorkerAction, action_batch, columns_of
from schemas.identity import STEP_NS, action_id
from schemas.outcomes import WorkerOutcome, outcomes_of
from services.actuator.cold_weights import OFF, ColdWeightSettings
from services.actuator.effects import EffectSettings
from services.actuator.engines.connecting import Connector, EngineSettings
from services.actuator.engines.vllm.sleeping import SleepSettings
from services.actuator.steps import NodeSteps
from services.clock import ManualClock
from services.nvml import Nvml
from services.spans import NULL_SPAN
from tests.services.actuator.quota_engine import QuotaEngine

BOOT = 7


class Node:
    """``engines``: what is told of each beside its socket. The clock moves a step with each step."""

    def __init__(
        self,
        folder: Path,
        engines: Sequence[EngineSettings] = (),
        cold: ColdWeightSettings = OFF,
        nvml: Nvml | None = None,
    ) -> None:
        self.folder = folder
        self.clock = ManualClock(STEP_NS)
        quick = SleepSettings(settle_s=0.05, look_s=0.01)
        self.connector = Connector(engines, 5.0, self.clock, nvml, quick)
        self.engines: list[QuotaEngine] = []
        self.number = 0
        self.outcomes: list[WorkerOutcome] = []
        self._cold = cold
        self.begin()

    def begin(self) -> None:
        """As an actuator that has just started."""
        self.steps = NodeSteps(
            "n0", lambda worker: self.connector.connect(self.folder, worker), EffectSettings(reserve_bytes=0),
            cold=self._cold,
        )  # fmt: skip

    async def serve(self, *engines: QuotaEngine) -> None:
        for engine in engines:
            await engine.serve(self.folder)
            self.engines.append(engine)

    async def close(self) -> None:
        await self.steps.close()
        await self.connector.close()
        for engine in self.engines:
            await engine.sockets.close()

    async def step(self, changes: Sequence[dict[str, object]] = ()) -> list[WorkerOutcome]:
        """One step, every engine held at rho 1.0 but for its ``changes``."""
        self.number += 1
        now_ns = self.clock.now_ns()
        rows = [
            WorkerAction(
                engine.worker, action_id(engine.worker, BOOT, self.number), Action.HOLD, 1.0, MAX_RUNNING_START,
                engine.quota.generation, now_ns + STEP_NS, now_ns + 3 * STEP_NS, "heuristic", 1.0, ALL_ACTIONS,
                (0,) * 5,
            )._replace(**change)
            for engine, change in zip(self.engines, changes or ({},) * len(self.engines), strict=True)
        ]  # fmt: skip
        batch = action_batch("n0", BOOT, self.number, now_ns, rows)
        self.outcomes = outcomes_of(await self.steps.execute(batch, columns_of(batch), NULL_SPAN))
        self.clock.advance_to(now_ns + STEP_NS)
        return self.outcomes
