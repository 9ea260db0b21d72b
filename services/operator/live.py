"""What goes over the bus now, by worker: the newest state, command and outcome of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_BATCH, WorkerAction, actions_of
from schemas.codec import DecodeError
from schemas.features import FEATURE
from schemas.identity import Order
from schemas.outcomes import OUTCOME_BATCH, OutcomeKind, WorkerOutcome, outcomes_of
from schemas.states import STATE_BATCH, StateBatch, features_of
from schemas.subjects import Family, subject, wildcard
from services.bus import Bus, Message


class StateRow(msgspec.Struct, frozen=True, eq=False):
    """A worker's state in a step."""

    order: Order
    service_class: int
    hold: int
    features: NDArray[np.float32]
    """float32 [FEATURE_COUNT], NaN = absent."""

    def value(self, name: str) -> float:
        return float(self.features[FEATURE[name]])


class Heard(msgspec.Struct):
    """A worker's newest messages; each may be of another step."""

    worker: str
    node: str
    at_s: float = 0.0
    """When anything last came, this process's monotonic clock."""
    state: StateRow | None = None
    action: WorkerAction | None = None
    acted: Order = Order(-1, -1)
    """Step of ``action``."""
    policy_version: str = ""
    outcome: WorkerOutcome | None = None
    judged: Order = Order(-1, -1)
    """Step of ``outcome``."""

    @property
    def whole(self) -> bool:
        """State, command and outcome are there, of one step."""
        return self.state is not None and self.state.order == self.acted == self.judged


class Listener:
    """Keeps :class:`Heard` for every worker of a node, or of all. ``bad`` counts messages that could not be read."""

    def __init__(self, bus: Bus, node: str = "") -> None:
        self._bus = bus
        self._node = node
        self._news = asyncio.Event()
        self.workers: dict[str, Heard] = {}
        self.bad = 0

    async def start(self) -> None:
        takers: dict[Family, Callable[[bytes], None]] = {
            "state": self._state, "action": self._action, "outcome": self._outcome,
        }  # fmt: skip
        for family, take in takers.items():
            where = subject(family, self._node) if self._node else wildcard(family)
            await self._bus.subscribe(where, self._filing(take))

    async def until(self, true: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something to become true; False when it did not in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    def _filing(self, take: Callable[[bytes], None]) -> Callable[[list[Message]], Awaitable[None]]:
        async def on_batch(messages: list[Message]) -> None:
            for message in messages:
                try:
                    take(message.data)
                except (DecodeError, ValueError):
                    self.bad += 1
            self._news.set()

        return on_batch

    def _heard(self, worker: str, node: str) -> Heard:
        known = self.workers.get(worker)
        if known is None:
            known = self.workers[worker] = Heard(worker, node)
        known.at_s = time.monotonic()
        return known

    def _state(self, data: bytes) -> None:
        batch = STATE_BATCH.decode(data)
        for row, worker in enumerate(batch.workers):
            self._heard(worker, batch.node).state = state_row(batch, row)

    def _action(self, data: bytes) -> None:
        batch = ACTION_BATCH.decode(data)
        for action in actions_of(batch):
            heard = self._heard(action.worker, batch.node)
            heard.action, heard.acted = action, Order(batch.boot_id, batch.step)
            heard.policy_version = batch.policy_version

    def _outcome(self, data: bytes) -> None:
        batch = OUTCOME_BATCH.decode(data)
        for outcome in outcomes_of(batch):
            if outcome.kind == OutcomeKind.RECEIPT:
                heard = self._heard(outcome.worker, batch.node)
                heard.outcome, heard.judged = outcome, Order(batch.boot_id, batch.step)


def state_row(batch: StateBatch, row: int) -> StateRow:
    """One worker's state; DecodeError when the batch is of another feature table."""
    order = Order(batch.boot_id, batch.step)
    return StateRow(order, batch.classes[row], batch.holds[row], features_of(batch)[row])
