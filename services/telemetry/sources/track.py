"""One engine over time: successive pages in, rows of METRICS out."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.classes import ClassLimits
from schemas.metrics import COLUMN, METRICS, Kind
from services.telemetry.sources.contradictions import contradictions
from services.telemetry.sources.counters import Counters, Joined
from services.telemetry.sources.histograms import Histogram, gained, nothing, sum_of_squares
from services.telemetry.sources.judge import Judge
from services.telemetry.sources.model_facts import ASSUMED_KV_BYTES_PER_TOKEN, ModelFacts, kv_bytes_per_token
from services.telemetry.sources.said import Pool, Said, finite

LINK_KNOWN_BYTES: Final = 10e6
"""Moved before a bandwidth is made of it: less is all start-up cost."""
_LOW: Final = np.array([metric.low for metric in METRICS])
_HIGH: Final = np.array([metric.high for metric in METRICS])
_COUNTERS: Final = tuple(metric.name for metric in METRICS if metric.kind is Kind.COUNTER)
_BLOCK_BYTES: Final = COLUMN["block_bytes"]


class Row(NamedTuple):
    """One engine's columns, before its card's are filled in."""

    values: NDArray[np.float64]
    """float64 [len(METRICS)]; NaN = absent."""
    flags: list[tuple[str, str]]
    """(metric, why) of what was not believed or had to be assumed."""
    pool_bytes: float
    """KV capacity; NaN = unknown."""
    claimed_share: float
    """Share of the card's memory that the engine was told to take; NaN where it was told bytes."""


def empty_row() -> NDArray[np.float64]:
    """float64 [len(METRICS)], all absent."""
    return np.full(len(METRICS), np.nan)


def sane(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[tuple[str, str]]]:
    """A copy without what is outside a metric's range, and flags of that."""
    with np.errstate(invalid="ignore"):
        odd = (values < _LOW) | (values > _HIGH)
    out = np.where(odd, np.nan, values)
    return out, [(METRICS[k].name, f"out of range: {values[k]:g}") for k in np.flatnonzero(odd).tolist()]


class Track:
    """History of one engine: cumulative counters over its lives, latency bins, moments of contexts."""

    def __init__(self, limits: ClassLimits) -> None:
        self._counters = Counters()
        self._own = Counters()
        self._joined = Joined()
        self._judge = Judge(limits)
        self._before: dict[str, float] = {}
        self._histograms: dict[str, Histogram] = {}
        self._seen_ns: int | None = None
        self._context = {"finished_context_tokens": 0.0, "finished_context_tokens_sq": 0.0}
        self._running = 0.0
        self._crashes = 0.0
        self._recomputed = 0.0

    @property
    def restarts(self) -> int:
        return self._counters.restarts

    def row(
        self,
        said: Said,
        t_ns: int,
        model: ModelFacts | None = None,
        own: NDArray[np.float64] | None = None,
        most_bytes: float = math.nan,
    ) -> Row:
        """The row of a page asked at ``t_ns`` (any clock that does not go back).

        ``own``: float64 [len(METRICS)], what the engine says of itself over its socket; its finite values win.
        ``most_bytes``: the pool cannot be larger than this where its size is assumed; NaN: no bound known.
        """
        restarts = self._counters.restarts
        counters = self._counters.take(said.counters, said.marker)
        first = self._seen_ns is None
        passed_s = (t_ns - self._seen_ns) / 1e9 if self._seen_ns is not None else math.nan
        self._seen_ns = t_ns
        brought = {} if first else {k: v - self._before.get(k, 0.0) for k, v in counters.items() if k in self._before}
        self._before = self._before | counters
        restarted = self._counters.restarts > restarts
        windows = self._windows(said, first, restarted)
        self._judge.take(windows, brought)
        flags: list[tuple[str, str]] = []
        per_token, how = _bytes_per_token(said.pool, model or ModelFacts(), own, most_bytes)
        if how == "assumed":
            flags.append(("kv_bytes_per_token", "assumed: no page, folder or engine says it"))
        pool_bytes = said.pool.capacity_tokens * per_token
        columns = {
            **said.gauges,
            **_in_bytes(said.pool, per_token),
            **counters,
            **self._judge.columns(),
            **self._contexts(windows),
            **self._lives(said, brought, restarted),
            **_link(counters, brought, passed_s),
            "quota_hard_bytes": pool_bytes,
            "iteration_s": _mean(windows.get("gap")),
            "weights_bytes": (model or ModelFacts()).weights_bytes,
        }
        for name, why in contradictions(columns, brought, pool_bytes):
            flags.append((name, why))
            columns[name] = math.nan
        values = empty_row()
        for name, value in finite(columns).items():
            if name in COLUMN:
                values[COLUMN[name]] = value
        values, odd = sane(values)
        if own is not None:
            values = np.where(np.isnan(own), values, own)
        self._join(values, own, columns, said.marker)
        return Row(values, flags + odd, pool_bytes, said.pool.claimed_share)

    def _join(
        self, values: NDArray[np.float64], own: NDArray[np.float64] | None, page: dict[str, float], marker: float
    ) -> None:
        """Write the counters: the engine's own where it tells them, one series whether its socket answers or not."""
        told = {} if own is None else {name: float(own[COLUMN[name]]) for name in _COUNTERS}
        mine = self._own.take(finite(told), marker)
        joined = self._joined.take(mine, {name: page[name] for name in _COUNTERS if page.get(name, math.nan) >= 0})
        for name, value in joined.items():
            values[COLUMN[name]] = value

    def _windows(self, said: Said, first: bool, restarted: bool) -> dict[str, Histogram]:
        out = {}
        for name, now in said.histograms.items():
            before = None if restarted else self._histograms.get(name)
            out[name] = nothing(now) if first or (before is None and not restarted) else gained(now, before)
        self._histograms = self._histograms | said.histograms
        return out

    def _lives(self, said: Said, brought: dict[str, float], restarted: bool) -> dict[str, float]:
        """Out-of-memory crashes and tokens computed again, as far as a page tells: a life that ended with requests
        running counts as a crash, which is the most it can have been; a preempted request computes again what a
        running one holds on average."""
        if restarted and self._running > 0:
            self._crashes += 1.0
        running = said.gauges.get("running", 0.0)
        self._running = running
        again = brought.get("preemptions", math.nan) * said.pool.used_tokens / max(1.0, running)
        if again == again:
            self._recomputed += again
        out = {"oom": self._crashes}
        if "preemptions" in said.counters and "recomputed_tokens" not in said.counters:
            out["recomputed_tokens"] = self._recomputed
        return out

    def _contexts(self, windows: dict[str, Histogram]) -> dict[str, float]:
        """Context lengths of finished requests: the sums are the engine's, the squares are estimated from buckets,
        prompt and output taken as independent."""
        prompt, output = windows.get("prompt"), windows.get("output")
        if prompt is None or output is None or not (prompt.total == prompt.total and output.total == output.total):
            return {}
        events = min(prompt.events, output.events)
        if events > 0:
            tokens = prompt.total + output.total
            squares = sum_of_squares(prompt) + sum_of_squares(output) + 2 * prompt.total * output.total / events
            self._context["finished_context_tokens"] += tokens
            self._context["finished_context_tokens_sq"] += max(squares, tokens**2 / events)
        return dict(self._context)


def _bytes_per_token(
    pool: Pool, model: ModelFacts, own: NDArray[np.float64] | None, most_bytes: float
) -> tuple[float, str]:
    """Bytes and where they come from: the engine itself, its page, its model's folder, or nowhere."""
    if own is not None and own[_BLOCK_BYTES] > 0 and pool.block_tokens > 0:
        return float(own[_BLOCK_BYTES]) / pool.block_tokens, "engine"
    if pool.pool_bytes > 0 and pool.capacity_tokens > 0:
        return pool.pool_bytes / pool.capacity_tokens, "page"
    told = kv_bytes_per_token(model.config, pool.cache_dtype)
    if told > 0:
        return told, "model"
    bound = most_bytes / pool.capacity_tokens if pool.capacity_tokens > 0 else math.nan
    return min(ASSUMED_KV_BYTES_PER_TOKEN, bound if bound > 0 else math.inf), "assumed"


def _in_bytes(pool: Pool, per_token: float) -> dict[str, float]:
    idle = pool.idle_tokens if pool.idle_tokens == pool.idle_tokens else 0.0
    return {
        "kv_bytes": (pool.used_tokens + idle) * per_token,
        "kv_idle_bytes": pool.idle_tokens * per_token,
        "block_bytes": pool.block_tokens * per_token,
        "kv_bytes_per_token": per_token,
        "host_capacity_bytes": pool.host_capacity_tokens * per_token,
        "host_used_bytes": pool.host_used_tokens * per_token,
    }


def _link(counters: dict[str, float], brought: dict[str, float], passed_s: float) -> dict[str, float]:
    """Bandwidth over all transfers so far, and traffic since the scrape before."""
    moved = counters.get("evicted_bytes", math.nan) + counters.get("loaded_bytes", math.nan)
    now = brought.get("evicted_bytes", math.nan) + brought.get("loaded_bytes", math.nan)
    spent_s = counters.get("transfer_s", math.nan)
    return {
        "link_bytes_per_s": moved / spent_s if moved >= LINK_KNOWN_BYTES and spent_s > 0 else math.nan,
        "link_used_bytes_per_s": now / passed_s if passed_s > 0 else math.nan,
    }


def _mean(histogram: Histogram | None) -> float:
    """Mean gap between tokens: each running sequence gets one token an iteration."""
    return histogram.total / histogram.events if histogram is not None and histogram.events > 0 else math.nan
