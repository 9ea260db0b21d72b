"""A vLLM server whose weights can leave its card: its own adapter for everything, sleep mode for ``set_weights``.

Outermost of a worker's wrappers: the protocol inside the engine knows nothing of sleep, and a limit of kvcached is the
engine's whether it sleeps or not. While it sleeps, requests that wait show in the scheduler's snapshot alone.

Whether the weights are off the card is the server's word, how much of them is what device memory showed: of weights
that were not seen to leave (a server found asleep, one that freed nothing and cannot be woken) nothing is lent, but
their requests wait, so they are told as asleep and are woken like others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from schemas.engine import Description, Receipt, SetWeights, Snapshot, SnapshotReply
from services.actuator.cold_weights import CAN_SLEEP
from services.actuator.engines.protocol import PLAIN, Engine
from services.actuator.engines.vllm.device_use import DeviceUse
from services.actuator.engines.vllm.sleeping import Sleeper, Turned
from services.actuator.engines.wrapping import WrappedEngine
from services.errors import DeviceError, EngineRefused, EngineUnreachable

REMEMBERED: Final = 16
"""Orders that can still be asked about."""
NO_SLEEP_MODE: Final = "no sleep mode: start the server with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"


class _Order(msgspec.Struct):
    on_card: bool
    done: bool = False
    detail: str = ""


class SleepingEngine(WrappedEngine):
    """``weights_bytes``: what a sleep has to free. ``tell`` hears, with each :meth:`describe`, why the server cannot be
    put to sleep."""

    def __init__(
        self,
        inner: Engine,
        sleeper: Sleeper,
        device: DeviceUse,
        weights_bytes: int,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(inner)
        self._sleeper = sleeper
        self._device = device
        self._weights_bytes = weights_bytes
        self._tell = tell
        self._can = False
        self._on_card = True
        self._off_bytes = 0
        """Of the weights, what device memory showed to be off the card."""
        self._orders: dict[str, _Order] = {}
        self._task: asyncio.Task[Turned | str] | None = None
        self._said: SnapshotReply | None = None

    async def describe(self) -> Description:
        """With capability ``sleep`` where the server has the mode and its device's memory can be read."""
        said = await self._inner.describe()
        self._on_card, self._off_bytes = True, 0
        why = await self._cannot()
        self._can = not why
        if why:
            self._tell(why)
        return msgspec.structs.replace(said, capabilities=(*said.capabilities, CAN_SLEEP)) if self._can else said

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        said = await self._inner.snapshot(ask)
        self._said = said
        if not self._can:
            return said
        if self._task is None:
            await self._look()
        elif self._task.done():  # this once its word counts, whatever the server says: the receipt is asked next
            self._end(self._task.result())
        off = self._weights_bytes if self._on_card else self._off_bytes
        return msgspec.structs.replace(said, weights_bytes=off, weights_on_card=self._on_card)

    async def set_weights(self, command: SetWeights) -> Receipt:
        """Ordered, not done: the copies take seconds. EngineRefused: ``unsupported`` without the capability, ``busy``
        while the other way is under way."""
        if not self._can:
            raise EngineRefused(self.worker, "unsupported")
        said = self._said or await self.snapshot()
        order = self._orders.get(command.action_id)
        if order is None:
            if self._task is not None:
                latest = next(reversed(self._orders.values()))
                if latest.on_card != command.on_card:
                    raise EngineRefused(self.worker, "busy")
                order = latest
            else:
                order = _Order(command.on_card)
                self._task = asyncio.get_running_loop().create_task(self._turn(command.on_card))
            self._orders[command.action_id] = order
            while len(self._orders) > REMEMBERED:
                del self._orders[next(iter(self._orders))]
        return _receipt(command.action_id, order, said)

    async def receipt(self, action_id: str) -> Receipt:
        """Of an order about weights: done once a snapshot after its end was given, with what it came to."""
        order = self._orders.get(action_id)
        if order is None or self._said is None:
            return await self._inner.receipt(action_id)
        return _receipt(action_id, order, self._said)

    async def close(self) -> None:
        """An order under way is left to the server; whoever comes next finds where its weights are."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._inner.close()

    async def _cannot(self) -> str:
        try:
            self._device.begin()
        except DeviceError as error:
            return f"not put to sleep: device memory cannot be read: {error}"
        try:
            await self._sleeper.is_sleeping()
        except EngineRefused:
            return f"not put to sleep: {NO_SLEEP_MODE}"
        except EngineUnreachable:
            return ""  # asked again with each snapshot
        return ""

    async def _look(self) -> None:
        """Follow what others did to the server; on the card in doubt."""
        try:
            asleep = await self._sleeper.is_sleeping()
        except (EngineUnreachable, EngineRefused):
            self._on_card = True
            return
        self._on_card = not asleep
        if not asleep:
            self._off_bytes = 0
        elif not self._off_bytes and self._holds_none():
            self._off_bytes = self._weights_bytes

    def _holds_none(self) -> bool:
        """Whether the server's own processes hold less than its weights would take: seen without a difference."""
        try:
            self._device.begin()
            return self._device.by_process and self._device.used_bytes() < self._weights_bytes
        except DeviceError:
            return False

    async def _turn(self, on_card: bool) -> Turned | str:
        try:
            self._device.begin()
            return await (self._sleeper.wake() if on_card else self._sleeper.sleep())
        except (DeviceError, EngineRefused, EngineUnreachable) as error:
            return f"nothing was ordered: {error}"

    def _end(self, turned: Turned | str) -> None:
        """Take in what the order under way came to."""
        latest = next(reversed(self._orders.values()))
        latest.done, latest.detail = True, turned if isinstance(turned, str) else turned.detail
        self._task = None
        if isinstance(turned, str):
            return
        self._on_card = turned.on_card
        if turned.on_card:
            self._off_bytes = 0
        elif latest.on_card:  # not woken: what came back before it failed is on the card
            self._off_bytes = max(self._off_bytes - turned.moved_bytes, 0)
        elif turned.moved_bytes or self._holds_none():
            self._off_bytes = self._weights_bytes


def _receipt(action_id: str, order: _Order, said: SnapshotReply) -> Receipt:
    return Receipt(
        action_id, order.done, said.generation, said.rho, said.quota_soft_bytes, said.quota_hard_bytes,
        said.max_running, said.mapped_bytes, detail=order.detail,
    )  # fmt: skip
