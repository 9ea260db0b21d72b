"""Latency judged against a class's limits from an engine's histograms, since a real engine names no single request.

The emulator knows each request's fate. A real engine's histograms do not join a request's first token to its later
ones, so good tokens are tokens x share of first tokens within the limit x share of token gaps within the limit, window
by window (DESIGN section 3): exact where the two are independent, and low where the same requests break both. A window
without first tokens (or gaps) takes the last share that was seen, and 1 before any.

The limit of a first token depends on its prompt: the window's mean of prompt tokens computed per first token stands
for each request's own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from schemas.classes import ClassLimits
from schemas.metrics import HISTOGRAM_BINS
from services.telemetry.sources.histograms import Histogram, ratio_bins, share_within


class Judge:
    """Bins and counts of one engine since telemetry began to watch it."""

    def __init__(self, limits: ClassLimits) -> None:
        self._limits = limits
        self._ttft: NDArray[np.float64] | None = None
        self._tpot: NDArray[np.float64] | None = None
        self._shares = {"ttft": 1.0, "gap": 1.0, "tpot": 1.0, "completion": 1.0}
        self._good = self._judged = self._violations = 0.0
        self._judges = False

    def take(self, gained: Mapping[str, Histogram], counters: Mapping[str, float]) -> None:
        """What a window brought: histograms as ``said.Said`` names them and differences of counters."""
        limits = self._limits
        uncached = counters.get("uncached_tokens", math.nan)
        ttft, gap, tpot = gained.get("ttft"), gained.get("gap"), gained.get("tpot")
        if ttft is not None:
            mean = uncached / ttft.events if ttft.events > 0 and uncached == uncached else 0.0
            limit_s = limits.ttft_base_s + limits.ttft_per_token_s * mean
            self._ttft = _added(self._ttft, ratio_bins(ttft, limit_s))
            self._share("ttft", ttft, limit_s)
        of_requests = tpot if tpot is not None else gap
        if of_requests is not None:
            self._tpot = _added(self._tpot, ratio_bins(of_requests, limits.tpot_s))
            self._share("tpot", of_requests, limits.tpot_s)
        of_gaps = gap if gap is not None else tpot
        if of_gaps is not None:
            self._share("gap", of_gaps, limits.tpot_s)
        completion = gained.get("completion")
        if completion is not None:
            self._share("completion", completion, limits.completion_s)
        self._judges = (
            (ttft is not None or limits.ttft_base_s == math.inf)
            and (of_gaps is not None or limits.tpot_s == math.inf)
            and (completion is not None or limits.completion_s == math.inf)
        )
        within = self._shares["ttft"] * self._shares["completion"]
        if self._judges:
            self._good += counters.get("output_tokens", 0.0) * within * self._shares["gap"]
            finished = counters.get("finished", 0.0)
            self._judged += finished
            self._violations += finished * (1.0 - within * self._shares["tpot"])

    def columns(self) -> dict[str, float]:
        """METRICS counters; those that the engine's histograms cannot tell are not named."""
        out: dict[str, float] = {}
        for name, bins in (("ttft", self._ttft), ("tpot", self._tpot)):
            if bins is not None:
                out |= {f"{name}_{k:02d}": float(bins[k]) for k in range(HISTOGRAM_BINS)}
        if self._judges:
            out |= {"good_tokens": self._good, "judged": self._judged, "violations": self._violations}
        return out

    def _share(self, name: str, histogram: Histogram, limit: float) -> None:
        if histogram.events > 0:
            self._shares[name] = share_within(histogram, limit)


def _added(total: NDArray[np.float64] | None, more: NDArray[np.float64]) -> NDArray[np.float64]:
    return more if total is None else total + more
