"""A node's replay in lockstep: a step ends when every worker was commanded, or after a wall-time limit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

from loadgen.node.emulation import Emulation
from schemas.engine import Failure, ReplyBody, RequestBody, Sample, SampleReply
from schemas.identity import STEP_S
from services.actuator.engines.emulated import socket_path
from services.actuator.engines.serving import Sockets

NODE_SOCKET = "node.sock"


class Replay:
    """Serves one node's sockets and moves its clock.

    Nothing moves before the first ``Sample`` request: services may take their time to start. ``speed`` in
    simulated seconds per wall second bounds how fast steps follow; 0 = no bound.
    """

    def __init__(self, emulation: Emulation, *, duration_s: float, step_timeout_s: float, speed: float) -> None:
        self.emulation = emulation
        self.missed_steps = 0
        self.latencies_ms: list[float] = []
        """Of each step that was not missed: wall time from its sample to the last command for it."""
        self.finished = False
        self._steps = max(int(-(-duration_s // STEP_S)), 1)
        self._step_timeout_s = step_timeout_s
        self._min_step_s = STEP_S / speed if speed > 0 else 0.0
        self._begun = asyncio.Event()
        self._commanded = asyncio.Event()
        self._advanced = asyncio.Condition()
        self._sockets = Sockets(lambda: emulation.t_ns)

    async def open(self, folder: Path) -> None:
        """Serve the worker sockets, then ``node.sock``: who finds the latter finds them all."""
        for worker in self.emulation.workers:
            await self._sockets.serve(socket_path(folder, worker), partial(self._answer, worker))
        await self._sockets.serve(folder / NODE_SOCKET, self._node)

    async def run(self) -> None:
        """Until the duration is reached; sockets stay open for questions about the end."""
        emulation = self.emulation
        loop = asyncio.get_running_loop()
        await self._begun.wait()
        while emulation.step < self._steps:
            started_s = loop.time()
            if await self._step_commanded():
                self.latencies_ms.append((loop.time() - started_s) * 1e3)
            early_s = started_s + self._min_step_s - loop.time()
            if early_s > 0:
                await asyncio.sleep(early_s)
            emulation.advance()
            self._commanded.clear()
            self.finished = emulation.step >= self._steps
            async with self._advanced:
                self._advanced.notify_all()

    async def close(self) -> None:
        await self._sockets.close()

    async def _step_commanded(self) -> bool:
        try:
            async with asyncio.timeout(self._step_timeout_s):
                while not self.emulation.commanded:
                    self._commanded.clear()
                    await self._commanded.wait()
        except TimeoutError:
            self.missed_steps += 1
            return False
        return True

    def _answer(self, worker: str, body: RequestBody) -> ReplyBody:
        reply = self.emulation.answer(worker, body)
        if self.emulation.commanded:
            self._commanded.set()
        return reply

    def _node(self, body: RequestBody) -> ReplyBody | Awaitable[ReplyBody]:
        if not isinstance(body, Sample):
            return Failure("unsupported", "node.sock answers sample only")
        self.emulation.asked_by(body.boot_id)
        self._begun.set()
        return self._sample(body)

    async def _sample(self, asked: Sample) -> ReplyBody:
        """The newest sample after the asked step, waiting for it; the asked step itself when it does not come."""
        timeout_s = min(max(asked.timeout_s, 0.0), 60.0)
        try:
            async with asyncio.timeout(timeout_s), self._advanced:
                await self._advanced.wait_for(lambda: self.emulation.step > asked.after_step or self.finished)
        except TimeoutError:
            return SampleReply(asked.after_step, (), (), (), b"")
        return self.emulation.sample(self.finished)
