"""The line that moves while a run goes on, and the table at its end.

Pure: lines and rich objects come out, whoever runs the command prints them.
"""

from __future__ import annotations

import math

from loadgen.openai.driving import Progress
from loadgen.openai.report import Report, Spread


def progress_line(progress: Progress) -> str:
    """One line, at most 80 columns for reasonable numbers."""
    tally = progress.tally
    failed = sum(tally.failures.values())
    told = f"{progress.elapsed_s:5.0f} s  {tally.requests - failed:,} answered  {progress.in_flight:,} under way"
    if progress.waiting:
        told += f"  {progress.waiting:,} held back"
    if failed:
        told += f"  {failed:,} FAILED"
    told += f"  TTFT P50 {_ms(tally.ttft_p50_s).strip()} ms"
    return told + f"  {tally.output_tokens / max(progress.elapsed_s, 1e-9):,.0f} tokens/s"


def report_lines(report: Report) -> list[str]:
    """What a run came to; 80 columns."""
    lines = [
        f"{report.url}, {report.model}: {report.loop} loop, {report.duration_s:,.1f} s"
        if report.loop != "trace"
        else f"{report.url}, {report.model}: trace, {report.duration_s:,.1f} s",
        f"requests      {report.requests:,}: {report.succeeded:,} answered, {report.failed:,} failed",
    ]
    for kind, count in sorted(report.failures.items()):
        lines.append(f"  {kind:12}{count:>7,}  first: {report.examples[kind]}")
    for told in (report.not_sent, report.left_out):
        word = "not sent" if told is report.not_sent else "left out"
        lines += [f"{word:13} {count:,} {why}" for why, count in sorted(told.items()) if count]
    if report.held_back:
        lines.append(f"held back     {report.held_back:,} by --max-concurrency, up to {report.wait_s.largest:.2f} s")
    cached = "" if report.cached_tokens is None else f", {report.cached_tokens:,} cached"
    lines += [
        f"tokens        {report.prompt_tokens:,} of prompts ({report.kept_tokens:,} history{cached}), "
        f"{report.output_tokens:,} of answers",
        f"throughput    {report.requests_per_s:,.2f} requests/s, {report.output_tokens_per_s:,.1f} tokens/s",
        f"goodput       {report.goodput_tokens_per_s:,.1f} tokens/s within class limits "
        f"({_share(report.good, report.requests)} of requests)",
        "",
        f"{'ms':14}{'mean':>10}{'P50':>10}{'P90':>10}{'P95':>10}{'P99':>10}{'max':>10}",
    ]
    spreads = (
        ("TTFT", report.ttft_s),
        ("token gap", report.gap_s),
        ("TPOT", report.tpot_s),
        ("end to end", report.e2e_s),
    )
    lines += [_row(name, spread) for name, spread in spreads]
    if len(report.classes) > 1:
        for name, one in sorted(report.classes.items()):
            lines.append(f"{name}: {one.requests:,} requests, {_share(one.good, one.requests)} within its limits")
            lines += [_row("  TTFT", one.ttft_s), _row("  TPOT", one.tpot_s)]
    return lines + [f"note: {note}" for note in report.notes]


def _row(name: str, spread: Spread) -> str:
    values = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.largest)
    return f"{name:14}" + "".join(_ms(value) for value in values)


def _ms(seconds: float) -> str:
    return f"{'-':>10}" if math.isnan(seconds) else f"{seconds * 1e3:10,.1f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
