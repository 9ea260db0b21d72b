"""SGLang's /metrics (``--enable-metrics``) in Tidegate's words.

Looked up: SGLang's documentation page "Production Metrics", its metrics collector as of late 2025
(``num_running_reqs``, ``num_queue_reqs``, ``num_used_tokens``, ``token_usage``, ``max_total_num_tokens``,
``num_retracted_requests_total``), and public readers of later versions for ``kv_used_tokens``, ``kv_evictable_tokens``,
``hicache_host_*``, ``page_size`` and the labels ``tp_rank``, ``priority`` and ``is_streaming``. Not tried: a running
server; its pages in the tests are written after these names.

What to know of these numbers:

- Older versions spell names with ``sglang_``; both are read.
- Every tensor- and pipeline-parallel rank publishes the same pool: the lowest rank speaks for all. Under data
  parallelism each ``dp_rank`` is an engine; what the tokenizer process publishes for all of them together (token
  counters, latencies) then belongs to none and is absent.
- With priority scheduling the sample without a priority is the sum of the others.
- Used tokens are those of running requests; ``kv_evictable_tokens``, where published, is the cached KV beside them,
  which is what Tidegate calls idle. TTFT counts streamed requests: others have no first token of their own.
- ``num_retracted_reqs`` is a gauge of the last retraction, not a count: only ``num_retracted_requests_total`` is read.
- Bytes of a token are not published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from services.telemetry.sources.page import Page, Part, Point, split
from services.telemetry.sources.said import (
    ASSUMED,
    BY_DIFFERENCE,
    UNCOMMANDED,
    Adapter,
    Key,
    Pool,
    Presence,
    Said,
    finite,
    number,
    present,
    provides,
)

PREFIXES: Final = ("sglang:", "sglang_")


def _both(*names: str) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names for prefix in PREFIXES)


RUNNING: Final = _both("num_running_reqs")
WAITING: Final = _both("num_queue_reqs", "queue_req")
CAPACITY: Final = _both("max_total_num_tokens")
USED: Final = _both("kv_used_tokens", "num_used_tokens")
USE: Final = _both("token_usage")
EVICTABLE: Final = _both("kv_evictable_tokens")
PAGE_SIZE: Final = _both("page_size")
INFO: Final = _both("cache_config_info")
HOST_TOTAL: Final = _both("hicache_host_total_tokens")
HOST_USED: Final = _both("hicache_host_used_tokens")
RETRACTED: Final = _both("num_retracted_requests_total")
RETRACTED_INPUT: Final = _both("num_retracted_input_tokens_total")
RETRACTED_OUTPUT: Final = _both("num_retracted_output_tokens_total")
REQUESTS: Final = _both("num_requests_total")
ABORTED: Final = _both("num_aborted_requests_total")
OUTPUT_TOKENS: Final = _both("generation_tokens_total")
PROMPT_TOKENS: Final = _both("prompt_tokens_total")
CACHED_TOKENS: Final = _both("cached_tokens_total")
TTFT: Final = _both("time_to_first_token_seconds")
GAP: Final = _both("inter_token_latency_seconds", "time_per_output_token_seconds")
COMPLETION: Final = _both("e2e_request_latency_seconds")
_RANKS: Final = ("tp_rank", "pp_rank", "moe_ep_rank")

PROVIDES: Final = provides(
    {
        Presence.MEASURED: ("waiting", "running", "output_tokens", "finished"),
        Presence.DERIVED: (
            "kv_bytes", "card_free_bytes", "quota_hard_bytes", "prompt_tokens", "iteration_s", "good_tokens", "judged",
            "violations", "oom", *BY_DIFFERENCE,
        ),
        Presence.SOMETIMES: (
            "rejected", "preemptions", "recomputed_tokens", "kv_idle_bytes", "host_capacity_bytes", "host_used_bytes",
            "weights_bytes",
        ),
        Presence.FACT: (*UNCOMMANDED, "q0_bytes"),
        Presence.ASSUMED: ASSUMED,
    }
)  # fmt: skip


def engines(page: Page) -> Mapping[Key, Part]:
    """By model and data-parallel rank; prefill and decode servers of one model are engines of their own."""
    parts = split(_of_first_ranks(page), PREFIXES, (("model_name", "name"), ("dp_rank",), ("engine_type",)))
    return {
        Key(model, rank if kind in ("", "unified") else f"{kind}{rank}"): part
        for (model, rank, kind), part in parts.items()
    }


def read(page: Page, part: Part) -> Said:
    """One engine's facts."""
    prompts, cached = part.value(PROMPT_TOKENS), part.value(CACHED_TOKENS)
    computed = max(0.0, prompts - cached) if cached == cached else prompts
    requests, aborted = part.value(REQUESTS), part.value(ABORTED)
    streamed = part.histogram(TTFT, is_streaming="true")
    return Said(
        gauges=finite(
            {
                "running": part.value(RUNNING),
                "waiting": part.value(WAITING),
                **UNCOMMANDED,
            }
        ),
        counters=finite(
            {
                "finished": requests - aborted if aborted <= requests else requests,
                "rejected": aborted,
                "output_tokens": part.value(OUTPUT_TOKENS),
                "prompt_tokens": computed,
                "uncached_tokens": computed,
                "preemptions": part.value(RETRACTED),
                "recomputed_tokens": part.value(RETRACTED_INPUT) + part.value(RETRACTED_OUTPUT),
            }
        ),
        histograms=present(
            {
                "ttft": streamed if streamed is not None else part.histogram(TTFT),
                "gap": part.histogram(GAP),
                "completion": part.histogram(COMPLETION),
            }
        ),
        pool=_pool(part),
        marker=page.value(("process_start_time_seconds",)),
    )


def _pool(part: Part) -> Pool:
    capacity = part.value(CAPACITY)
    used, use = part.value(USED), part.value(USE)
    if used != used and use <= 1.0:
        used = use * capacity
    page_size = part.value(PAGE_SIZE)
    told = number(part.label(INFO, "page_size"))
    block = page_size if page_size >= 1.0 else told if told >= 1.0 else 1.0
    return Pool(
        capacity_tokens=capacity if capacity > 0 else math.nan,
        block_tokens=block,
        used_tokens=used,
        idle_tokens=part.value(EVICTABLE),
        host_capacity_tokens=part.value(HOST_TOTAL),
        host_used_tokens=part.value(HOST_USED),
    )


def _of_first_ranks(page: Page) -> Part:
    """Points of the lowest rank of each kind, and those without a priority of their own."""
    lowest: dict[str, str] = {}
    for points in page.points.values():
        for point in points:
            for label in _RANKS:
                rank = point.labels.get(label, "")
                if rank.isdigit() and (label not in lowest or int(rank) < int(lowest[label])):
                    lowest[label] = rank

    def speaks(point: Point) -> bool:
        return not point.labels.get("priority") and all(
            point.labels.get(label, rank) == rank for label, rank in lowest.items()
        )

    return Part({name: [point for point in points if speaks(point)] for name, points in page.points.items()})


_READS: Final = ("process_start_time_seconds", *PREFIXES)
ADAPTER: Final = Adapter("sglang", PREFIXES, _READS, PROVIDES, engines, read)
