"""Run by vLLM's own interpreter: bytes and tables of a worker, on real tensors and vLLM's own block table."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from services.actuator.engines.vllm import shards
from services.actuator.engines.vllm.worker import TidegateWorker

BLOCKS, TOKENS = 32, 16
CONFIG = SimpleNamespace(use_v2_model_runner=False)


def runner_of(*caches: torch.Tensor, groups: int = 1, kernel_tokens: int = TOKENS) -> Any:
    """As much of a model runner as relocation touches; three requests hold blocks."""
    table = MultiGroupBlockTable(
        max_num_reqs=8, max_num_batched_tokens=64, pin_memory=False, device=torch.device("cpu"),
        block_sizes=[TOKENS], max_num_blocks=[64],
    )  # fmt: skip
    held = {"a": [1, 2, 3], "b": [1, 2, 9, 10], "c": [20]}
    for row, blocks in enumerate(held.values()):
        table.add_row((blocks,), row)
    return SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=BLOCKS, kv_cache_groups=[None] * groups),
        cache_config=SimpleNamespace(block_size=TOKENS),
        _kernel_block_sizes=[kernel_tokens],
        kv_caches=list(caches),
        input_batch=SimpleNamespace(num_reqs=3, block_table=table),
        # One more than in the batch: it is cached between steps and resumes where it was.
        requests={
            name: SimpleNamespace(block_ids=(list(blocks),))
            for name, blocks in (held | {"unscheduled": [5, 3]}).items()
        },
    )


def worker_of(*caches: torch.Tensor) -> TidegateWorker:
    worker = TidegateWorker()
    worker.model_runner, worker.vllm_config = runner_of(*caches), CONFIG
    return worker


def filled(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_layer_copies_and_the_sources_keep_their_bytes(dtype: torch.dtype) -> None:
    layers = [filled(BLOCKS, 2, TOKENS, 8, dtype=dtype), filled(2, BLOCKS, TOKENS, 8, dtype=dtype)]
    before = [layer.clone() for layer in layers]
    worker = worker_of(*layers)
    assert worker.tidegate_problem() == ""
    assert worker.tidegate_relocate([(3, 30), (9, 25)]) >= 0
    for source, destination in ((3, 30), (9, 25)):
        assert torch.equal(layers[0][destination], before[0][source])
        assert torch.equal(layers[1][:, destination], before[1][:, source]), "K and V apart: both"
    changed = [number for number in range(BLOCKS) if not torch.equal(layers[0][number], before[0][number])]
    assert changed == [25, 30]


def test_the_runners_tables_follow_in_every_request() -> None:
    worker = worker_of(filled(BLOCKS, 4))
    worker.tidegate_relocate([(1, 31), (3, 30), (9, 25)])
    runner = worker.model_runner
    table = runner.input_batch.block_table[0].block_table.np
    assert table[0, :3].tolist() == [31, 2, 30]
    assert table[1, :4].tolist() == [31, 2, 25, 10]
    assert table[2, :1].tolist() == [20]
    assert {name: state.block_ids[0] for name, state in runner.requests.items()} == {
        "a": [31, 2, 30], "b": [31, 2, 25, 10], "c": [20], "unscheduled": [5, 30],
    }  # fmt: skip


def test_moves_that_failed_elsewhere_are_undone() -> None:
    layer = filled(BLOCKS, 4)
    worker = worker_of(layer)
    plan = [(1, 31), (9, 25)]
    worker.tidegate_relocate(plan)
    worker.tidegate_undo(plan)
    worker.tidegate_undo(plan)  # where nothing is to be undone, nothing changes
    table = worker.model_runner.input_batch.block_table[0].block_table.np
    assert table[1, :4].tolist() == [1, 2, 9, 10]
    assert worker.model_runner.requests["a"].block_ids[0] == [1, 2, 3]
    assert torch.equal(layer[[1, 9]], filled(BLOCKS, 4)[[1, 9]])


def test_an_empty_batch_is_moved_under() -> None:
    worker = worker_of(filled(BLOCKS, 4))
    worker.model_runner.input_batch.num_reqs = 0
    worker.tidegate_relocate([(5, 6)])
    assert worker.model_runner.requests["unscheduled"].block_ids[0] == [6, 3]


def test_a_permuted_view_of_blocks_in_a_row_is_taken_whole() -> None:
    """LBNHC: vLLM shows [blocks, heads, tokens, ...] over memory of [blocks, tokens, heads, ...]."""
    memory = filled(BLOCKS, TOKENS, 2, 8)
    worker = worker_of(memory.permute(0, 2, 1, 3))
    worker.tidegate_relocate([(3, 30)])
    assert torch.equal(memory[30], filled(BLOCKS, TOKENS, 2, 8)[3])


def test_a_tensor_that_two_layers_share_is_one_arena() -> None:
    layer = filled(BLOCKS, 4)
    assert len(shards.open_shards(runner_of(layer, layer), CONFIG).arenas) == 1


@pytest.mark.parametrize(
    ("runner", "says"),
    [
        (runner_of(filled(BLOCKS, 2, 4)[:, 0]), "blocks in a row"),
        (runner_of(filled(2, BLOCKS * 2, 4)[:, ::2]), "blocks in a row"),
        (runner_of(filled(BLOCKS + 1, 4)), "expected 32 blocks"),
        (runner_of(), "no KV tensors"),
        (runner_of(filled(BLOCKS, 4), groups=2), "2 KV cache groups"),
        (runner_of(filled(BLOCKS, 4), kernel_tokens=8), "whole KV blocks"),
        (runner_of(filled(BLOCKS, 4).to("meta")), "expected cpu or cuda"),
    ],
)
def test_what_is_not_known_is_refused_with_what_was_found(runner: Any, says: str) -> None:
    worker = TidegateWorker()
    worker.model_runner, worker.vllm_config = runner, CONFIG
    assert says in worker.tidegate_problem()


def test_model_runner_v2_is_refused() -> None:
    worker = worker_of(filled(BLOCKS, 4))
    worker.vllm_config = SimpleNamespace(use_v2_model_runner=True)
    assert "V2" in worker.tidegate_problem()
