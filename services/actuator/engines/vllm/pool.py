"""vLLM's block pool with a bound below its size, and an account of what idles in it.

A stock vLLM commits its pool when it starts; the hard quota then bounds how many of its blocks may hold anything:
those of requests and those that idle as cached prefixes. Idle ones go first, least recently used first, as in vLLM
itself, which drops them when a block is needed; only requests beyond the bound have to be preempted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.block_pool import BlockPool

Bool = NDArray[np.bool_]
log = logging.getLogger("vllm.tidegate")

KEY_TAIL_BYTES: Final = 4
"""The group's number at the end of a cache key, behind the block's hash."""


def block_bytes_of(config: Any) -> int:
    """Bytes of a block in all layers of one worker, of vLLM's KVCacheConfig. Its tensors are parts of one allocation
    and each tells the size of the whole."""
    size = max(int(tensor.size) for tensor in config.kv_cache_tensors)
    return size // int(config.num_blocks)


class Watcher(Protocol):
    """Told of every block that begins or ends to idle, by the hash of its content."""

    def rested(self, block_hash: bytes) -> None: ...
    def left(self, block_hash: bytes) -> None: ...
    def cleared(self) -> None: ...


class BoundedPool(BlockPool):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Made of a pool by :meth:`adopt`. ``idle`` holds the numbers of cached blocks that no request uses, least
    recently used first; vLLM counts them as free."""

    bound_blocks: int
    idle: dict[int, None]
    holding: Bool
    """Blocks that hold anything, requests' and idle ones, [num_gpu_blocks]; the null block counts."""
    watcher: Watcher | None

    @classmethod
    def adopt(cls, pool: Any) -> BoundedPool:
        """Turn vLLM's own, fresh from its constructor, into a bounded one; the object stays the same. TypeError for
        another kind of pool."""
        if type(pool) is not BlockPool:
            raise TypeError(f"block pool {type(pool).__name__}: expected vLLM's BlockPool")
        pool.__class__ = cls
        pool.bound_blocks = pool.num_gpu_blocks - 1
        pool.idle = {}
        pool.holding = np.zeros(pool.num_gpu_blocks, np.bool_)
        pool.holding[pool.null_block.block_id] = True
        pool.watcher = None
        adopted: BoundedPool = pool
        return adopted

    def release(self) -> None:
        """Make it vLLM's own again, without bound and account, for good."""
        self.watcher = None
        self.__class__ = BlockPool

    @property
    def size_blocks(self) -> int:
        """Blocks that can hold anything: all but vLLM's null block."""
        return int(self.num_gpu_blocks) - 1

    @property
    def live_blocks(self) -> int:
        """Blocks that requests hold."""
        return self.size_blocks - int(self.free_block_queue.num_free_blocks)

    def bind(self, blocks: int) -> None:
        """Bound from now on; idle blocks beyond it are dropped, requests beyond it are the caller's."""
        self.bound_blocks = max(min(blocks, self.size_blocks), 0)
        self.trim()

    def trim(self) -> None:
        """Drop idle blocks until the bound holds, or none is left."""
        over = self.live_blocks + len(self.idle) - self.bound_blocks
        for number in list(islice(self.idle, max(over, 0))):
            self._maybe_evict_cached_block(self.blocks[number])

    def get_num_free_blocks(self) -> int:
        """vLLM asks this before every allocation."""
        return max(min(int(self.free_block_queue.num_free_blocks), self.bound_blocks - self.live_blocks), 0)

    def get_usage(self) -> float:
        """Of the pool itself, not of the bound: what /metrics has always meant."""
        return self.live_blocks / self.size_blocks if self.size_blocks else 0.0

    def get_new_blocks(self, num_blocks: int) -> list[Any]:
        taken: list[Any] = super().get_new_blocks(num_blocks)
        self.holding[[block.block_id for block in taken]] = True
        self.trim()
        return taken

    def touch(self, blocks: Sequence[Any]) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self._left(block)
                self.holding[block.block_id] = True
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        for block in blocks:
            self._rested(block)
        self.trim()  # beyond a bound that was lowered under running requests nothing may come to rest

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Any) -> None:
        listed = list(blocks)
        super().unpin_blocks(listed, on_reuse)
        for block in listed:
            self._rested(block)

    def reset_prefix_cache(self) -> bool:
        bound, self.bound_blocks = self.bound_blocks, self.size_blocks  # it asks whether everything is free
        try:
            done = bool(super().reset_prefix_cache())
        finally:
            self.bound_blocks = bound
        if done:
            self.holding[list(self.idle)] = False
            self.idle.clear()
            if self.watcher is not None:
                self._tell(self.watcher.cleared)
        return done

    def _remove_cached_block_hashes(self, block: Any) -> list[Any]:
        self._left(block)
        removed: list[Any] = super()._remove_cached_block_hashes(block)
        self._rested(block)
        return removed

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        self._rested(block)

    def _rested(self, block: Any) -> None:
        """Count the block as idle, or as free, if it is."""
        if block.ref_cnt > 0 or block.is_null:
            return
        self.holding[block.block_id] = block.block_hash is not None
        if block.block_hash is not None and block.block_id not in self.idle:
            self.idle[block.block_id] = None
            if self.watcher is not None:
                self._tell(self.watcher.rested, block.block_hash[:-KEY_TAIL_BYTES])

    def _left(self, block: Any) -> None:
        if block.block_id in self.idle:
            del self.idle[block.block_id]
            if self.watcher is not None and block.block_hash is not None:
                self._tell(self.watcher.left, block.block_hash[:-KEY_TAIL_BYTES])

    def _tell(self, what: Callable[..., None], *block_hash: bytes) -> None:
        """An error of who watches costs it the watching, never vLLM the allocation under way."""
        try:
            what(*block_hash)
        except Exception:
            log.exception("Tidegate's account of conversations ends here; vLLM goes on")
            self.watcher = None
