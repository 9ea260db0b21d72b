"""Real engines of a node: every step all of them are asked side by side, and one reading is made of their answers.

An engine that is away, hangs, answers nonsense or numbers that are too old has a row without numbers and a flag that
says why: the featurizer holds that worker, the node's others go on. Steps count ``step_s`` on the node's clock, so
telemetry that was started again goes on where it was.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from schemas.identity import parse_worker_id
from schemas.metrics import COLUMN
from schemas.telemetry import pack_metrics
from services.clock import Clock
from services.telemetry.settings import Engine
from services.telemetry.sources.card import CardMemory, Tenant, fill
from services.telemetry.sources.endpoint import Endpoint, Scrape
from services.telemetry.sources.reading import Reading

Devices = Callable[[aiohttp.ClientSession], Awaitable[Mapping[int, CardMemory]]]
"""Asks the node's devices, by card; an empty answer where there is none to ask."""

PEAK_STEPS: Final = 30
"""Steps with tokens that a card's peak rate is made of before it is told."""


async def no_devices(session: aiohttp.ClientSession) -> Mapping[int, CardMemory]:
    """Nobody knows the cards."""
    return {}


class Peaks:
    """The highest output rate of each card so far, where nobody calibrated it."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, int]] = {}
        self._peak: dict[int, tuple[float, int]] = {}

    def take(self, card: int, output_tokens: float, t_ns: int) -> float:
        """tokens/s; NaN until :data:`PEAK_STEPS` steps brought tokens."""
        before, then_ns = self._before.get(card, (math.nan, 0))
        peak, steps = self._peak.get(card, (0.0, 0))
        if output_tokens > before and t_ns > then_ns:
            peak = max(peak, (output_tokens - before) / ((t_ns - then_ns) / 1e9))
            self._peak[card] = (peak, steps + 1)
        if output_tokens == output_tokens:
            self._before[card] = (output_tokens, t_ns)
        return peak if steps >= PEAK_STEPS else math.nan


class EnginesSource:
    """Readings of one node's configured engines."""

    name = "engines"

    def __init__(
        self,
        node: str,
        engines: tuple[Engine, ...],
        sockets: Path,
        position: Callable[[], tuple[int, int]],
        on_error: Callable[[str, Exception], None],
        clock: Clock,
        *,
        step_s: float,
        timeout_s: float,
        max_age_s: float,
        devices: Devices = no_devices,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """``sockets``: the node's folder, where engines with Tidegate inside have theirs; ``position`` and
        ``on_error`` as for the emulated node; ``devices``: the cards' memory."""
        self._node = node
        self._endpoints = [
            Endpoint(
                node,
                engine,
                Path(engine.socket) if engine.socket else sockets / f"{engine.gpu}-{engine.name}.sock",
                clock,
                wall_s,
            )
            for engine in engines
        ]
        self._position = position
        self._on_error = on_error
        self._clock = clock
        self._step_ns = int(step_s * 1e9)
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._devices = devices
        self._pools: dict[str, tuple[float, float, float]] = {}
        self._totals: dict[int, float] = {}
        self._peaks = Peaks()

    async def readings(self) -> AsyncIterator[Reading]:
        """One reading a step, the first at the next full step of the clock."""
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, limit_per_host=4)) as session:
            try:
                while True:
                    step = self._clock.now_ns() // self._step_ns + 1
                    await asyncio.sleep(max(0.0, (step * self._step_ns - self._clock.now_ns()) / 1e9))
                    yield await self.read(session, step)
            finally:
                for endpoint in self._endpoints:
                    endpoint.close()

    async def read(self, session: aiohttp.ClientSession, step: int) -> Reading:
        """All engines' answers as one reading, within the time they have."""
        asked_ns = self._clock.now_ns()
        boot_id = self._position()[0]
        cards, answers = await asyncio.gather(
            self._devices(session),
            asyncio.gather(
                *(
                    endpoint.ask(session, boot_id, self._timeout_s, self._max_age_s, self._card_bytes(endpoint.engine))
                    for endpoint in self._endpoints
                )
            ),
        )
        devices = dict(cards)
        self._totals |= {card: memory.total_bytes for card, memory in devices.items()}
        for endpoint in self._endpoints:
            devices.setdefault(endpoint.engine.gpu, endpoint.device)
            if endpoint.error is not None:
                self._on_error(f"{self._node}/{endpoint.engine.gpu}/{endpoint.engine.name}", endpoint.error)
        return self._reading(step, asked_ns, list(zip(self._endpoints, answers, strict=True)), devices)

    def _reading(
        self, step: int, asked_ns: int, answers: list[tuple[Endpoint, list[Scrape]]], devices: dict[int, CardMemory]
    ) -> Reading:
        scrapes = [(endpoint.engine, scrape) for endpoint, found in answers for scrape in found]
        values = np.stack([scrape.row.values for _, scrape in scrapes])
        flags = [(k, metric, why) for k, (_, scrape) in enumerate(scrapes) for metric, why in scrape.row.flags]
        cards: dict[int, list[Tenant]] = {}
        for k, (engine, scrape) in enumerate(scrapes):
            cards.setdefault(scrape.card, []).append(self._tenant(k, engine, scrape))
        t_ns = self._clock.now_ns()
        for card, tenants in cards.items():
            flags += fill(values, tenants, devices.get(card, CardMemory()))
            flags += self._reference(values, card, [(scrapes[t.row][0], t) for t in tenants], t_ns)
        late_s = (t_ns - asked_ns) / 1e9
        return Reading(
            self._node,
            step,
            t_ns,
            tuple(scrape.worker for _, scrape in scrapes),
            tuple(scrape.card for _, scrape in scrapes),
            tuple(int(engine.class_number) for engine, _ in scrapes),
            pack_metrics(values),
            late_s,
            # Ages count up to the reading, which waits for the slowest.
            tuple(max(scrape.age_s, late_s) if scrape.alive else math.nan for _, scrape in scrapes),
            tuple(flags),
        )

    def _card_bytes(self, engine: Engine) -> float:
        """HBM of the engine's card as a device said it last or the settings say; NaN where neither does."""
        told = self._totals.get(engine.gpu, math.nan)
        if told > 0:
            return told
        return engine.hbm_bytes if engine.hbm_bytes > 0 else math.nan

    def _tenant(self, row: int, engine: Engine, scrape: Scrape) -> Tenant:
        """The worker on its card; its pool as last known while it is away."""
        if scrape.alive:
            weights = float(scrape.row.values[COLUMN["weights_bytes"]])
            self._pools[scrape.worker] = (scrape.row.pool_bytes, weights, scrape.row.claimed_share)
        pool, weights, claimed = self._pools.get(scrape.worker, (math.nan, math.nan, math.nan))
        plain = parse_worker_id(scrape.worker).name == engine.name
        return Tenant(row, pool, weights, claimed, engine.q0_share if plain else 0.0, engine.hbm_bytes, scrape.alive)

    def _reference(
        self, values: NDArray[np.float64], card: int, tenants: list[tuple[Engine, Tenant]], t_ns: int
    ) -> list[tuple[int, str, str]]:
        """The card's peak decode rate: as set, else the highest seen, which is flagged."""
        column, flags = COLUMN["reference_tokens_per_s"], []
        told = max(engine.reference_tokens_per_s for engine, _ in tenants)
        alive = [tenant for _, tenant in tenants if tenant.alive]
        seen = math.nan
        if len(alive) == len(tenants):
            rows = [tenant.row for tenant in alive]
            seen = self._peaks.take(card, float(values[rows, COLUMN["output_tokens"]].sum()), t_ns)
        for tenant in alive:
            if math.isnan(values[tenant.row, column]):
                values[tenant.row, column] = told if told > 0 else seen
                if not told > 0 and seen == seen:
                    flags.append((tenant.row, "reference_tokens_per_s", "assumed: the highest rate seen so far"))
        return flags
