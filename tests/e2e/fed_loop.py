"""The tight loop with the telemetry and featurizer services in it: telemetry reads the node's socket, where a test may
lie, and everything after it goes over the bus, where a test may publish what it likes.

The emulated fleet and the way of its commands stay as in ``tight_loop``: the fleet is what truly happens.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.examiner.trials import Trial
from loadgen.node.replay import NODE_SOCKET
from schemas.actions import ActionBatch, actions_of, columns_of
from schemas.codec import pack
from schemas.engine import Failure, ReplyBody, RequestBody, Sample, SampleReply
from schemas.identity import STEP_NS
from schemas.outcomes import OUTCOME_BATCH
from schemas.subjects import subject
from services.actuator.engines.serving import Sockets
from services.actuator.results import Results
from services.featurizer.service import Featurizer
from services.featurizer.settings import Settings as FeaturizerSettings
from services.telemetry.service import Telemetry
from services.telemetry.settings import Settings as TelemetrySettings
from tests.e2e.tight_loop import NODE, TightLoop

Lie = Callable[[int, NDArray[np.float64]], SampleReply | Failure | NDArray[np.float64]]
"""From a step and the true METRICS rows to what the node says: other rows, or another answer altogether, after which
it is asked again."""


class FedLoop(TightLoop):
    """``folder``: of the node's socket. ``lie`` is asked once a step."""

    def __init__(self, trial: Trial, folder: Path) -> None:
        super().__init__(trial)
        self.lie: Lie = lambda _, metrics: metrics
        self._folder = folder
        self._sockets = Sockets(lambda: self.step * STEP_NS)
        self._said: dict[int, SampleReply | Failure] = {}
        """What is answered in a step before the truth."""
        self._told = -1
        self._moved = asyncio.Condition()
        self._classes: tuple[int, ...] = ()

    async def start(self) -> None:
        await super().start()
        await self._sockets.serve(self._folder / NODE_SOCKET, self._answer)
        await self.launch("featurizer", Featurizer(FeaturizerSettings()))
        telemetry = TelemetrySettings(node=NODE, sockets=str(self._folder), boot_file="", poll_s=30.0, retry_s=0.001)
        await self.launch("telemetry", Telemetry(telemetry))

    async def stop(self) -> None:
        await super().stop()
        await self._sockets.close()

    async def advance(self, steps: int) -> None:
        """That many steps, each begun by telemetry's own question."""
        for _ in range(steps):
            seen = self._control.observe(self.step)
            self._classes = tuple(seen.classes.tolist())
            async with self._moved:
                self._said[self.step] = self._reply(self.lie(self.step, self._fleet.metrics()))
                self._told = self.step
                self._moved.notify_all()
            answer = await self._own_answer()
            rows = actions_of(answer)
            self.acting.append(answer.policy_version)
            self.by_worker.append(tuple(one.policy for one in rows))
            executed = self._control.act(np.array([one.action for one in rows]))
            await self._send_outcome(answer, executed)
            self._fleet.advance(STEP_NS / 1e9)
            self.step += 1

    async def _own_answer(self) -> ActionBatch:
        """The commands for this step; a forged sample may have brought others."""
        while True:
            answer = await asyncio.wait_for(self._answers.get(), 10)
            if answer.step == self.step:
                return answer

    def _reply(self, said: SampleReply | Failure | NDArray[np.float64]) -> SampleReply | Failure:
        if isinstance(said, SampleReply | Failure):
            return said
        cards = tuple(int(card) for card in np.asarray(self._fleet.card_of))
        return SampleReply(self.step, self._workers, cards, self._classes, pack(said, "<f8"))

    async def _answer(self, body: RequestBody) -> ReplyBody:
        assert isinstance(body, Sample)
        async with self._moved:
            await self._moved.wait_for(lambda: self._told > body.after_step)
        said = self._said[self._told]
        self._said[self._told] = self._reply(self._fleet.metrics())
        return said

    async def _send_outcome(self, answer: ActionBatch, executed: NDArray[np.int64]) -> None:
        """What the actuator would say of it."""
        receipts = Results(answer, columns_of(answer)).batch(NODE, answer.t_ns, [None] * len(answer.workers))
        receipts = msgspec.structs.replace(receipts, executed_actions=executed.astype(np.uint8).tobytes())
        await self.bus.publish(subject("outcome", NODE), OUTCOME_BATCH.encode(receipts))


@asynccontextmanager
async def fed_loop(trial: Trial) -> AsyncIterator[FedLoop]:
    folder = Path(tempfile.mkdtemp(prefix="tg-"))  # pytest names are too long for a Unix socket
    loop = FedLoop(trial, folder)
    try:
        await loop.start()
        yield loop
    finally:
        await loop.stop()
        shutil.rmtree(folder)
