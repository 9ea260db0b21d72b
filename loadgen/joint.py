"""Several fleets under one control, in step: what the control costs a step is paid once for all of them.

Seeing and commanding a card of two workers takes some eight times as long as emulating it, and 64 such cards only
four times as long as one: training on many small configurations would spend its time there.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.engine.fleet import Fleet
from schemas.identity import STEP_S


class JointFleet:
    """Fleets side by side, workers and cards numbered through: give it to ``Control`` in the place of a fleet, with
    ``config`` and all their tables in order. Each runs as it would alone."""

    def __init__(self, fleets: Sequence[Fleet]) -> None:
        """ValueError for none, or fleets whose classes promise different things: one control has one idea of them."""
        if not fleets:
            raise ValueError("no fleets: expected at least one")
        first = fleets[0].config
        if any(fleet.config.limits != first.limits for fleet in fleets):
            raise ValueError("fleets with unlike class limits: expected one set for all")
        ends = np.cumsum([fleet.workers for fleet in fleets]).tolist()
        cards = np.cumsum([0, *(fleet.config.cards for fleet in fleets)]).tolist()
        self.fleets = tuple(fleets)
        self.workers: int = ends[-1]
        self.rows = tuple(slice(end - fleet.workers, end) for fleet, end in zip(fleets, ends, strict=True))
        """Each fleet's workers."""
        self.card_of: NDArray[np.int64] = np.concatenate(
            [fleet.card_of + card for fleet, card in zip(fleets, cards, strict=False)]
        )
        self.config = msgspec.structs.replace(first, cards=cards[-1])
        """The first's, with the number of all cards: what ``Control`` reads of it holds for all."""

    def metrics(self) -> NDArray[np.float64]:
        """float64 [workers, len(METRICS)]."""
        return np.concatenate([fleet.metrics() for fleet in self.fleets])

    def command(
        self,
        *,
        rho: NDArray[np.float64],
        max_running: NDArray[np.int64],
        evict_bytes: NDArray[np.float64],
        compact_bytes: NDArray[np.float64],
    ) -> None:
        """As ``Fleet.command``, every argument [workers]."""
        for fleet, rows in zip(self.fleets, self.rows, strict=True):
            fleet.command(
                rho=rho[rows],
                max_running=max_running[rows],
                evict_bytes=evict_bytes[rows],
                compact_bytes=compact_bytes[rows],
            )

    def advance(self, step_s: float = STEP_S) -> None:
        """Let ``step_s`` seconds pass in every fleet."""
        for fleet in self.fleets:
            fleet.advance(step_s)
