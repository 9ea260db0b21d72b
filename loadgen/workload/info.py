"""What a workload is like: rates, lengths, burstiness, sessions.

Pure: ``info`` computes, ``render`` returns lines; nothing here prints.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from loadgen.workload.chains import start_times
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass


class Spread(msgspec.Struct, frozen=True):
    """Mean, median, 90th and 99th percentile and the largest of some values; zeros for none."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: float


class WorkloadInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A description; lengths in tokens, times in seconds, rates a second."""

    name: str
    source: str
    requests: int
    duration_s: float
    requests_per_s: float
    """All turns over ``duration_s``, in which the first ones come: the rate of a replay that goes on so."""
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    arrival_cv: float
    """Coefficient of variation of the gaps between first turns; 1 is Poisson. 0 with fewer than three."""
    peak_rate_10s: float
    """Nominal requests a second in the fullest 10 s."""
    prompt: Spread
    output: Spread
    max_tokens: Spread
    classes: dict[str, int]
    sessions: int
    """Sessions of more than one turn."""
    single_requests: int
    turns: Spread
    """Turns of those sessions."""
    think: Spread
    """Client delay between turns, seconds."""
    prefix_reuse: float
    """Share of all prompt tokens that repeat the session's previous turn."""
    left_out: dict[str, int]
    notes: list[str]


def info(workload: Workload) -> WorkloadInfo:
    """Measure a workload."""
    table = workload.requests
    first = table.is_first
    gaps_s = np.diff(np.sort(table.arrival_s[first]))
    mean_gap_s = float(gaps_s.mean()) if len(gaps_s) > 1 else 0.0
    _, turns = np.unique(table.session, return_counts=True)
    in_time_s = start_times(table)
    in_time_s = in_time_s[in_time_s < workload.duration_s]
    per_10s = np.bincount((in_time_s / 10.0).astype(np.int64)) if len(in_time_s) else np.zeros(1)
    prompt_total = int(table.prompt_tokens.sum())
    classes = np.bincount(table.service_class, minlength=len(ServiceClass))
    return WorkloadInfo(
        name=workload.name,
        source=workload.source,
        requests=len(table),
        duration_s=workload.duration_s,
        requests_per_s=len(table) / workload.duration_s,
        prompt_tokens_per_s=prompt_total / workload.duration_s,
        output_tokens_per_s=int(table.output_tokens.sum()) / workload.duration_s,
        arrival_cv=float(gaps_s.std()) / mean_gap_s if mean_gap_s > 0 else 0.0,
        peak_rate_10s=float(per_10s.max()) / 10.0,
        prompt=_spread(table.prompt_tokens),
        output=_spread(table.output_tokens),
        max_tokens=_spread(table.max_tokens),
        classes={one.name.lower(): int(classes[one]) for one in ServiceClass if classes[one]},
        sessions=int((turns > 1).sum()),
        single_requests=int((turns == 1).sum()),
        turns=_spread(turns[turns > 1]),
        think=_spread(table.think_s[table.next_turn >= 0]),
        prefix_reuse=int(table.cached_tokens.sum()) / prompt_total if prompt_total else 0.0,
        left_out=dict(workload.left_out),
        notes=list(workload.notes),
    )


def render(described: WorkloadInfo) -> list[str]:
    """The description as plain text lines."""
    d = described
    lines = [
        f"{d.name} ({d.source})",
        f"requests       {d.requests:,} over {d.duration_s:,.0f} s, {d.requests_per_s:.3g}/s"
        f" (fullest 10 s {d.peak_rate_10s:.3g}/s)",
        f"tokens         prompt {d.prompt_tokens_per_s:,.0f}/s, output {d.output_tokens_per_s:,.0f}/s",
        f"burstiness     CV {d.arrival_cv:.2f} of the gaps between "
        + ("session starts" if d.sessions else "arrivals")
        + " (1 = Poisson)",
        f"               {'mean':>9} {'p50':>9} {'p90':>9} {'p99':>9} {'largest':>9}",
        _row("prompt tokens", d.prompt),
        _row("output tokens", d.output),
        _row("max_tokens", d.max_tokens),
    ]
    if d.sessions:
        lines += [_row("turns", d.turns), _row("think time s", d.think)]
        lines.append(
            f"sessions       {d.sessions:,} of several turns, {d.single_requests:,} single requests;"
            f" {d.prefix_reuse:.1%} of prompt tokens repeat the turn before"
        )
    else:
        lines.append("sessions       none: every request stands alone")
    lines.append("classes        " + (", ".join(f"{k} {v:,}" for k, v in d.classes.items()) or "none"))
    lines += [f"left out       {count:,} {why}" for why, count in d.left_out.items() if count]
    lines += [f"note           {note}" for note in d.notes]
    return lines


def _spread(values: npt.NDArray[np.generic]) -> Spread:
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0)
    numbers = values.astype(np.float64)
    p50, p90, p99 = (float(value) for value in np.percentile(numbers, (50, 90, 99)))
    return Spread(float(numbers.mean()), p50, p90, p99, float(numbers.max()))


def _row(name: str, spread: Spread) -> str:
    cells = (spread.mean, spread.p50, spread.p90, spread.p99, spread.largest)
    told = (f"{cell:,.0f}" if cell >= 100 or cell == int(cell) else f"{cell:,.1f}" for cell in cells)
    return f"{name:<14} " + " ".join(f"{cell:>9}" for cell in told)
