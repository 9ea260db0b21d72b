"""Pages of engines for tests. vLLM's follow the real ones in shared/samples; SGLang's and Triton's are written after
their documentation, since no such server runs here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def sample(name: str, value: float, **labels: str) -> str:
    inner = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {value}\n" if inner else f"{name} {value}\n"


def histogram(name: str, edges: Sequence[float], counts: Sequence[float], total: float, **labels: str) -> str:
    """``counts``: cumulative, one more than ``edges`` for the open bucket."""
    text = f"# TYPE {name} histogram\n"
    for edge, count in zip((*map(str, edges), "+Inf"), counts, strict=True):
        text += sample(f"{name}_bucket", count, le=edge, **labels)
    return text + sample(f"{name}_count", counts[-1], **labels) + sample(f"{name}_sum", total, **labels)


def vllm_page(
    running: float = 2,
    waiting: float = 0,
    kv_use: float = 0.25,
    output_tokens: float = 1000,
    prompt_tokens: float = 500,
    finished: float = 10,
    ttft: Sequence[float] = (0, 0, 0),
    gap: Sequence[float] = (0, 0, 0),
    started: float = 1000.0,
    capacity: float = 0,
    preemptions: float = 0,
    info: Mapping[str, str] | None = None,
    engine: str = "0",
    model: str = "tiny",
) -> str:
    """A page of one engine: 101 blocks of 16 tokens in 1 MB x 101; TTFT edges 1 and 4 s, gap edges 0.04 and 0.1 s."""
    of = {"engine": engine, "model_name": model}
    told = {
        "block_size": "16",
        "cache_dtype": "auto",
        "gpu_memory_utilization": "0.9",
        "kv_cache_memory_bytes": "101000000",
        "num_gpu_blocks": "101",
        "num_gpu_blocks_override": "None",
        **(info or {}),
    }
    return (
        sample("process_start_time_seconds", started)
        + "# TYPE vllm:num_requests_running gauge\n"
        + sample("vllm:num_requests_running", running, **of)
        + sample("vllm:num_requests_waiting", waiting, **of)
        + sample("vllm:num_requests_waiting_by_reason", capacity, reason="capacity", **of)
        + sample("vllm:kv_cache_usage_perc", kv_use, **of)
        + "# TYPE vllm:generation_tokens_total counter\n"
        + sample("vllm:generation_tokens_total", output_tokens, **of)
        + sample("vllm:generation_tokens_created", 1.79e9, **of)
        + sample("vllm:prompt_tokens_total", prompt_tokens, **of)
        + sample("vllm:num_preemptions_total", preemptions, **of)
        + sample("vllm:request_success_total", finished, finished_reason="stop", **of)
        + sample("vllm:request_success_total", 0, finished_reason="abort", **of)
        + histogram("vllm:time_to_first_token_seconds", (1.0, 4.0), ttft, 2.5 * ttft[-1], **of)
        + histogram("vllm:inter_token_latency_seconds", (0.04, 0.1), gap, 0.02 * gap[-1], **of)
        + sample("vllm:cache_config_info", 1, **of, **told)
    )


def sglang_page(prefix: str = "sglang:", rank: str = "0", dp: str = "", **values: float) -> str:
    """After the documented names; ``values`` overrides them by name without prefix."""
    of = {"model_name": "m", "engine_type": "unified", "tp_rank": rank, "pp_rank": "0"}
    of |= {"dp_rank": dp} if dp else {}
    told = {
        "num_running_reqs": 3, "num_queue_reqs": 2, "num_used_tokens": 400, "token_usage": 0.4,
        "max_total_num_tokens": 1000, "num_retracted_reqs": 7,
    } | values  # fmt: skip
    return "".join(sample(f"{prefix}{name}", value, **of) for name, value in told.items())


def sglang_totals(prefix: str = "sglang:") -> str:
    """What the tokenizer process publishes: counters and latencies, without ranks."""
    of = {"model_name": "m"}
    return (
        f"# TYPE {prefix}prompt_tokens_total counter\n"
        + sample(f"{prefix}prompt_tokens_total", 900, **of)
        + sample(f"{prefix}generation_tokens_total", 300, **of)
        + sample(f"{prefix}cached_tokens_total", 100, cache_source="device", **of)
        + sample(f"{prefix}cached_tokens_total", 50, cache_source="host", **of)
        + sample(f"{prefix}num_requests_total", 12, **of)
        + sample(f"{prefix}num_aborted_requests_total", 2, **of)
        + histogram(f"{prefix}time_to_first_token_seconds", (1.0,), (4, 5), 3.0, is_streaming="true", **of)
        + histogram(f"{prefix}time_to_first_token_seconds", (1.0,), (0, 9), 90.0, is_streaming="false", **of)
        + histogram(f"{prefix}inter_token_latency_seconds", (0.04,), (80, 100), 3.0, **of)
    )


def triton_page(waiting: float | None = None, gpus: int = 1) -> str:
    """After the example in the TensorRT-LLM backend's documentation."""
    of = {"model": "tensorrt_llm", "version": "1"}
    requests = {"context": 1.0, "scheduled": 4.0, "max": 512.0, "active": 6.0}
    requests |= {"waiting": waiting} if waiting is not None else {}
    blocks = {"tokens_per": 64.0, "used": 10.0, "free": 90.0, "max": 100.0, "fraction": 0.1}
    return (
        "# TYPE nv_trt_llm_request_metrics gauge\n"
        + "".join(sample("nv_trt_llm_request_metrics", v, request_type=k, **of) for k, v in requests.items())
        + "# TYPE nv_trt_llm_kv_cache_block_metrics gauge\n"
        + "".join(
            sample("nv_trt_llm_kv_cache_block_metrics", v, kv_cache_block_type=k, **of) for k, v in blocks.items()
        )
        + "# TYPE nv_inference_request_success counter\n"
        + sample("nv_inference_request_success", 20, **of)
        + sample("nv_inference_request_success", 20, model="preprocessing", version="1")
        + "# TYPE nv_inference_request_failure counter\n"
        + sample("nv_inference_request_failure", 1, reason="OTHER", **of)
        + histogram("nv_inference_first_response_histogram_ms", (100, 500), (3, 8, 10), 4000, **of)
        + "# TYPE nv_gpu_memory_total_bytes gauge\n"
        + "".join(sample("nv_gpu_memory_total_bytes", 80e9, gpu_uuid=f"GPU-{k}") for k in range(gpus))
        + "".join(sample("nv_gpu_memory_used_bytes", 60e9, gpu_uuid=f"GPU-{k}") for k in range(gpus))
    )
