"""What the tests in vLLM's interpreter run on, without an engine: a bare pool, and vLLM's own scheduler without one."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from services.actuator.engines.vllm.pool import BoundedPool

BLOCK_TOKENS = 16
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
BLOCK_BYTES = SPEC.page_size_bytes
CONTEXT_TOKENS = 512
_NUMBER = itertools.count(1)
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 512,
    "max_position_embeddings": 2048, "torch_dtype": "float32",
}  # fmt: skip


def key(number: int) -> bytes:
    """A cache key of group 0 for content that a number stands for."""
    return number.to_bytes(8, "big") + (0).to_bytes(4, "big")


def scheduler_of(blocks: int, table: dict[str, list[Any]], connector: Any = None, groups: int = 1) -> SimpleNamespace:
    """Something with a scheduler's tables around a real pool; ``table``: blocks of each request."""
    managers = [SimpleNamespace(req_to_blocks=table, kv_cache_spec=SPEC) for _ in range(groups)]
    return SimpleNamespace(
        connector=connector,
        deferred_frees=[],
        kv_holding_waiting=[],
        kv_cache_manager=SimpleNamespace(
            block_pool=BoundedPool.adopt(BlockPool(blocks, True, BLOCK_TOKENS)),
            coordinator=SimpleNamespace(single_type_managers=managers),
        ),
    )


def real_scheduler(kind: type, folder: Path, *, blocks: int = 65, policy: str = "priority", most: int = 16) -> Any:
    """vLLM's scheduler of class ``kind`` for a model of one layer; ``blocks``: of its pool, the null block too."""
    (folder / "config.json").write_text(json.dumps(_MODEL))
    cache = CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=True)
    config = VllmConfig(
        model_config=ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True),
        scheduler_config=SchedulerConfig(
            max_num_seqs=most, max_num_batched_tokens=2048, max_model_len=CONTEXT_TOKENS, is_encoder_decoder=False,
            enable_chunked_prefill=True, policy=policy, async_scheduling=False,
        ),
        cache_config=cache,
    )  # fmt: skip
    config.model_config.max_model_len = CONTEXT_TOKENS
    cache.num_gpu_blocks = blocks
    tensor = KVCacheTensor(size=blocks * BLOCK_BYTES, layers=["0"], layer_stride=0, block_stride=BLOCK_BYTES)
    return kind(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(["0"], SPEC)]),
        block_size=BLOCK_TOKENS,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


def hasher() -> Any:
    """What an EngineCore gives its requests to hash their blocks with."""
    init_none_hash(sha256)
    return get_request_block_hasher(BLOCK_TOKENS, sha256)


def request(tokens: int, most: int = 32, *, first: int | None = None, **given: Any) -> Request:
    """A request of so many prompt tokens; prompts with another ``first`` token share nothing."""
    number = next(_NUMBER)
    prompt = [(number if first is None else first) % 512, *[7] * (tokens - 1)]
    params = given.pop("params", None) or SamplingParams(max_tokens=most, ignore_eos=True)
    return Request(f"r{number}", prompt, params, None, block_hasher=hasher(), **given)


def step(scheduler: Any) -> Any:
    """Schedule, and answer with one token for everybody whose prompt is through; vLLM's SchedulerOutput."""
    output = scheduler.schedule()
    names = list(output.num_scheduled_tokens)
    said = [[5] if not scheduler.requests[one].is_prefill_chunk else [] for one in names]
    scheduler.update_from_output(
        output,
        ModelRunnerOutput(
            req_ids=names, req_id_to_index={one: row for row, one in enumerate(names)}, sampled_token_ids=said,
            logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
        ),
    )  # fmt: skip
    return output


def until(scheduler: Any, what: Any, most: int = 300) -> None:
    """Step until ``what()``; AssertionError after ``most`` steps."""
    for _ in range(most):
        if what():
            return
        step(scheduler)
    raise AssertionError(f"not reached within {most} steps")
