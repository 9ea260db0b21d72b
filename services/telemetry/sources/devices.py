"""What the node's cards have and use, for the engines' source: NVML, asked off the event loop and within a time, or the
page of a DCGM exporter.

A machine without NVML is an ordinary one (``auto``): its cards are then what settings or engines say. A driver that
hangs must not hold up the engines' answers: whoever waits for it gives up, and asks again when it has answered.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from typing import Final

import aiohttp

from services.clock import Clock
from services.devices import Device
from services.errors import DeviceError, ScrapeFailed
from services.nvml import Nvml
from services.telemetry.sources.card import CardMemory
from services.telemetry.sources.dcgm import gpus_of
from services.telemetry.sources.fetch import fetch_text, metrics_url
from services.telemetry.sources.nvml import card_facts
from services.telemetry.sources.page import families_of

AGAIN_NS: Final = 60_000_000_000
"""Pause after a failure: what is missing now is seldom there in two seconds."""


class NvmlCards:
    """Memory of the cards by NVML's number; cards cut into MIG instances are left out, since which instance an engine
    has is not known from its page."""

    def __init__(
        self,
        nvml: Nvml,
        clock: Clock,
        on_error: Callable[[Exception], None],
        *,
        must: bool,
        timeout_s: float,
    ) -> None:
        """``must``: NVML was asked for by name, so that a machine without it is an error to be heard of."""
        self._nvml = nvml
        self._clock = clock
        self._on_error = on_error
        self._must = must
        self._timeout_s = timeout_s
        self._not_before_ns = 0
        self._asking: asyncio.Future[tuple[Device, ...]] | None = None

    async def read(self, session: aiohttp.ClientSession) -> Mapping[int, CardMemory]:
        """By card; empty while NVML is away or silent. ``session`` is not used: NVML is a library."""
        if self._asking is None:
            if self._clock.now_ns() < self._not_before_ns:
                return {}
            self._asking = asyncio.ensure_future(asyncio.to_thread(self._ask))
        await asyncio.wait((self._asking,), timeout=self._timeout_s)
        if not self._asking.done():
            return {}
        asked, self._asking = self._asking, None
        try:
            devices = asked.result()
        except DeviceError as error:
            self._not_before_ns = self._clock.now_ns() + AGAIN_NS
            if self._must or error.reason not in ("library_missing", "driver_not_loaded"):
                self._on_error(error)
            return {}
        facts = {device.gpu: card_facts(device) for device in devices if not device.mig}
        return {gpu: CardMemory(known.hbm_bytes, known.used_bytes) for gpu, known in facts.items()}

    def _ask(self) -> tuple[Device, ...]:
        self._nvml.open()
        return self._nvml.devices()


class DcgmCards:
    """Memory of the cards from a DCGM exporter's page, by its number of each; MIG instances are left out as above."""

    def __init__(self, url: str, on_error: Callable[[Exception], None], *, timeout_s: float) -> None:
        self._url = metrics_url(url)
        self._on_error = on_error
        self._timeout_s = timeout_s

    async def read(self, session: aiohttp.ClientSession) -> Mapping[int, CardMemory]:
        """By card; empty, and heard of, when the exporter does not answer or lost its driver."""
        try:
            text = await fetch_text(session, self._url, self._timeout_s)
            gpus = gpus_of(families_of(self._url, text))
        except (ScrapeFailed, DeviceError) as error:
            self._on_error(error)
            return {}
        return {
            int(gpu.gpu): CardMemory(gpu.hbm_bytes if gpu.hbm_bytes > 0 else math.nan, gpu.used_bytes)
            for gpu in gpus
            if gpu.gpu.isdigit() and not gpu.instance
        }
