"""What an adapter makes of its engine's page: the engine's facts in Tidegate's words, of one moment.

Each adapter (``vllm``, ``sglang``, ``triton``) is pure: it declares what its engine can give (``PROVIDES``), takes a
page apart into engines and reads each into a :class:`Said`. What successive ones amount to is ``track``'s business.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from schemas.actions import MAX_RUNNING_START, RHO_MIN
from schemas.metrics import HISTOGRAM_BINS, METRICS
from services.telemetry.sources.histograms import Histogram
from services.telemetry.sources.page import Page, Part


class Presence(enum.Enum):
    """How a source comes by a metric."""

    MEASURED = "measured"
    """The engine says it."""
    DERIVED = "derived"
    """Computed from what it says; the adapter's text tells how."""
    SOMETIMES = "sometimes"
    """As said or derived, but only in some versions or with some option on."""
    FACT = "fact"
    """Certain without asking: of a server that nobody commands, or from the settings."""
    ASSUMED = "assumed"
    """Said or derived where possible, else a stated assumption, which is flagged."""
    ABSENT = "absent"
    """Never: the column is NaN."""


class Key(NamedTuple):
    """One engine behind an endpoint."""

    model: str
    rank: str
    """The engine's number under data parallelism; empty where the page has none."""


class Pool(NamedTuple):
    """KV as the engine counts it; NaN = not said. Used tokens are of running requests, idle ones beside them."""

    capacity_tokens: float = math.nan
    block_tokens: float = math.nan
    used_tokens: float = math.nan
    idle_tokens: float = math.nan
    pool_bytes: float = math.nan
    """What all of it takes on the card, where the page says so and can be believed."""
    cache_dtype: str = "auto"
    host_capacity_tokens: float = math.nan
    host_used_tokens: float = math.nan
    claimed_share: float = math.nan
    """Share of the card's memory that the engine was told to take in all."""


class Said(NamedTuple):
    """One engine at one moment."""

    gauges: dict[str, float]
    """METRICS gauges, in their units."""
    counters: dict[str, float]
    """Raw counters of this life of the engine: METRICS names, ``uncached_tokens`` (prompt tokens computed, by first
    tokens) and ``transfer_s`` (time spent on host transfers)."""
    histograms: dict[str, Histogram]
    """``ttft``, ``gap``, ``tpot``, ``completion`` in seconds; ``prompt`` and ``output``: tokens of ended requests."""
    pool: Pool
    marker: float = math.nan
    """Changes with each life of the engine."""


class Adapter(NamedTuple):
    """One kind of engine."""

    kind: str
    prefixes: tuple[str, ...]
    """Beginnings of its metrics' names; a page without any is not this engine's."""
    reads: tuple[str, ...]
    """Beginnings of the names that ``read`` asks for, the process's own included."""
    provides: Mapping[str, Presence]
    engines: Callable[[Page], Mapping[Key, Part]]
    read: Callable[[Page, Part], Said]


UNCOMMANDED: Final[Mapping[str, float]] = {
    "rho": RHO_MIN,
    "generation": 0.0,
    "max_running": float(MAX_RUNNING_START),
    "starting": 0.0,
}
"""Gauges of a server that answers and that nobody commands, whatever its kind."""
ASSUMED: Final = (
    "hbm_bytes", "card_kv_capacity_bytes", "block_bytes", "kv_bytes_per_token", "reference_tokens_per_s",
)  # fmt: skip
"""What no kind of page is sure to tell."""
BY_DIFFERENCE: Final = (
    *(f"ttft_{k:02d}" for k in range(HISTOGRAM_BINS)),
    *(f"tpot_{k:02d}" for k in range(HISTOGRAM_BINS)),
)
"""Latencies in bins of METRICS, from successive pages."""


def provides(table: Mapping[Presence, Sequence[str]]) -> dict[str, Presence]:
    """Presence of every metric: what the table does not name is absent. ValueError for an unknown or doubled name."""
    out = {metric.name: Presence.ABSENT for metric in METRICS}
    for presence, names in table.items():
        for name in names:
            if name not in out:
                raise ValueError(f"{name!r}: expected a name of METRICS")
            if out[name] is not Presence.ABSENT:
                raise ValueError(f"{name}: named twice")
            out[name] = presence
    return out


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those that are said."""
    return {name: value for name, value in values.items() if value == value}


def present(histograms: Mapping[str, Histogram | None]) -> dict[str, Histogram]:
    return {name: histogram for name, histogram in histograms.items() if histogram is not None}


def number(text: str) -> float:
    """A label's number, 0 or more; NaN for anything else."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if 0.0 <= value < math.inf else math.nan
