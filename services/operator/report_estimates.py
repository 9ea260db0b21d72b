"""What Tidegate could have brought at most, from what was seen. Pure.

Every figure is a bound with its formula, none a forecast: in shadow the server did not react to anything, so what
would have followed from an action is not known. Where a server does not tell what a bound needs, it is unknown, and
where memory was never short, it is nothing.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.metrics import LATENCY_RATIO_EDGES
from services.operator.attach_seen import ROOM_LIVE_USE, Seen

WITHIN: Final = LATENCY_RATIO_EDGES.index(1.0) + 1
"""Bins that lie within the class limit: 1.0 is an edge."""


class Estimate(NamedTuple):
    """``bound``: at most so much, in ``unit``; None: not known."""

    name: str
    bound: float | None
    unit: str
    words: str
    formula: str


def estimates(seen: Seen) -> list[Estimate]:
    return [_admission(seen), _recomputed(seen), _idle(seen), _unused(seen)]


def never_short(seen: Seen) -> bool | None:
    """Whether memory was never short all the time; None where the server does not tell it."""
    preemptions = seen.counted.get("preemptions")
    if seen.memory_short_s > 0 or (preemptions is not None and preemptions > 0):
        return False
    return None if preemptions is None or (seen.memory_known_s == 0 and seen.waiting_s > 0) else True


def _admission(seen: Seen) -> Estimate:
    room = f"kv_bytes - kv_idle_bytes < {ROOM_LIVE_USE:g} x q0_bytes"
    formula = f"sum(waiting_for_memory x dt while {room}) / sum(waiting x dt)"
    name, unit = "waiting saved by admission", "share of requests x seconds waited"
    if seen.seconds == 0:
        return Estimate(name, None, unit, "not known: nothing was seen", formula)
    if seen.waiting_s == 0:
        return Estimate(name, 0.0, unit, "nothing: nobody waited", formula)
    if seen.memory_known_s == 0:
        return Estimate(name, None, unit, "not known: the server does not tell who waits for memory", formula)
    if seen.memory_waiting_s == 0:
        return Estimate(name, 0.0, unit, "nothing: nobody waited for memory", formula)
    bound = seen.room_waiting_s / seen.waiting_s
    if bound == 0:
        full = f"nothing: whoever waited for memory did so while running requests held {ROOM_LIVE_USE:.0%} of it"
        return Estimate(name, 0.0, unit, full, formula)
    return Estimate(name, bound, unit, f"at most {bound:.1%} of all waiting (there was room for those who waited "
                    "for memory in that time)", formula)  # fmt: skip


def _recomputed(seen: Seen) -> Estimate:
    formula = "recomputed_tokens / (prompt_tokens + output_tokens)"
    name, unit = "computing saved by fewer preemptions", "share of tokens computed"
    preemptions, again = seen.counted.get("preemptions"), seen.counted.get("recomputed_tokens")
    computed = seen.counted.get("prompt_tokens", 0.0) + seen.counted.get("output_tokens", 0.0)
    if preemptions == 0 and not again:
        return Estimate(name, 0.0, unit, "nothing: nothing was preempted", formula)
    if again is None or computed == 0:
        told = "not known: the server does not tell what it computed again"
        return Estimate(
            name, None, unit, told + (f" for {preemptions:,.0f} preemptions" if preemptions else ""), formula
        )
    bound = min(again / computed, 1.0)
    basis = f"{again:,.0f} computed again, as told or as reckoned from preemptions"
    words = f"at most {bound:.1%} of the tokens computed ({basis})"
    return Estimate(name, bound, unit, words, formula)


def _idle(seen: Seen) -> Estimate:
    formula = "sum(kv_idle_bytes x dt) / sum(dt) where kv_idle_bytes is told"
    name = "idle KV that could leave the card"
    if seen.idle_known_s == 0:
        return Estimate(name, None, "bytes", "not known: the server does not tell idle KV", formula)
    mean = seen.idle_bytes_s / seen.idle_known_s
    return Estimate(
        name, mean, "bytes", f"at most {gigabytes(mean)} at a time, on average" if mean else "nothing", formula
    )


def _unused(seen: Seen) -> Estimate:
    formula = "q0_bytes - max(kv_bytes)"
    name = "KV memory that a neighbour could have had"
    if seen.kv_capacity_bytes == 0 or seen.seconds == 0:
        return Estimate(name, None, "bytes", "not known", formula)
    free = max(seen.kv_capacity_bytes - seen.kv_peak_bytes, 0.0)
    share = free / seen.kv_capacity_bytes
    words = f"at most {gigabytes(free)} ({share:.0%}): no more than the rest was ever in use" if free else "nothing"
    return Estimate(name, free, "bytes", words, formula)


def gigabytes(amount: float) -> str:
    return f"{amount / 1e9:.2f} GB" if amount >= 1e8 else f"{amount / 1e6:.1f} MB"


def share_within(bins: list[float]) -> float | None:
    """Share of a latency histogram within the class limit; None where it is empty."""
    total = sum(bins)
    return sum(bins[:WITHIN]) / total if total > 0 else None


def quantile_bound(bins: list[float], q: float) -> float | None:
    """The upper edge of the bin in which the ``q`` quantile lies, in multiples of the class limit: inf in the open
    one, None where the histogram is empty."""
    total, below = sum(bins), 0.0
    for edge, count in zip((*LATENCY_RATIO_EDGES, math.inf), bins, strict=False):
        below += count
        if total > 0 and below >= q * total:
            return edge
    return None


def limit_of(name: str, service_class: int) -> float:
    """The class's limit that the bins of ``ttft`` or ``tpot`` are multiples of, seconds; inf: none."""
    if service_class not in ServiceClass.__members__.values():
        return math.inf
    limits = DEFAULT_LIMITS[ServiceClass(service_class)]
    return limits.ttft_base_s if name == "ttft" else limits.tpot_s
