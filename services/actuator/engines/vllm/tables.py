"""vLLM's tables as relocation sees them: which blocks may move, and everything that names a block re-pointed at once.

Runs in EngineCore between two steps. With batches in flight (async scheduling) every worker carries them out before the
relocation, which was sent after them, and waits for its device first: they read and write the old places, and what the
copies then find there is complete. The last block of each request stays all the same (DESIGN section 5: what is being
written stays), which costs little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from services.actuator.engines.vllm.holders import Holders
from services.actuator.engines.vllm.pool import BoundedPool
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.occupancy import Occupancy

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Blocks of the pool, bool [blocks of the geometry]; those beyond the pool's end are neither."""

    movable: Bool
    free: Bool
    occupancy: Occupancy


def offloader(scheduler: Any) -> Any | None:
    """The scheduler side of a stock OffloadingConnector; None without one. TypeError for another connector, of whose
    use of block numbers nothing is known."""
    connector = scheduler.connector
    if connector is None:
        return None
    inner = getattr(connector, "connector_scheduler", None)
    if inner is None or not hasattr(inner, "_req_status"):
        raise TypeError(f"KV connector {type(connector).__name__}: its block tables are not known")
    return inner


def table_of(scheduler: Any) -> dict[str, list[Any]]:
    """Blocks of each request, as the one KV cache group's manager keeps them. TypeError for a model with several
    groups, and for one whose group gives blocks back under way (sliding windows, Mamba: the connector goes on naming
    them) or holds some outside of all tables (attention sinks)."""
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if len(managers) != 1:
        raise TypeError(f"{len(managers)} KV cache groups: expected one")
    if type(managers[0].kv_cache_spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise TypeError(f"KV cache of {type(managers[0].kv_cache_spec).__name__}: expected full attention or MLA")
    table: dict[str, list[Any]] = managers[0].req_to_blocks
    return table


def busy(scheduler: Any, *, in_flight: bool) -> set[int]:
    """Numbers of blocks that must stay where they are: transferred or awaited by the connector, read by it after their
    request ended, waiting to be freed or copied, and, with batches ``in_flight``, the last one of each request."""
    pool = scheduler.kv_cache_manager.block_pool
    held: set[int] = {0, *pool._reuse_watchers}
    for _, blocks in scheduler.deferred_frees:
        held.update(block.block_id for block in blocks)
    table = table_of(scheduler)
    for request in scheduler.kv_holding_waiting:
        held.update(block.block_id for block in table.get(request.request_id, ()))
    inner = offloader(scheduler)
    if inner is not None:
        held.update(inner._block_id_to_pending_jobs)
        held.update(inner._current_batch_allocated_block_ids)
        for request_id, status in inner._req_status.items():
            if status.transfer_jobs or status.req.is_finished():
                held.update(block.block_id for block in table.get(request_id, ()))
                for group in status.group_states:
                    held.update(group.block_ids)
    if in_flight:
        for blocks in table.values():
            if blocks:
                held.add(blocks[-1].block_id)
    return held


def layout(pool: BoundedPool, geometry: Geometry, held: Iterable[int]) -> Layout:
    """What is where now. ``held``: see :func:`busy`; a free block that is held is no hole either."""
    used = np.zeros(geometry.blocks, np.bool_)
    used[: pool.num_gpu_blocks] = pool.holding
    stuck = np.zeros(geometry.blocks, np.bool_)
    stuck[list(held)] = True
    stuck[pool.num_gpu_blocks :] = True
    movable, free = used & ~stuck, ~used & ~stuck

    def per_group(mask: Bool) -> I8:
        counts: I8 = mask.reshape(geometry.groups, geometry.blocks_per_group).sum(axis=1, dtype=np.int64)
        return counts

    live, holes = per_group(movable), per_group(free)
    occupancy = Occupancy(
        live=live,
        stuck=geometry.blocks_per_group - live - holes,
        free=holes,
        mapped=np.ones(geometry.groups, np.bool_),  # a stock vLLM has its whole pool mapped
        protected=np.zeros(geometry.groups, np.bool_),
    )
    return Layout(movable, free, occupancy)


def still_valid(pool: BoundedPool, moves: I8, held: set[int]) -> I8:
    """Those of ``moves`` int64 [n, 2] whose source still holds something and whose destination is still free."""

    def valid(source: int, destination: int) -> bool:
        if source in held or destination in held:
            return False
        if not (0 < source < pool.num_gpu_blocks and 0 < destination < pool.num_gpu_blocks):
            return False
        from_, to = pool.blocks[source], pool.blocks[destination]
        holds = from_.ref_cnt > 0 or source in pool.idle
        return holds and to.ref_cnt == 0 and to.block_hash is None and to.next_free_block is not None

    keep = [valid(source, destination) for source, destination in moves.tolist()]
    return moves[np.array(keep, np.bool_)] if keep else moves


def held_by_tables(scheduler: Any, holders: Holders, moves: I8) -> I8:
    """Those of ``moves`` int64 [n, 2], all valid, whose source is held by requests' tables and by nobody else: who
    else took a reference would go on naming the old place."""
    pool: BoundedPool = scheduler.kv_cache_manager.block_pool
    for attempt in range(2):
        found = holders.find(table_of(scheduler), moves[:, 0])
        keep = np.array([len(found[one]) == pool.blocks[one].ref_cnt for one in moves[:, 0].tolist()], np.bool_)
        if keep.all() or attempt:
            break
        holders.forget()  # a table may have changed in its middle, though vLLM has no reason to
    return moves[keep] if len(moves) else moves


def repoint(scheduler: Any, holders: Holders, moves: I8) -> None:
    """Give each destination its source's content: requests' tables, prefix cache, order of eviction, and the
    connector's lists. Sources are free afterwards. ``moves`` int64 [n, 2], all valid and held by tables alone; the
    bytes are copied by the caller in the same call, before anything runs."""
    pool: BoundedPool = scheduler.kv_cache_manager.block_pool
    into = dict(moves.tolist())
    for source, places in holders.find(table_of(scheduler), moves[:, 0]).items():
        for holder, place in places:
            holder.blocks[place] = pool.blocks[into[source]]
            holder.numbers[place] = into[source]
    inner = offloader(scheduler)
    if inner is not None:
        for status in inner._req_status.values():
            for group in status.group_states:
                group.block_ids[:] = [into.get(number, number) for number in group.block_ids]
    for source, destination in into.items():
        _swap(pool, pool.blocks[source], pool.blocks[destination])


def _swap(pool: BoundedPool, source: Any, destination: Any) -> None:
    """The bookkeeping of one block: references, hashes, its place among the idle ones."""
    queue = pool.free_block_queue
    queue.remove(destination)
    pool.holding[destination.block_id] = True
    if source.ref_cnt > 0:
        destination.ref_cnt, source.ref_cnt = source.ref_cnt, 0
        if source.block_hash is not None:
            pool.move_block_hashes(source, destination)
    else:
        _insert_before(queue, destination, source)
        queue.remove(source)
        pool.move_block_hashes(source, destination)
    pool.holding[source.block_id] = False
    queue.prepend_n([source])


def _insert_before(queue: Any, block: Any, place: Any) -> None:
    """Into vLLM's linked list of free blocks, so that an idle block keeps its turn to be dropped."""
    before = place.prev_free_block
    before.next_free_block = block
    block.prev_free_block = before
    block.next_free_block = place
    place.prev_free_block = block
    queue.num_free_blocks += 1
