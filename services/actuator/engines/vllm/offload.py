"""Idle KV in host memory, through vLLM's stock OffloadingConnector with a spec of ours.

vLLM's connector copies each block to host memory when it is full (write-through) and loads what a request's prefix is
missing. The spec adds two things: it can be asked which blocks host memory has, so that only those leave the card; and
it runs where vLLM's own refuses, on a CPU, with the memory library's mover. On a GPU vLLM's own worker does the copies.
Start with ``--kv-transfer-config`` as docs/vllm.md says, ``offload_prompt_only`` false so that answers are kept too.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    OffloadingWorker,
    TransferResult,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from services.actuator.engines.vllm import shards
from services.actuator.engines.vllm.pool import block_bytes_of
from services.actuator.memory.arrays import NumpyArena, PrivateArena, host_geometry
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import BATCH, NumpyMover
from services.actuator.memory.paths import fixed

I8 = NDArray[np.int64]


class TidegateOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]  # vLLM is not there when types are checked
    """``spec_name`` in vLLM's ``kv_connector_extra_config``, with this module as ``spec_module_path``."""

    _worker: OffloadingWorker | None

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if current_platform.is_cuda_alike() or current_platform.is_xpu():
            return super().get_worker(kv_caches)
        if self._worker is None:
            if self.blocks_per_chunk != 1:
                raise ValueError(f"{self.blocks_per_chunk} blocks a chunk: expected 1 on a CPU")
            self._worker = CpuWorker(kv_caches, self.num_chunks)
        return self._worker


class CpuWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the step that submits them: on a CPU nothing would run beside it."""

    def __init__(self, kv_caches: Any, slots: int) -> None:
        self._mover = NumpyMover(fixed(BATCH))
        self._cards: list[NumpyArena] = []
        self._hosts: list[PrivateArena] = []
        self._finished: list[Any] = []
        for one in kv_caches.tensors:
            tensor = one.tensor
            count = int(tensor.shape[0])
            if tensor.stride(0) * tensor.element_size() * count != tensor.numel() * tensor.element_size():
                raise ValueError(f"KV tensor of strides {list(tensor.stride())}: expected blocks in a row")
            view = shards.bytes_of(tensor, count)
            self._cards.append(NumpyArena(Geometry(view.shape[1], 1, count), view))
            self._hosts.append(PrivateArena(host_geometry(view.shape[1], slots)))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._run(job_id, src_spec.block_ids, dst_spec.block_ids, self._mover.out)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._run(job_id, dst_spec.block_ids, src_spec.block_ids, self._mover.back)

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted job is done."""

    def _run(self, job_id: int, blocks: Any, slots: Any, copy: Any) -> bool:
        started = time.perf_counter()
        card, host = np.asarray(blocks, np.int64), np.asarray(slots, np.int64)
        size = 0
        for near, far in zip(self._cards, self._hosts, strict=True):
            size += copy(near, card, far, host).bytes
        self._finished.append(TransferResult(job_id, True, size, time.perf_counter() - started))
        return True


class Offloaded:
    """What the scheduler's side of the connector knows of host memory."""

    def __init__(self, manager: CPUOffloadingManager, chunk_bytes: int) -> None:
        self._manager = manager
        self._chunk_bytes = chunk_bytes

    @classmethod
    def of(cls, scheduler: Any) -> Offloaded | None:
        """None where the server was started without a connector of this kind."""
        inner: Any = getattr(scheduler.connector, "connector_scheduler", None)
        manager = getattr(inner, "manager", None)
        if not isinstance(manager, CPUOffloadingManager) or inner.config.blocks_per_chunk != 1:
            return None
        return cls(manager, block_bytes_of(scheduler.kv_cache_config))

    def has(self, block_hash: bytes) -> bool:
        """Whether a whole copy is there, ready to be loaded."""
        chunk = self._manager._policy.get(make_offload_key(block_hash, 0))
        return chunk is not None and chunk.is_ready

    @property
    def capacity_bytes(self) -> int:
        return int(self._manager._num_chunks) * self._chunk_bytes

    @property
    def free_bytes(self) -> int:
        """What can be stored without dropping another copy, and copies that nobody uses: those give way."""
        manager = self._manager
        return int(manager._get_num_free_chunks() + manager._num_evictable_cache_chunks) * self._chunk_bytes

    @property
    def used_bytes(self) -> int:
        manager = self._manager
        return int(manager._num_allocated_chunks - len(manager._free_list)) * self._chunk_bytes
