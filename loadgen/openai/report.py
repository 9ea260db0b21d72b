"""What a run came to: percentiles, throughput, goodput, and everything that went wrong.

Pure. Records come in one by one and only numbers are kept of them.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping

import msgspec
import numpy as np

from loadgen.openai.records import Failure, RequestRecord
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass

LATE_S = 0.05
"""A client that sends so much later than it wanted (P99) measures itself."""


class Spread(msgspec.Struct, frozen=True):
    """Percentiles of ``count`` values; NaN (null in JSON) where there are none."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    largest: float


class ClassReport(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one class; times in seconds."""

    requests: int
    succeeded: int
    good: int
    """Within the class's limits: TTFT, mean time per output token, completion."""
    goodput_tokens_per_s: float
    """Output tokens of those, over the run."""
    ttft_s: Spread
    tpot_s: Spread


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Latencies count from when a request was due, not from when the client got round to sending it."""

    url: str
    model: str
    loop: str
    started_unix_s: float
    duration_s: float
    """From the start to the last answer's end."""
    requests: int
    """Sent or tried."""
    succeeded: int
    failures: dict[str, int]
    """By kind (records.Failure)."""
    examples: dict[str, str]
    """The first of each kind, in the server's or system's own words."""
    not_sent: dict[str, int]
    """Planned turns that were never sent, by reason."""
    left_out: dict[str, int]
    """What the trace or the draws held that could not be asked at all."""
    held_back: int
    """Requests that waited for --max-concurrency."""
    wait_s: Spread
    """From due to sent."""
    ttft_s: Spread
    gap_s: Spread
    """Between events with tokens."""
    tpot_s: Spread
    e2e_s: Spread
    prompt_tokens: int
    """Of requests that succeeded, as the next two."""
    kept_tokens: int
    """Of those: history, which a prefix cache may hold."""
    cached_tokens: int | None
    """Of those: cached, as the server says; None where it never did."""
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    good: int
    """Requests within their class's limits."""
    classes: dict[str, ClassReport]
    notes: tuple[str, ...]

    @property
    def failed(self) -> int:
        return self.requests - self.succeeded


class Tally:
    """Takes records, gives a Report."""

    def __init__(self, limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._gaps_s = array("d")
        self._wait_s = array("d")
        self._e2e_s = array("d")
        self._ttft_s: dict[str, array[float]] = {}
        self._tpot_s: dict[str, array[float]] = {}
        self._counts: dict[str, Counter[str]] = {}
        self.requests = 0
        self.failures: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.output_tokens = 0
        self._prompt_tokens = 0
        self._kept_tokens = 0
        self._cached_tokens: int | None = None
        self._by_chunks = 0
        self._contradicted = 0
        self._last_s = 0.0

    def add(self, record: RequestRecord) -> None:
        """Count one request."""
        name = record.service_class
        counts = self._counts.setdefault(name, Counter())
        ttft_s, tpot_s = self._ttft_s.setdefault(name, array("d")), self._tpot_s.setdefault(name, array("d"))
        self.requests += 1
        counts["requests"] += 1
        self._last_s = max(self._last_s, record.end_s)
        if not math.isnan(record.wait_s):
            self._wait_s.append(record.wait_s)
        # Latencies of failures stand in the record: a mean over answers that came to nothing would flatter or mislead.
        if record.failure is not Failure.NONE:
            self.failures[record.failure.value] += 1
            self.examples.setdefault(record.failure.value, record.detail)
            return
        counts["succeeded"] += 1
        for values, value in ((ttft_s, record.ttft_s), (tpot_s, record.tpot_s), (self._e2e_s, record.e2e_s)):
            if not math.isnan(value):
                values.append(value)
        self._gaps_s.extend(record.gaps_s)
        self.output_tokens += record.output_tokens
        self._prompt_tokens += record.prompt_tokens
        self._kept_tokens += record.kept_tokens
        if record.cached_tokens is not None:
            self._cached_tokens = (self._cached_tokens or 0) + record.cached_tokens
        self._by_chunks += record.counted_by == "chunks"
        self._contradicted += record.is_contradicted
        if is_good(record, self._limits[ServiceClass[name.upper()]]):
            counts["good"] += 1
            counts["good_tokens"] += record.output_tokens

    @property
    def ttft_p50_s(self) -> float:
        """For a progress line: the median so far, NaN before there is one."""
        return _spread(*self._ttft_s.values()).p50

    def report(
        self, *, url: str, model: str, loop: str, started_unix_s: float, held_back: int,
        not_sent: Mapping[str, int], left_out: Mapping[str, int], notes: tuple[str, ...] = (),
    ) -> Report:  # fmt: skip
        """Everything so far."""
        seconds = max(self._last_s, 1e-9)
        succeeded = self.requests - sum(self.failures.values())
        told = list(notes)
        wait_s = _spread(self._wait_s)
        if wait_s.p99 > LATE_S and not held_back:
            told.append(f"the client itself sent late (P99 {wait_s.p99:.3f} s): it may be the bottleneck")
        if self._by_chunks:
            told.append(f"{self._by_chunks:,} answers without ids or usage: each chunk was taken for one token")
        if self._contradicted:
            told.append(f"{self._contradicted:,} answers whose usage counts other tokens than were sent")
        return Report(
            url=url, model=model, loop=loop, started_unix_s=started_unix_s, duration_s=self._last_s,
            requests=self.requests, succeeded=succeeded, failures=dict(self.failures), examples=self.examples,
            not_sent=dict(not_sent), left_out=dict(left_out), held_back=held_back, wait_s=wait_s,
            ttft_s=_spread(*self._ttft_s.values()), gap_s=_spread(self._gaps_s), tpot_s=_spread(*self._tpot_s.values()),
            e2e_s=_spread(self._e2e_s), prompt_tokens=self._prompt_tokens, kept_tokens=self._kept_tokens,
            cached_tokens=self._cached_tokens, output_tokens=self.output_tokens, requests_per_s=succeeded / seconds,
            output_tokens_per_s=self.output_tokens / seconds,
            goodput_tokens_per_s=sum(one["good_tokens"] for one in self._counts.values()) / seconds,
            good=sum(one["good"] for one in self._counts.values()),
            classes={
                name: ClassReport(
                    requests=one["requests"], succeeded=one["succeeded"], good=one["good"],
                    goodput_tokens_per_s=one["good_tokens"] / seconds,
                    ttft_s=_spread(self._ttft_s[name]), tpot_s=_spread(self._tpot_s[name]),
                )
                for name, one in self._counts.items()
            },
            notes=tuple(told),
        )  # fmt: skip


def ttft_limit_s(limits: ClassLimits, prompt_tokens: int, kept_tokens: int) -> float:
    """Limit of the time to first token, seconds; inf = none.

    History counts as cached: a server that let go of it has broken the promise that the class makes.
    """
    return limits.ttft_base_s + limits.ttft_per_token_s * (prompt_tokens - kept_tokens)


def is_good(record: RequestRecord, limits: ClassLimits) -> bool:
    """Whether an answer kept every limit of its class; a missing time (no token, one token) breaks none."""
    limit_s = ttft_limit_s(limits, record.prompt_tokens, record.kept_tokens)
    late = record.ttft_s > limit_s or record.tpot_s > limits.tpot_s or record.e2e_s > limits.completion_s
    return not record.failure and not late


def _spread(*parts: array[float]) -> Spread:
    values = np.concatenate([np.frombuffer(part, dtype=np.float64) for part in parts if part] or [np.empty(0)])
    if not len(values):
        return Spread(0, math.nan, math.nan, math.nan, math.nan, math.nan, math.nan)
    p50, p90, p95, p99 = np.quantile(values, [0.5, 0.9, 0.95, 0.99]).tolist()
    return Spread(len(values), float(values.mean()), p50, p90, p95, p99, float(values.max()))
