"""From a worker's id to the adapter that commands it: its socket, and around it what the settings say of the engine.

Inside out: the engine's socket; kvcached's limit, which a hard quota moves with it; sleep mode, which is asked of the
API server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import aiohttp
import msgspec

from schemas.identity import parse_worker_id
from services.actuator.engines import emulated
from services.actuator.engines.kvcached.adapter import KvcachedCounts, KvcachedEngine
from services.actuator.engines.kvcached.limits import Limits
from services.actuator.engines.protocol import Engine, EngineClient, SocketEngine
from services.actuator.engines.vllm.asleep import SleepingEngine
from services.actuator.engines.vllm.device_use import DeviceUse
from services.actuator.engines.vllm.sleeping import Sleeper, SleepSettings
from services.clock import Clock
from services.errors import DeviceError, UserError
from services.kvsegment import segment_path
from services.nvml import Nvml

log = logging.getLogger(__name__)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker's engine can beside its socket: a table ``[[actuator.engines]]``."""

    worker: str
    """Its id, <node>/<gpu>/<name>."""
    kvcached: str = ""
    """Its kvcached segment, a name in /dev/shm or a path, where its KV is elastic; empty: none."""
    sleep_url: str = ""
    """API server of a vLLM started with ``--enable-sleep-mode`` and ``VLLM_SERVER_DEV_MODE=1``; empty: its weights
    stay on the card."""
    weights_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0
    """What the model's weights take on the card, all of which a sleep has to free; needed with ``sleep_url``."""

    def __post_init__(self) -> None:
        try:
            parse_worker_id(self.worker)
            if self.kvcached and "/" not in self.kvcached:
                segment_path(self.kvcached)
        except UserError as error:
            raise ValueError(str(error)) from error
        if self.sleep_url and (not self.sleep_url.startswith(("http://", "https://")) or len(self.sleep_url) < 9):
            raise ValueError(f"sleep_url {self.sleep_url!r}: expected http://host:port")
        if self.sleep_url and not self.weights_bytes:
            raise ValueError("sleep_url without weights_bytes: expected what a sleep has to free, to verify it by")

    @property
    def segment(self) -> Path:
        return Path(self.kvcached) if "/" in self.kvcached else segment_path(self.kvcached)


def check_engines(engines: Sequence[EngineSettings]) -> None:
    """ValueError for entries that do not go together."""
    for what in ("worker", "kvcached"):
        named = [value for one in engines if (value := getattr(one, what))]
        twice = next((value for value in named if named.count(value) > 1), None)
        if twice is not None:
            raise ValueError(f"two engines with {what} {twice!r}: expected one entry each")


class Connector:
    """Makes the adapters of a process's workers. ``clock``: that of real engines' node, CLOCK_MONOTONIC."""

    def __init__(
        self,
        engines: Sequence[EngineSettings],
        timeout_s: float,
        clock: Clock,
        nvml: Nvml | None = None,
        sleep: SleepSettings | None = None,
    ) -> None:
        self._settings = {one.worker: one for one in engines}
        self._timeout_s = timeout_s
        self._clock = clock
        self._nvml = nvml or Nvml()
        self._sleep = sleep or SleepSettings(ask_timeout_s=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._met: dict[str, str] = {}
        """What was logged last of each worker."""
        self.kvcached = KvcachedCounts()

    def connect(self, folder: Path, worker: str) -> Engine:
        """An adapter for a worker with a socket in ``folder``; nothing is opened before its first request."""
        inner = SocketEngine(EngineClient(worker, emulated.socket_path(folder, worker), self._timeout_s))
        told = self._settings.get(worker)
        engine: Engine = inner
        if told is not None and told.kvcached:
            limits = Limits(told.segment, self._clock)
            engine = KvcachedEngine(engine, limits, self._clock, self._on_error, self.kvcached)
        if told is not None and told.sleep_url:
            if self._session is None:
                self._session = aiohttp.ClientSession()
            device = DeviceUse(self._nvml, parse_worker_id(worker).gpu, lambda: inner.peer_pid)
            weights = told.weights_bytes
            sleeper = Sleeper(worker, told.sleep_url, self._session, device.used_bytes, weights, self._sleep)
            engine = SleepingEngine(engine, sleeper, device, weights, lambda why: self._log(worker, why))
        return engine

    async def close(self) -> None:
        """After the adapters."""
        if self._session is not None:
            await self._session.close()
        try:
            self._nvml.close()
        except DeviceError as error:
            log.warning("NVML was not closed", extra={"fields": {"reason": str(error)}})

    def _on_error(self, worker: str, error: Exception) -> None:
        self._log(worker, str(error))

    def _log(self, worker: str, why: str) -> None:
        """Once, until it is something else: an engine is looked at in every step."""
        if self._met.get(worker) != why:
            self._met[worker] = why
            log.warning("engine", extra={"fields": {"worker": worker, "reason": why}})
