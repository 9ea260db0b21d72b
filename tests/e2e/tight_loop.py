"""The loop in one process: emulated fleet, decision, learner and examiner on an in-memory bus, a step at a time.

Telemetry, featurizer and actuator are the pure parts that ``loadgen.control`` calls; decision, learner and examiner
are the services themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import numpy as np

from loadgen.control import Control
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.examiner.service import Examiner
from loadgen.examiner.settings import Settings as ExaminerSettings
from loadgen.examiner.trials import Result, Trial, Trials, run
from schemas.actions import ACTION_BATCH, ActionBatch, actions_of
from schemas.codec import pack
from schemas.features import FEATURE_HASH
from schemas.identity import SCHEMA_VERSION, STEP_NS, worker_id
from schemas.policies import PolicyPointer
from schemas.states import STATE_BATCH, StateBatch
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, STREAM_SUBJECTS, STREAM_TRANSITIONS, subject, wildcard
from schemas.transitions import TRANSITION_BATCH, TransitionBatch
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.decision.heuristic import HeuristicSettings
from services.decision.policy import rule
from services.decision.service import Decision
from services.decision.settings import Settings as DecisionSettings
from services.learner.service import LearnerService
from services.learner.settings import Settings as LearnerSettings
from services.observe import Observe
from services.shell import Service, Shell

NODE = "n0"
BOOT = time.time_ns()
HEURISTIC = rule("heuristic", HeuristicSettings(), np.random.default_rng(0))


class TightLoop:
    """``trial``: the fleet and its requests."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.network = MemoryNetwork()
        self.bus = MemoryBus(self.network)
        self.step = 0
        self.acting: list[str] = []
        """Policy version that answered, a step."""
        self.by_worker: list[tuple[str, ...]] = []
        """Behaviour policy of each worker, a step."""
        self.shells: dict[str, Shell] = {}
        self.services: dict[str, Any] = {}
        self._fleet = Fleet(trial.config, trial.tables)
        self._control = Control(self._fleet, trial.config, trial.tables)
        self._workers = tuple(
            worker_id(NODE, int(card), f"w{i}") for i, card in enumerate(np.asarray(self._fleet.card_of))
        )
        self._answers: asyncio.Queue[ActionBatch] = asyncio.Queue()

    async def start(self) -> None:
        async def on_batch(messages: list[Message]) -> None:
            for message in messages:
                batch = ACTION_BATCH.decode(message.data)
                if batch.node == NODE:
                    self._answers.put_nowait(batch)

        await self.bus.ensure_stream(
            STREAM_TRANSITIONS, STREAM_SUBJECTS[STREAM_TRANSITIONS], max_age_s=3600, max_bytes=1 << 30
        )
        await self.bus.subscribe(wildcard("action"), on_batch)
        await self.launch("decision", Decision(DecisionSettings(fetch_tries=1, fetch_pause_s=0.0)))

    async def launch(self, name: str, service: Service) -> None:
        shell = Shell(name, f"{name}-0", bus=MemoryBus(self.network), observe=Observe(name), clock=ManualClock(1))
        self.shells[name], self.services[name] = shell, service
        await service.start(shell)

    async def launch_examiner(self, settings: ExaminerSettings, trials: Sequence[Trial] = ()) -> Examiner:
        own = Trials(lambda: list(trials) or [self.trial])
        examiner = Examiner(settings, trials=own)
        await self.launch("examiner", examiner)
        return examiner

    async def launch_learner(self, settings: LearnerSettings) -> LearnerService:
        learner = LearnerService(settings)
        await self.launch("learner", learner)
        return learner

    async def kill(self, name: str) -> None:
        """What kill -9 leaves: nothing is saved, nothing is told."""
        del self.services[name]
        await self.shells.pop(name).cancel_tasks()

    async def stop(self) -> None:
        failed = [shell.failed for shell in self.shells.values() if shell.failed is not None]
        for name, service in reversed(self.services.items()):
            await service.stop()
            await self.shells[name].cancel_tasks()
            await self.shells[name].bus.drain()
        await self.bus.drain()
        assert not failed

    async def advance(self, steps: int) -> None:
        """That many steps of the loop; what services do beside them has its turn in between."""
        for _ in range(steps):
            seen = self._control.observe(self.step)
            await self._send_transitions()
            rows = len(self._workers)
            state = StateBatch(
                NODE, BOOT, self.step, SCHEMA_VERSION, self.step * STEP_NS, FEATURE_HASH, self._workers,
                tuple(seen.classes.tolist()), tuple(seen.holds.tolist()), (0,) * rows, pack(seen.features, "<f4"),
            )  # fmt: skip
            await self.bus.publish(subject("state", NODE), STATE_BATCH.encode(state))
            answer = await asyncio.wait_for(self._answers.get(), 10)
            assert answer.step == self.step
            self.acting.append(answer.policy_version)
            self.by_worker.append(tuple(one.policy for one in actions_of(answer)))
            self._control.act(np.frombuffer(answer.actions, np.uint8).astype(np.int64))
            self._fleet.advance(STEP_NS / 1e9)
            self.step += 1

    async def publish(self, key: str, pointer: PolicyPointer, data: bytes | None = None) -> None:
        """The object first, then the pointer."""
        if data is not None:
            await self.bus.object_put(BUCKET_WEIGHTS, pointer.version, data)
        await self.bus.kv_put(BUCKET_POLICY, key, msgspec.json.encode(pointer))

    async def until(self, true: Callable[[], bool], what: str, stepping: bool = False) -> None:
        """Wait for something that has no event of its own; ``stepping``: the fleet goes on meanwhile."""
        try:
            async with asyncio.timeout(20):
                while not true():
                    if stepping:
                        await self.advance(1)
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(f"not within 20 s: {what}") from None

    async def settle(self) -> None:
        """Give the services' tasks and threads a moment: the fleet's time is not theirs."""
        for _ in range(5):
            await asyncio.sleep(0.004)

    def metric(self, service: str, name: str, **labels: str) -> float:
        return self.shells[service].observe.registry.get_sample_value(f"tidegate_{service}_{name}", labels) or 0.0

    def goodput(self) -> float:
        """Tokens per second within the SLO, of the whole run; so far only, where it did not go to the end."""
        return float(summary(self._fleet.results(), 60.0).goodput_tokens_per_s)

    async def _send_transitions(self) -> None:
        found = self._control.transitions()
        if found is None or not found.whole.any():
            return
        rows = np.flatnonzero(found.whole)
        batch = TransitionBatch(
            NODE, BOOT, self.step - 1, SCHEMA_VERSION, self.step * STEP_NS, FEATURE_HASH,
            tuple(self._workers[row] for row in rows), tuple(self.by_worker[-1][row] for row in rows),
            pack(found.states[rows], "<f4"), pack(found.next_states[rows], "<f4"), pack(found.actions[rows], "u1"),
            pack(found.masks[rows], "u1"), pack(found.next_masks[rows], "u1"), pack(np.ones(len(rows)), "<f4"),
            pack(found.rewards[rows], "<f4"), pack(found.discounts[rows], "<f4"),
            pack(found.discounts[rows] == 0, "u1"),
        )  # fmt: skip
        await self.bus.publish_stream(
            subject("transition", NODE), TRANSITION_BATCH.encode(batch), message_id=f"{NODE}.{self.step}"
        )


@asynccontextmanager
async def tight_loop(trial: Trial) -> AsyncIterator[TightLoop]:
    async with AsyncExitStack() as stack:
        loop = TightLoop(trial)
        await loop.start()
        stack.push_async_callback(loop.stop)
        yield loop


def under_heuristic(trial: Trial) -> Result:
    """The same requests under the heuristic, offline."""
    return run(trial, HEURISTIC)
