"""How a report reads."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

from schemas.classes import ServiceClass
from services.operator.attach_seen import Seen
from services.operator.report_decisions import Decisions
from services.operator.report_estimates import (
    estimates,
    gigabytes,
    limit_of,
    never_short,
    quantile_bound,
    share_within,
)
from services.operator.session import one_line, shown_time

if TYPE_CHECKING:
    from services.operator.report import Report

WIDTH: Final = 20
WHY_LINES: Final = 5
_NUMBER: Final = re.compile(r"\d+(\.\d+)?")


def as_text(one: Report) -> str:
    """A worker's report, in lines."""
    lines = [one_line(_head(one))]
    lines += ["what was seen"] + (_seen(one.seen) if one.seen is not None else ["  nothing: no samples came"])
    enforced = one.mode == "enforce" or (one.decisions is not None and bool(one.decisions.acted))
    lines += ["what it did" if enforced else "what it would have done", *_decided(one.decisions, one.seen, enforced)]
    brought = "what more there is to win" if enforced else "what that could have brought"
    lines += [f"{brought} (bounds from what was seen, no forecast)"]
    if one.seen is None or one.seen.seconds == 0:
        lines.append("  not known: nothing was seen")
    else:
        if never_short(one.seen):
            lines.append(
                "  memory was never short: for this worker, nothing; what it did not use is a neighbour's gain"
            )
        lines += [f"  {each.name}: {each.words}" for each in estimates(one.seen)]
    return "\n".join(lines) + "\n"


def _head(one: Report) -> str:
    head = one.worker
    if one.seen is not None:
        kind = one.seen.service_class
        head += f", {ServiceClass(kind).name.lower()}" if kind in ServiceClass.__members__.values() else ""
    head += f", {one.mode}" if one.mode else ""
    span = one.seen or one.decisions
    if span is not None and span.begin_ns:
        head += f": {shown_time(span.begin_ns)} to {shown_time(span.end_ns)}"
    return head


def _seen(seen: Seen) -> list[str]:
    unread = f", {_time(seen.unseen_s)} in which the server could not be read" if seen.unseen_s else ""
    lines = [_line("time", f"{_time(seen.seconds)} read{unread}")]
    if seen.seconds == 0:
        return lines
    kv = seen.kv_bytes_s / seen.seconds
    of = seen.kv_capacity_bytes
    lines.append(_line("KV use", f"mean {kv / of:.1%}, peak {seen.kv_peak_bytes / of:.1%} of {gigabytes(of)}" if of
                       else f"mean {gigabytes(kv)}, peak {gigabytes(seen.kv_peak_bytes)}"))  # fmt: skip
    lines.append(_line("running", f"mean {seen.running_s / seen.seconds:.1f}, peak {seen.running_peak:.0f}"))
    lines.append(_line("queue", f"mean {seen.waiting_s / seen.seconds:.1f}, peak {seen.waiting_peak:.0f}; somebody "
                       f"waited {seen.queued_s / seen.seconds:.1%} of the time"))  # fmt: skip
    if seen.memory_known_s == 0:
        short = "not told by this server"
    elif seen.waiting_s == 0:
        short = "nobody waited"
    else:
        short = (
            f"{seen.memory_waiting_s / seen.waiting_s:.1%} of all waiting, "
            f"{seen.memory_short_s / seen.memory_known_s:.1%} of the time"
        )
    lines.append(_line("waiting for memory", short))
    preemptions, again = seen.counted.get("preemptions"), seen.counted.get("recomputed_tokens")
    lines.append(_line("preemptions", ("not told" if preemptions is None else f"{preemptions:,.0f}")
                       + "; tokens computed again: " + ("not told" if again is None else f"{again:,.0f}")))  # fmt: skip
    output, done = seen.counted.get("output_tokens"), seen.counted.get("finished")
    served = "requests not told" if done is None else f"{done:,.0f} requests"
    served += "" if output is None else f", {output:,.0f} output tokens, {output / seen.seconds:.1f}/s"
    lines.append(_line("served", served))
    for name, words in (("ttft", "first token"), ("tpot", "time per token")):
        lines.append(_line(words, _latency(name, seen)))
    for flag, count in _alike(seen.flags)[:WHY_LINES]:
        lines.append(_line("remark", f"{one_line(flag)} ({_steps(count)})"))
    return lines


def _alike(flags: dict[str, int]) -> list[tuple[str, int]]:
    """Remarks that differ in their numbers alone as one, in the words of the first; the most frequent ahead."""
    first: dict[str, str] = {}
    counts: dict[str, int] = {}
    for flag, count in flags.items():
        key = first.setdefault(_NUMBER.sub("", flag), flag)
        counts[key] = counts.get(key, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])


def _latency(name: str, seen: Seen) -> str:
    bins = seen.ttft if name == "ttft" else seen.tpot
    limit_s = limit_of(name, seen.service_class)
    if math.isinf(limit_s):
        return "the class has no limit"
    within, p50, p95 = share_within(bins), quantile_bound(bins, 0.5), quantile_bound(bins, 0.95)
    if within is None or p50 is None or p95 is None:
        return "none was told" if not bins else "none came in that time"
    return f"{within:.1%} within the class limit; p50 {_edge(p50)}, p95 {_edge(p95)}"


def _edge(edge: float) -> str:
    return "beyond 5 x the limit" if math.isinf(edge) else f"at most {edge:g} x the limit"


def _decided(one: Decisions | None, seen: Seen | None, enforced: bool) -> list[str]:
    if one is None:
        return ["  nothing is in the audit stream"]
    chosen = sum(one.would.values())
    lines = [_line("steps", f"{one.steps:,}, decided {chosen:,}" + (f" by {one_line(one.policy)}" if chosen else ""))]
    for name, count in sorted(one.would.items(), key=lambda item: -item[1]):
        spells = one.spells.get(name, 0)
        lines.append(
            _line(f"  {name}", _steps(count) + (f" in {spells:,} spell{'s' * (spells != 1)}" if spells else ""))
        )
    if seen is not None:
        because = [(words, count) for words, count in seen.why.items() if not words.startswith("hold")]
        for words, count in sorted(because, key=lambda item: -item[1])[:WHY_LINES]:
            lines.append(_line("  because", f"{one_line(words)} ({_steps(count)})"))
    if chosen and not enforced:
        far = f"up to {one.rho_high:g} at most" if one.rho_high > 1 else "nowhere: 1.0 throughout"
        lines.append(_line("rho would have gone", far))
    for label, counts in (("held", one.held), ("an order stood", one.orders), ("refused", one.refused),
                          ("carried out", one.acted)):  # fmt: skip
        if counts:
            lines.append(_line(label, _counts(counts)))
    if enforced and not one.acted:
        lines.append(_line("carried out", "nothing"))
    for name, reasons in one.forbidden.items():
        lines.append(_line(f"{name} forbidden", _counts(reasons)))
    return lines


def _counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name.replace('_', ' ')} {_steps(count)}" for name, count in ordered)


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"


def _line(label: str, words: str) -> str:
    return f"  {label.ljust(WIDTH)} {words}"


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
