"""A node of two workers on an in-memory bus: a real Decision, and an actuator that does as it is told and keeps the
audit; and the operators' commands as they are typed."""

from __future__ import annotations

import argparse
import asyncio
import io
import shlex
from typing import Any

import msgspec
import numpy as np

from schemas.actions import ACTION_BATCH, ActionBatch, WorkerAction, actions_of
from schemas.codec import pack
from schemas.features import FEATURE_HASH
from schemas.identity import SCHEMA_VERSION
from schemas.outcomes import OUTCOME_BATCH, OutcomeKind, WorkerOutcome, outcome_batch
from schemas.policies import KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, STREAM_TRANSITIONS, subject, wildcard
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH, TransitionBatch
from services import cli, qweights
from services.actuator.audit import AuditTrail
from services.bus import Bus, Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.decision.service import Settings, build
from services.observe import Observe
from services.operator import session
from services.qweights import Weights
from services.shell import Shell
from tests.services.decision.rows import message, pointer, state, state_batch

BOOT = 1_700_000_000_000_000_000


class Fleet:
    """Node n0. ``step`` makes one step go round and gives the command of worker n0/0/w0."""

    def __init__(self, **settings: Any) -> None:
        self.network = MemoryNetwork()
        self.bus: Bus = MemoryBus(self.network)
        self.number = 0
        self._answers: asyncio.Queue[Message] = asyncio.Queue()
        self._service = build(Settings(**settings))
        self._shell = Shell(
            "decision", "d0", bus=MemoryBus(self.network), observe=Observe("decision"), clock=ManualClock()
        )
        self._audit = AuditTrail(self.bus, backlog=100, max_age_s=1e6, max_bytes=1 << 30)
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        async def on_batch(messages: list[Message]) -> None:
            for one in messages:
                self._answers.put_nowait(one)

        await self.bus.subscribe(wildcard("action"), on_batch)
        await self.bus.ensure_stream(STREAM_TRANSITIONS, [wildcard("transition")], max_age_s=1e6, max_bytes=1 << 30)
        await self._service.start(self._shell)
        self._keeping = asyncio.create_task(self._audit.run())

    async def stop(self) -> None:
        assert self._keeping is not None
        self._keeping.cancel()
        await asyncio.gather(self._keeping, return_exceptions=True)
        await self._service.stop()
        await self._shell.cancel_tasks()
        await self._shell.bus.drain()
        await self.bus.drain()
        assert self._shell.failed is None

    async def step(self, **features: float) -> WorkerAction:
        self.number += 1
        rows = np.repeat(state(**features), 2, axis=0)
        await self.bus.publish(*message(state_batch(rows, boot_id=BOOT, step=self.number)))
        sent = await asyncio.wait_for(self._answers.get(), 5)
        batch = ACTION_BATCH.decode(sent.data)
        outcomes = OUTCOME_BATCH.encode(became := _obeyed(batch))
        self._audit.add(became, sent.data, outcomes)
        await self._audit.flush(1.0)
        await self.bus.publish(subject("outcome", "n0"), outcomes)
        await self.bus.publish_stream(
            subject("transition", "n0"), TRANSITION_BATCH.encode(_transition(batch, rows)), message_id=f"t{self.number}"
        )
        return actions_of(batch)[0]

    async def until(self, hold: int, **features: float) -> WorkerAction:
        """Steps until the order has reached decision."""
        async with asyncio.timeout(5):
            while True:
                command = await self.step(**features)
                if command.hold == hold:
                    return command

    async def champion(self, network: Weights) -> None:
        await self.bus.object_put(BUCKET_WEIGHTS, network.version, qweights.save(network))
        await self.point(pointer(network))

    async def point(self, to: PolicyPointer) -> None:
        await self.bus.kv_put(BUCKET_POLICY, KEY_CHAMPION, msgspec.json.encode(to))

    async def typed(self, line: str) -> str:
        """The output of an operator's command, of exit code 0."""
        code, said = await self.ended(line)
        assert code == 0, said
        return said

    async def ended(self, line: str) -> tuple[int, str]:
        """Exit code and output; errors come as they are raised."""
        command, options = parsed(line)
        out = io.StringIO()
        return await command(self.bus, options, out), out.getvalue()


def parsed(line: str) -> tuple[session.Command, argparse.Namespace]:
    """What the command line comes to, with what ``session.run`` would have been given."""
    options = cli._parser().parse_args(shlex.split(line))
    caught: list[tuple[session.Command, argparse.Namespace]] = []
    kept, session.run = session.run, lambda command, namespace: caught.append((command, namespace)) or 0  # type: ignore[func-returns-value]
    try:
        options.command(options)
    finally:
        session.run = kept
    return caught[0]


def _obeyed(batch: ActionBatch) -> Any:
    rows = [
        WorkerOutcome(one.worker, one.action_id, OutcomeKind.RECEIPT, 0, one.action, one.action, 0, one.target_rho,
                      one.target_rho, 4, one.target_max_running, one.policy, one.probability, one.mask, one.hold,
                      10 * 10**9, 12 * 10**9, evicted_bytes=10**9 if one.action == 4 else 0)
        for one in actions_of(batch)
    ]  # fmt: skip
    return outcome_batch(batch.node, batch.boot_id, batch.step, batch.t_ns, rows)


def _transition(batch: ActionBatch, rows: np.ndarray) -> TransitionBatch:
    n = len(batch.workers)
    return TransitionBatch(
        batch.node, batch.boot_id, batch.step, SCHEMA_VERSION, batch.t_ns, FEATURE_HASH, batch.workers,
        ("heuristic",) * n, pack(rows, "<f4"), pack(rows, "<f4"), batch.actions, batch.masks, batch.masks,
        batch.probabilities, bytes(4 * n * len(REWARD_PARTS)), bytes(4 * n), bytes(n),
    )  # fmt: skip
