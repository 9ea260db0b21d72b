"""Readings into NodeSamples: each step of a node once, in the order that its readers rely on."""

from __future__ import annotations

from collections.abc import Callable

from schemas.identity import SCHEMA_VERSION
from schemas.telemetry import NodeSample
from services.telemetry.sources.reading import Reading


class Sampler:
    """Boot and last step of each node.

    ``next_boot`` gives boot ids, each greater than all before. A node whose steps begin again is a new life
    of it and gets a boot of its own: otherwise everyone would take its news for old.
    """

    def __init__(self, next_boot: Callable[[], int], source: str) -> None:
        self._next_boot = next_boot
        self._source = source
        self._boot_id = 0
        self._boots: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self.repeated = 0
        """Readings of a step that was published before."""
        self.restarted = 0
        """Nodes whose steps began again."""

    def begin(self) -> None:
        """Take the boot id of this process, which all its nodes start in."""
        self._boot_id = self._next_boot()

    def boot_id(self, node: str) -> int:
        return self._boots.get(node, self._boot_id)

    def last_step(self, node: str) -> int:
        """The last step given out, -1 before the first."""
        return self._steps.get(node, -1)

    def take(self, reading: Reading) -> NodeSample | None:
        """The reading as a message; None for a step that was given out before."""
        last = self.last_step(reading.node)
        if reading.step == last:
            self.repeated += 1
            return None
        if reading.step < last:
            self.restarted += 1
            self._boots[reading.node] = self._next_boot()
        self._steps[reading.node] = reading.step
        return NodeSample(
            node=reading.node,
            boot_id=self.boot_id(reading.node),
            step=reading.step,
            schema_version=SCHEMA_VERSION,
            t_ns=reading.t_ns,
            workers=reading.workers,
            cards=reading.cards,
            classes=reading.classes,
            metrics=reading.metrics,
            source=self._source,
            ages_s=reading.ages_s,
            flags=reading.flags,
        )
