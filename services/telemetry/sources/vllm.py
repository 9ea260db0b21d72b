"""vLLM's /metrics (0.32; names of 0.6 to 0.11 as aliases) in Tidegate's words.

Looked up: names, labels and meanings in vLLM 0.32's ``v1/metrics/loggers.py``, ``v1/core/block_pool.py`` and the
offloading connector's metrics, and pages of a real 0.32 server with and without the connector; older names in public
dashboards of their time (``gpu_cache_usage_perc``, a share in spite of its name; ``time_per_output_token_seconds``, a
histogram of gaps, since split into ``inter_token_latency_seconds`` and ``request_time_per_output_token_seconds``).
``num_requests_swapped`` was always 0 on V1 before it went: it is not read. Not tried: versions before 0.32 themselves.

What to know of these numbers:

- KV use counts blocks of running requests only, against all blocks but the null one: cached prefixes do not show, so
  idle KV is absent, not zero.
- ``num_gpu_blocks x block_size`` is the pool; ``kv_cache_size_tokens`` says it for hybrid models too and wins.
  ``kv_cache_memory_bytes`` gives the bytes of a block, except under ``num_gpu_blocks_override``, where it is what the
  pool would have had.
- "Waiting for capacity" includes waiting for a free slot of the batch; ``contradictions`` drops it where KV is plenty.
- Prompt tokens computed: those that no cache supplied. Of the computed ones vLLM does not say which came again after a
  preemption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from services.telemetry.sources.page import Page, Part, split
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

PREFIXES: Final = ("vllm:", "vllm_")
_INFO: Final = ("vllm:cache_config_info",)
KV_USE: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
RUNNING: Final = ("vllm:num_requests_running",)
WAITING: Final = ("vllm:num_requests_waiting",)
WAITING_BY_REASON: Final = ("vllm:num_requests_waiting_by_reason",)
FINISHED: Final = ("vllm:request_success_total",)
PREEMPTIONS: Final = ("vllm:num_preemptions_total",)
OUTPUT_TOKENS: Final = ("vllm:generation_tokens_total",)
PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total",)
PROMPT_BY_SOURCE: Final = ("vllm:prompt_tokens_by_source_total",)
PROMPT_CACHED: Final = (
    "vllm:prompt_tokens_cached_total",
    "vllm:prefix_cache_hits_total",
    "vllm:gpu_prefix_cache_hits_total",
)
REJECTED: Final = ("vllm:admission_rejections_total",)
TTFT: Final = ("vllm:time_to_first_token_seconds",)
GAP: Final = ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
TPOT: Final = ("vllm:request_time_per_output_token_seconds",)
COMPLETION: Final = ("vllm:e2e_request_latency_seconds",)
PROMPT_LENGTH: Final = ("vllm:request_prompt_tokens",)
OUTPUT_LENGTH: Final = ("vllm:request_generation_tokens",)
STORED: Final = ("vllm:kv_offload_store_bytes_total", "vllm:kv_offload_total_bytes_total")
LOADED: Final = ("vllm:kv_offload_load_bytes_total", "vllm:kv_offload_total_bytes_total")
STORE_TIME: Final = ("vllm:kv_offload_store_time_total", "vllm:kv_offload_total_time_total")
LOAD_TIME: Final = ("vllm:kv_offload_load_time_total", "vllm:kv_offload_total_time_total")
_ENDED_WELL: Final = ("stop", "length", "repetition")
_ENDED_BADLY: Final = ("abort", "error")
_TO_HOST: Final = ("GPU_to_CPU", "")
_TO_CARD: Final = ("CPU_to_GPU", "")
"""``transfer_type`` of the older names; the newer ones have no such label."""

PROVIDES: Final = provides(
    {
        Presence.MEASURED: ("waiting", "running", "output_tokens", "preemptions", "finished", "rejected"),
        Presence.DERIVED: (
            "kv_bytes", "card_free_bytes", "quota_hard_bytes", "prompt_tokens", "finished_context_tokens",
            "finished_context_tokens_sq", "iteration_s", "good_tokens", "judged", "violations", "recomputed_tokens",
            "oom", *BY_DIFFERENCE,
        ),
        Presence.SOMETIMES: (
            "waiting_for_memory", "weights_bytes", "link_bytes_per_s", "link_used_bytes_per_s", "evicted_bytes",
            "loaded_bytes",
        ),
        Presence.FACT: (*UNCOMMANDED, "q0_bytes"),
        Presence.ASSUMED: ASSUMED,
    }
)  # fmt: skip


def engines(page: Page) -> Mapping[Key, Part]:
    """By model and engine number."""
    parts = split(page, PREFIXES, (("model_name",), ("engine",)))
    return {Key(model, rank): part for (model, rank), part in parts.items()}


def read(page: Page, part: Part) -> Said:
    """One engine's facts."""
    cached = part.value(PROMPT_CACHED)
    prompts = part.value(PROMPT_TOKENS)
    computed = part.value(PROMPT_BY_SOURCE, source="local_compute")
    if computed != computed:
        computed = max(0.0, prompts - cached) if cached == cached else prompts
    rejected = part.value(FINISHED, finished_reason=_ENDED_BADLY)
    refused = part.value(REJECTED)
    return Said(
        gauges=finite(
            {
                "running": part.value(RUNNING),
                "waiting": part.value(WAITING),
                "waiting_for_memory": part.value(WAITING_BY_REASON, reason="capacity"),
                **UNCOMMANDED,
            }
        ),
        counters=finite(
            {
                "finished": part.value(FINISHED, finished_reason=_ENDED_WELL),
                "rejected": rejected + refused if refused == refused else rejected,
                "output_tokens": part.value(OUTPUT_TOKENS),
                "prompt_tokens": computed,
                "uncached_tokens": computed,
                "preemptions": part.value(PREEMPTIONS),
                "evicted_bytes": part.value(STORED, transfer_type=_TO_HOST),
                "loaded_bytes": part.value(LOADED, transfer_type=_TO_CARD),
                "transfer_s": part.value(STORE_TIME, transfer_type=_TO_HOST)
                + part.value(LOAD_TIME, transfer_type=_TO_CARD),
            }
        ),
        histograms=present(
            {
                "ttft": part.histogram(TTFT),
                "gap": part.histogram(GAP),
                "tpot": part.histogram(TPOT),
                "completion": part.histogram(COMPLETION),
                "prompt": part.histogram(PROMPT_LENGTH),
                "output": part.histogram(OUTPUT_LENGTH),
            }
        ),
        pool=_pool(part),
        marker=page.value(("process_start_time_seconds",)),
    )


def _pool(part: Part) -> Pool:
    blocks = number(part.label(_INFO, "num_gpu_blocks"))
    block_tokens = number(part.label(_INFO, "block_size"))
    told = number(part.label(_INFO, "kv_cache_size_tokens"))
    # Block 0 is the null block: nobody's, and left out of the share that is in use.
    usable = (blocks - 1.0) / blocks if blocks > 1.0 else math.nan
    capacity = (told if told > 0.0 else blocks * block_tokens) * usable
    use = part.value(KV_USE)
    memory_bytes = number(part.label(_INFO, "kv_cache_memory_bytes"))
    overridden = part.label(_INFO, "num_gpu_blocks_override") != ""
    return Pool(
        capacity_tokens=capacity,
        block_tokens=block_tokens,
        used_tokens=use * capacity if use <= 1.0 else math.nan,
        pool_bytes=math.nan if overridden else memory_bytes * usable,
        cache_dtype=part.label(_INFO, "cache_dtype") or "auto",
        claimed_share=math.nan if memory_bytes > 0 else number(part.label(_INFO, "gpu_memory_utilization")),
    )


_READS: Final = (
    "process_start_time_seconds",
    *(name.removesuffix("_total")
      for names in (_INFO, KV_USE, RUNNING, WAITING, FINISHED, PREEMPTIONS, OUTPUT_TOKENS, PROMPT_TOKENS, PROMPT_CACHED,
                    REJECTED, TTFT, GAP, TPOT, COMPLETION, PROMPT_LENGTH, OUTPUT_LENGTH, STORED, LOADED, STORE_TIME,
                    LOAD_TIME)
      for name in names),
)  # fmt: skip
ADAPTER: Final = Adapter("vllm", PREFIXES, _READS, PROVIDES, engines, read)
