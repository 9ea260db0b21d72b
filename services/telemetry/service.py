"""Wiring of telemetry: readings of the sources in, NodeSamples out, each the root of its step's trace."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from schemas.subjects import subject
from schemas.telemetry import NODE_SAMPLE, NodeSample
from services.observe import Observe
from services.shell import Shell
from services.telemetry.boot import Boots
from services.telemetry.sampler import Sampler
from services.telemetry.settings import Settings
from services.telemetry.sources.emulated import EmulatedSource
from services.telemetry.sources.reading import Source
from services.telemetry.sources.synthetic import SyntheticSource

__all__ = ["Settings", "Telemetry", "build"]

LATENCY_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
log = logging.getLogger(__name__)


class Measures:
    """What telemetry shows on /metrics."""

    def __init__(self, observe: Observe, sampler: Sampler) -> None:
        self._samples = observe.counter("samples", "Node samples published")
        self._errors = observe.counter("source_errors", "Failures of a source, by kind", ["kind"])
        self._wait = observe.histogram(
            "step_wait_seconds", "How long the source was waited for, for each sample", buckets=LATENCY_BUCKETS
        )
        observe.counters_from("steps", lambda: {"repeated": sampler.repeated, "restarted": sampler.restarted})

    def published(self, waited_s: float) -> None:
        self._samples.inc()
        self._wait.observe(waited_s)

    def failed(self, error: Exception) -> None:
        self._errors.labels(type(error).__name__).inc()


class Telemetry:
    """The service: one source for each emulated node, one for all made-up ones."""

    def __init__(self, settings: Settings, wall_ns: Callable[[], int] = time.time_ns) -> None:
        """``wall_ns``: wall clock, for boot ids alone. SettingsError when no node is named."""
        self._settings = settings
        self._wall_ns = wall_ns
        self._nodes = settings.served
        named = settings.boot_file.replace("{node}", self._nodes[0])
        self._boots = Boots(Path(named) if named else None, wall_ns)
        self._sampler = Sampler(self._boots.next, settings.source)
        self._subjects = {node: subject("telemetry", node) for node in self._nodes}
        self._failing: set[str] = set()

    async def start(self, shell: Shell) -> None:
        """Take a boot id and begin to ask. UserError when the boot file cannot be used."""
        self._shell = shell
        self._measures = Measures(shell.observe, self._sampler)
        self._sampler.begin()
        if self._boots.damaged:
            log.warning("boot file was damaged", extra={"fields": {"boot_file": self._settings.boot_file}})
        for source in self._sources():
            shell.spawn(self._follow(source), f"source {source.name}")

    async def stop(self) -> None:
        """Nothing of its own to keep: its tasks end at their next wait."""

    def _sources(self) -> list[Source]:
        settings, clock = self._settings, self._shell.clock
        if settings.source == "synthetic":
            rng = np.random.default_rng(settings.seed)
            return [
                SyntheticSource(
                    self._nodes,
                    settings.synthetic_workers,
                    clock,
                    rng,
                    step_s=settings.step_s,
                    spread=settings.synthetic_spread,
                )
            ]
        if settings.source == "engines":
            return [self._engines()]
        return [
            EmulatedSource(
                node,
                Path(settings.sockets.replace("{node}", node)),
                self._position(node),
                self._on_error,
                clock,
                poll_s=settings.poll_s,
                retry_s=settings.retry_s,
            )
            for node in self._nodes
        ]

    def _engines(self) -> Source:
        # An HTTP client and a driver's library, which other sources need not load.
        from services.nvml import Nvml
        from services.telemetry.sources.devices import DcgmCards, NvmlCards
        from services.telemetry.sources.engines import Devices, EnginesSource, no_devices

        settings, node = self._settings, self._nodes[0]
        devices: Devices = no_devices
        if settings.dcgm_url:
            devices = DcgmCards(
                settings.dcgm_url,
                lambda error: self._on_error(f"{node} dcgm", error),
                timeout_s=settings.scrape_timeout_s / 2,
            ).read
        elif settings.devices != "none":
            cards = NvmlCards(
                Nvml(),
                self._shell.clock,
                lambda error: self._on_error(f"{node} nvml", error),
                must=settings.devices == "nvml",
                timeout_s=settings.scrape_timeout_s / 2,
            )
            devices = cards.read
        return EnginesSource(
            node,
            settings.engines,
            Path(settings.sockets.replace("{node}", node)),
            self._position(node),
            self._on_error,
            self._shell.clock,
            step_s=settings.step_s,
            timeout_s=settings.scrape_timeout_s,
            max_age_s=settings.max_age_s,
            devices=devices,
            wall_s=lambda: self._wall_ns() / 1e9,
        )

    def _position(self, node: str) -> Callable[[], tuple[int, int]]:
        return lambda: (self._sampler.boot_id(node), self._sampler.last_step(node))

    async def _follow(self, source: Source) -> None:
        async for reading in source.readings():
            if self._shell.stopping.is_set():
                return
            sample = self._sampler.take(reading)
            if sample is not None:
                self._failing.discard(sample.node)
                # Engines fail one by one: those with numbers are well again.
                self._failing.difference_update(
                    worker for worker, age_s in zip(sample.workers, sample.ages_s, strict=False) if age_s == age_s
                )
                await self._publish(sample)
                self._measures.published(reading.waited_s)

    async def _publish(self, sample: NodeSample) -> None:
        target = self._subjects[sample.node]
        data = NODE_SAMPLE.encode(sample)
        if not self._shell.observe.tracing:
            await self._shell.bus.publish(target, data)
            return
        with self._shell.observe.span("telemetry sample", kind="producer", subject=target) as span:
            if span.recording:
                span.set("tidegate.node", sample.node)
                span.set("tidegate.step", sample.step)
                span.set("tidegate.workers", len(sample.workers))
            await self._shell.bus.publish(target, data, span.headers())

    def _on_error(self, node: str, error: Exception) -> None:
        """Count every failure, log the first of a row: a node that is away is asked ten times a second."""
        self._measures.failed(error)
        if node not in self._failing:
            self._failing.add(node)
            log.warning("source failed", extra={"fields": {"node": node, "error": str(error)}})


def build(settings: Settings) -> Telemetry:
    """The service of these settings; SettingsError when they name no node."""
    return Telemetry(settings)
