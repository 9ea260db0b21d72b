"""Run by vLLM's own interpreter: blocks to host memory and back, byte by byte."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from services.actuator.engines.vllm.offload import CpuWorker, Offloaded

BLOCKS, SLOTS = 16, 6


def spec(*blocks: int) -> Any:
    return SimpleNamespace(block_ids=np.array(blocks, np.int64))


@pytest.fixture
def layers() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(-128, 127, (BLOCKS, 96), generator=generator, dtype=torch.int8) for _ in range(3)]


@pytest.fixture
def worker(layers: list[torch.Tensor]) -> CpuWorker:
    return CpuWorker(SimpleNamespace(tensors=[SimpleNamespace(tensor=one) for one in layers]), SLOTS)


def test_what_is_stored_comes_back_byte_by_byte_wherever_it_goes(worker: CpuWorker, layers: list[torch.Tensor]) -> None:
    before = [layer.clone() for layer in layers]
    assert worker.submit_store(1, spec(3, 4, 9), spec(5, 0, 2))
    for layer in layers:
        layer.fill_(0)
    assert worker.submit_load(2, spec(0, 5), spec(11, 12))
    for layer, was in zip(layers, before, strict=True):
        assert torch.equal(layer[11], was[4])
        assert torch.equal(layer[12], was[3])
        assert not layer[[number for number in range(BLOCKS) if number not in (11, 12)]].any()


def test_each_job_is_told_finished_once_with_its_bytes(worker: CpuWorker) -> None:
    worker.submit_store(1, spec(3, 4), spec(0, 1))
    worker.submit_load(2, spec(1), spec(7))
    assert [(one.job_id, one.success, one.transfer_size) for one in worker.get_finished()] == [
        (1, True, 2 * 3 * 96),
        (2, True, 3 * 96),
    ]
    assert worker.get_finished() == []


def test_blocks_that_are_not_in_a_row_are_refused(layers: list[torch.Tensor]) -> None:
    apart = torch.zeros(BLOCKS, 2, 96, dtype=torch.int8)[:, 0]
    with pytest.raises(ValueError, match="blocks in a row"):
        CpuWorker(SimpleNamespace(tensors=[SimpleNamespace(tensor=apart)]), SLOTS)


def test_a_copy_counts_when_it_is_complete() -> None:
    manager = CPUOffloadingManager(SLOTS)
    host = Offloaded(manager, chunk_bytes=100)
    asks, keys = ReqContext(req_id="r"), [make_offload_key(bytes([number] * 32), 0) for number in (1, 2)]
    manager.on_new_request(asks)
    manager.prepare_store(keys, asks)
    assert not host.has(bytes([1] * 32)), "it is being written"
    assert (host.used_bytes, host.free_bytes, host.capacity_bytes) == (200, 400, 600)
    manager.complete_store(keys, asks)
    assert host.has(bytes([1] * 32))
    assert not host.has(bytes([3] * 32))
    assert host.free_bytes == 600, "copies that nobody reads give way"


def test_no_connector_is_no_host_tier() -> None:
    assert Offloaded.of(SimpleNamespace(connector=None)) is None
