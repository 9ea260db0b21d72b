"""The KV tensors of one vLLM worker as arenas that movers know: NumPy over the CPU's memory, CuPy over the GPU's."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from services.actuator.memory.arrays import Arena, NumpyArena
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import BATCH, Mover, NumpyMover
from services.actuator.memory.paths import fixed

THREAD_BLOCKS = 32
"""Of a kernel launch on a GPU: few SMs, since the next step waits for them."""


@dataclasses.dataclass(frozen=True, eq=False)
class Shards:
    """One arena a layer, or two where K and V lie apart; block n of each belongs together."""

    arenas: list[Arena]
    mover: Mover
    settle: Callable[[], None] = lambda: None
    """Wait for what the engine has launched: the mover's stream is not ordered with the engine's."""


def open_shards(runner: Any, config: Any) -> Shards:
    """Of vLLM's first model runner (``GPUModelRunner`` and ``CPUModelRunner``). TypeError, saying what was found,
    for another runner, several KV cache groups, or tensors that are not blocks in a row."""
    if getattr(config, "use_v2_model_runner", False):
        raise TypeError("model runner V2: its block tables are not known (VLLM_USE_V2_MODEL_RUNNER=0 selects V1)")
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise TypeError(f"{len(groups)} KV cache groups: expected one")
    tables = runner.input_batch.block_table.block_tables
    if len(tables) != 1:
        raise TypeError(f"{len(tables)} block tables: expected one")
    if runner._kernel_block_sizes != [runner.cache_config.block_size]:
        raise TypeError(f"kernel blocks of {runner._kernel_block_sizes} tokens: expected whole KV blocks")
    count = runner.kv_cache_config.num_blocks
    # By address: layers that share their KV name one tensor several times.
    parts = list({part.data_ptr(): part for tensor in runner.kv_caches for part in _parts(tensor, count)}.values())
    if not parts:
        raise TypeError("no KV tensors")
    if parts[0].device.type == "cpu":
        mover = NumpyMover(fixed(BATCH))
        return Shards([NumpyArena(_geometry(part, count), bytes_of(part, count)) for part in parts], mover)
    if parts[0].device.type == "cuda":
        return _on_gpu(parts, count)
    raise TypeError(f"KV on a {parts[0].device.type}: expected cpu or cuda")


def _parts(tensor: Any, blocks: int) -> list[Any]:
    """The tensor cut so that the first axis counts blocks: [blocks, ...] as it is, [2, blocks, ...] in K and V."""
    if tensor.shape[0] == blocks:
        parts = [tensor]
    elif tensor.dim() > 1 and tensor.shape[0] == 2 and tensor.shape[1] == blocks:
        parts = [tensor[0], tensor[1]]
    else:
        raise TypeError(
            f"KV tensor of shape {list(tensor.shape)}: expected {blocks} blocks on the first or second axis"
        )
    for part in parts:
        if part.stride(0) * part.element_size() * blocks != part.numel() * part.element_size():
            raise TypeError(f"KV tensor of strides {list(part.stride())}: expected blocks in a row")
    return parts


def _geometry(part: Any, blocks: int) -> Geometry:
    return Geometry(part.numel() * part.element_size() // blocks, 1, blocks)


def bytes_of(part: Any, blocks: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [blocks, bytes] over the tensor's own memory; NumPy lacks bfloat16, so not by way of its array."""
    size = part.numel() * part.element_size()
    flat = np.frombuffer((ctypes.c_uint8 * size).from_address(part.data_ptr()), np.uint8)
    return flat.reshape(blocks, size // blocks)


def _on_gpu(parts: list[Any], blocks: int) -> Shards:
    import torch

    from services.actuator.memory.cupy_arrays import CupyArena, CupyDevice
    from services.actuator.memory.device_mover import COPIES, SM, DeviceMover, Tables

    device = CupyDevice(parts[0].device.index or 0)
    device.load()
    arenas: list[Arena] = [CupyArena.over(device, _geometry(part, blocks), part.view(torch.uint8)) for part in parts]
    # Not measured: vLLM leaves no device memory for a measurement's scratch arenas.
    tables = Tables(fixed(SM), fixed(COPIES), fixed(COPIES), THREAD_BLOCKS)
    return Shards(arenas, DeviceMover(device, tables, pinned=False), torch.cuda.synchronize)
