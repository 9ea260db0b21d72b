"""METRICS: the columns of a NodeSample, one row per worker.

Values are float64; NaN means *missing*, which is never zero. Counters count from the engine's start and
may reset with it; the consumer takes differences, so that a lost sample loses no events. The table is
append-only: a reader takes the columns it knows and reads missing ones as NaN.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

HISTOGRAM_BINS: Final = 16

CONTEXT_EDGES_TOKENS: Final[tuple[float, ...]] = tuple(128.0 * 2.0 ** (k * 10 / 15) for k in range(16))
"""Lower edges of the context histogram's bins: 128 to 131,072 tokens, log2-spaced; the last bin is open and
the first also holds everything shorter."""

LATENCY_RATIO_EDGES: Final[tuple[float, ...]] = (
    0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0,
)  # fmt: skip
"""Inner edges of the latency histograms' 16 bins, in multiples of the class limit: bin 0 is below the first,
bin 15 is beyond the last. 1.0 is an edge, so violations are counted exactly."""


class Kind(enum.Enum):
    """How a column behaves in time."""

    CONSTANT = "constant"
    GAUGE = "gauge"
    COUNTER = "counter"


class Metric(msgspec.Struct, frozen=True):
    """One column: ``low`` and ``high`` bound what a sane source can say; outside is rejected."""

    name: str
    kind: Kind
    unit: str
    low: float
    high: float
    meaning: str
    required: bool = False


_PB = 1e15
_COUNT = 1e7
_TOTAL = 1e18
_C, _G, _N = Kind.CONSTANT, Kind.GAUGE, Kind.COUNTER

METRICS: Final[tuple[Metric, ...]] = (
    Metric("hbm_bytes", _C, "bytes", 1e6, _PB, "the card's HBM", required=True),
    Metric("card_kv_capacity_bytes", _C, "bytes", 0, _PB,
           "HBM - all weights - measured activation and runtime reserve of the card", required=True),
    Metric("q0_bytes", _C, "bytes", 1, _PB, "baseline quota: the worker's share of the card's KV capacity",
           required=True),
    Metric("weights_bytes", _C, "bytes", 0, _PB, "the worker's weights"),
    Metric("block_bytes", _C, "bytes", 1, _PB, "KV of one block"),
    Metric("page_group_bytes", _C, "bytes", 1, _PB, "unit in which HBM is mapped and given back"),
    Metric("kv_bytes_per_token", _C, "bytes", 1, 1e9, "KV of one token"),
    Metric("floor_bytes", _G, "bytes", 0, _PB, "below this quota one request could never finish"),
    Metric("host_capacity_bytes", _C, "bytes", 0, _PB, "host tier open to the worker's card"),
    Metric("link_bytes_per_s", _C, "bytes/s", 0, _PB, "measured bandwidth of the card's host link"),
    Metric("reference_tokens_per_s", _C, "tokens/s", 0, 1e9, "the card's calibrated peak decode rate"),
    Metric("kv_bytes", _G, "bytes", 0, _PB, "physical KV: blocks that hold live or idle KV", required=True),
    Metric("kv_idle_bytes", _G, "bytes", 0, _PB, "the part of it that belongs to idle sessions"),
    Metric("kv_mapped_bytes", _G, "bytes", 0, _PB, "page groups mapped by the worker"),
    Metric("kv_reserved_bytes", _G, "bytes", 0, _PB, "prompt + max_tokens of all admitted requests"),
    Metric("activation_bytes", _G, "bytes", 0, _PB, "activation now in use"),
    Metric("card_free_bytes", _G, "bytes", 0, _PB, "unmapped KV capacity of the card"),
    Metric("frag", _G, "1", 0, 1.000001, "entropy of the free runs in mapped pages (f_frag)"),
    Metric("waiting", _G, "requests", 0, _COUNT, "all requests waiting in the engine's queue", required=True),
    Metric("waiting_for_memory", _G, "requests", 0, _COUNT, "those that wait because memory is short"),
    Metric("running", _G, "requests", 0, _COUNT, "requests in the running batch", required=True),
    Metric("prefilling", _G, "requests", 0, _COUNT, "those of the running whose prompt is not computed yet"),
    Metric("swapped", _G, "sequences", 0, _COUNT, "sequences whose KV is off the card"),
    Metric("idle_sessions", _G, "sessions", 0, _COUNT, "conversations between turns with KV on the card"),
    Metric("idle_return_s", _G, "s", 0, 1e9, "mean expected time until they come back"),
    Metric("host_used_bytes", _G, "bytes", 0, _PB, "host tier in use by the worker's card"),
    Metric("link_used_bytes_per_s", _G, "bytes/s", 0, _PB, "host link traffic of the card over the last step"),
    Metric("iteration_s", _G, "s", 0, 1e4, "mean time of the last step's engine iterations"),
    Metric("generation", _G, "1", 0, 2**53, "generation of the quota in force", required=True),
    Metric("rho", _G, "1", 0, 16, "overcommit factor in force (effective)", required=True),
    Metric("quota_soft_bytes", _G, "bytes", 0, _PB, "bound of reserved KV in force"),
    Metric("quota_hard_bytes", _G, "bytes", 0, _PB, "bound of physical KV in force"),
    Metric("max_running", _G, "requests", 0, _COUNT, "ceiling of the running cap in force", required=True),
    Metric("running_cap", _G, "requests", 0, _COUNT, "the cap in force below that ceiling"),
    Metric("starting", _G, "1", 0, 1, "1 while the engine starts or restarts"),
    Metric("finished", _N, "requests", 0, _TOTAL, "requests that ended with their last token"),
    Metric("finished_context_tokens", _N, "tokens", 0, _TOTAL, "sum of their context lengths"),
    Metric("finished_context_tokens_sq", _N, "tokens^2", 0, 1e30, "sum of the squares"),
    Metric("rejected", _N, "requests", 0, _TOTAL, "requests that ended without their last token, any reason"),
    Metric("output_tokens", _N, "tokens", 0, _TOTAL, "tokens produced"),
    Metric("prompt_tokens", _N, "tokens", 0, _TOTAL, "prompt tokens computed"),
    Metric("recomputed_tokens", _N, "tokens", 0, _TOTAL, "those computed a second time after preemption"),
    Metric("good_tokens", _N, "tokens", 0, _TOTAL, "output tokens of requests that met their class limits"),
    Metric("judged", _N, "requests", 0, _TOTAL, "requests judged against their class limits"),
    Metric("violations", _N, "requests", 0, _TOTAL, "those of them that broke a limit"),
    Metric("preemptions", _N, "events", 0, _TOTAL, "running requests put back"),
    Metric("oom", _N, "events", 0, _TOTAL, "device out-of-memory crashes"),
    Metric("evicted_bytes", _N, "bytes", 0, _TOTAL, "KV moved from the card to a lower tier"),
    Metric("loaded_bytes", _N, "bytes", 0, _TOTAL, "KV brought back"),
    Metric("compacted_bytes", _N, "bytes", 0, _TOTAL, "KV moved inside the card"),
    *(Metric(f"context_{k:02d}", _G, "sequences", 0, _COUNT,
             f"running and idle sequences of {CONTEXT_EDGES_TOKENS[k]:.0f} tokens or more, below the next edge")
      for k in range(HISTOGRAM_BINS)),
    *(Metric(f"ttft_{k:02d}", _N, "requests", 0, _TOTAL, "first tokens by time over the class limit, bin k")
      for k in range(HISTOGRAM_BINS)),
    *(Metric(f"tpot_{k:02d}", _N, "requests", 0, _TOTAL,
             "finished requests by mean time per output token over the class limit, bin k")
      for k in range(HISTOGRAM_BINS)),
)  # fmt: skip

COLUMN: Final[dict[str, int]] = {metric.name: i for i, metric in enumerate(METRICS)}
"""Column number by metric name."""

COUNTER_COLUMNS: Final[tuple[int, ...]] = tuple(i for i, metric in enumerate(METRICS) if metric.kind is Kind.COUNTER)
CONTEXT_SLICE: Final = slice(COLUMN["context_00"], COLUMN["context_00"] + HISTOGRAM_BINS)
TTFT_SLICE: Final = slice(COLUMN["ttft_00"], COLUMN["ttft_00"] + HISTOGRAM_BINS)
TPOT_SLICE: Final = slice(COLUMN["tpot_00"], COLUMN["tpot_00"] + HISTOGRAM_BINS)
