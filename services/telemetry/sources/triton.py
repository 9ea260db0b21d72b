"""Triton with the TensorRT-LLM backend (port 8002) in Tidegate's words.

Looked up: the backend's own documentation of its statistics (``nv_trt_llm_request_metrics``,
``nv_trt_llm_kv_cache_block_metrics``, ``nv_trt_llm_inflight_batcher_metrics``, ``nv_trt_llm_runtime_memory_metrics``,
with an example page), Triton's "Metrics" page (``nv_inference_request_success``, ``..._failure``,
``nv_inference_first_response_histogram_ms`` with ``--metrics-config histogram_latencies=true``, ``nv_gpu_memory_*``),
and public lists for ``request_type="waiting"`` and ``nv_llm_{input,output}_token_len``. Not tried: a running server;
its pages in the tests are written after that example.

What to know of these numbers:

- Where ``waiting`` is not published, it is ``active`` less ``scheduled`` (which older versions also call requests of
  this iteration); ``max`` is the server's own limit of requests and read as the running cap in force.
- Requests in ``context`` are those whose prompt is being computed.
- First response is first token only for streamed (decoupled) models; there is no histogram of token gaps, so limits
  on them cannot be judged: good tokens and violations are absent for classes that have one.
- Bytes of a block are not published: ``tokens_per`` times the model's or an assumed size of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from services.telemetry.sources.card import CardMemory
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
    present,
    provides,
)

PREFIXES: Final = ("nv_trt_llm_",)
_MODEL: Final = ("nv_trt_llm_", "nv_llm_", "nv_inference_")
_REQUESTS: Final = ("nv_trt_llm_request_metrics",)
_BLOCKS: Final = ("nv_trt_llm_kv_cache_block_metrics",)
_SUCCEEDED: Final = ("nv_inference_request_success_total",)
_FAILED: Final = ("nv_inference_request_failure_total",)
_FIRST: Final = ("nv_inference_first_response_histogram_ms",)
_OUTPUT: Final = "nv_llm_output_token_len"
_INPUT: Final = "nv_llm_input_token_len"
GPU_TOTAL: Final = "nv_gpu_memory_total_bytes"
GPU_USED: Final = "nv_gpu_memory_used_bytes"
_TTFT: Final = tuple(name for name in BY_DIFFERENCE if name.startswith("ttft"))

PROVIDES: Final = provides(
    {
        Presence.MEASURED: ("running", "prefilling", "running_cap"),
        Presence.DERIVED: ("waiting", "kv_bytes", "card_free_bytes", "quota_hard_bytes", "oom"),
        Presence.SOMETIMES: (
            "output_tokens", "prompt_tokens", "finished", "rejected", "finished_context_tokens",
            "finished_context_tokens_sq", "weights_bytes", "judged", "good_tokens", "violations", *_TTFT,
        ),
        Presence.FACT: (*UNCOMMANDED, "q0_bytes"),
        Presence.ASSUMED: ASSUMED,
    }
)  # fmt: skip


def engines(page: Page) -> Mapping[Key, Part]:
    """By model and version; models of the server that are no TensorRT-LLM engine (pre- and postprocessing) are none."""
    parts = split(page, _MODEL, (("model",), ("version",)))
    return {
        Key(model, "" if version in ("", "1") else version): part
        for (model, version), part in parts.items()
        if part.has(_REQUESTS[0]) or part.has(_BLOCKS[0])
    }


def read(page: Page, part: Part) -> Said:
    """One engine's facts."""
    active = part.value(_REQUESTS, request_type="active")
    scheduled = part.value(_REQUESTS, request_type="scheduled")
    waiting = part.value(_REQUESTS, request_type="waiting")
    running = scheduled if scheduled == scheduled else active
    if waiting != waiting and active == active and scheduled == scheduled:
        waiting = max(0.0, active - scheduled)
    return Said(
        gauges=finite(
            {
                "running": running,
                "waiting": waiting,
                "prefilling": part.value(_REQUESTS, request_type="context"),
                "running_cap": part.value(_REQUESTS, request_type="max"),
                **UNCOMMANDED,
            }
        ),
        counters=finite(
            {
                "finished": part.value(_SUCCEEDED),
                "rejected": part.value(_FAILED),
                "output_tokens": part.value((f"{_OUTPUT}_sum",)),
                "prompt_tokens": part.value((f"{_INPUT}_sum",)),
                "uncached_tokens": part.value((f"{_INPUT}_sum",)),
            }
        ),
        histograms=present(
            {
                "ttft": part.histogram(_FIRST),
                "prompt": part.histogram((_INPUT,)),
                "output": part.histogram((_OUTPUT,)),
            }
        ),
        pool=_pool(part),
    )


def device(page: Page) -> CardMemory:
    """The card's memory, where Triton tells it and sees one card: several are named by uuid, which no setting holds."""
    totals, used = page.points.get(GPU_TOTAL, ()), page.points.get(GPU_USED, ())
    if len(totals) != 1 or not totals[0].value > 0:
        return CardMemory()
    return CardMemory(totals[0].value, used[0].value if len(used) == 1 else math.nan)


def _pool(part: Part) -> Pool:
    blocks = part.value(_BLOCKS, kv_cache_block_type="max")
    tokens_per = part.value(_BLOCKS, kv_cache_block_type="tokens_per")
    used = part.value(_BLOCKS, kv_cache_block_type="used")
    return Pool(
        capacity_tokens=blocks * tokens_per if blocks > 0 and tokens_per > 0 else math.nan,
        block_tokens=tokens_per if tokens_per > 0 else math.nan,
        used_tokens=used * tokens_per,
    )


_READS: Final = (*_MODEL, "nv_gpu_memory_")
ADAPTER: Final = Adapter("triton", PREFIXES, _READS, PROVIDES, engines, read)
