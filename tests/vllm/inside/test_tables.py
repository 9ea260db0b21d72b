"""Run by vLLM's own interpreter: what relocation re-points, and what it leaves where it is."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from services.actuator.engines.vllm import tables
from services.actuator.engines.vllm.holders import Holders
from services.actuator.memory.geometry import Geometry
from tests.vllm.inside.worlds import key, scheduler_of

BLOCKS = 33
GEOMETRY = Geometry(64, 4, 9)
"""Four blocks a group; the last group reaches beyond the pool."""


class Connector:
    """The scheduler's side of a stock OffloadingConnector, as far as relocation looks at it."""

    def __init__(self) -> None:
        self._block_id_to_pending_jobs: dict[int, set[int]] = {}
        self._current_batch_allocated_block_ids: set[int] = set()
        self._req_status: dict[str, Any] = {}

    def knows(self, name: str, blocks: list[Any], *, jobs: tuple[int, ...] = (), finished: bool = False) -> Any:
        status = SimpleNamespace(
            transfer_jobs=set(jobs),
            req=SimpleNamespace(is_finished=lambda: finished),
            group_states=[SimpleNamespace(block_ids=numbers(blocks))],
        )
        self._req_status[name] = status
        return status


@pytest.fixture
def connector() -> Connector:
    return Connector()


@pytest.fixture
def table() -> dict[str, list[Any]]:
    return {}


@pytest.fixture
def scheduler(connector: Connector, table: dict[str, list[Any]]) -> Any:
    return scheduler_of(BLOCKS, table, SimpleNamespace(connector_scheduler=connector))


@pytest.fixture
def pool(scheduler: Any) -> Any:
    return scheduler.kv_cache_manager.block_pool


def numbers(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def moves(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int64)


def test_the_connectors_lists_follow(scheduler: Any, pool: Any, table: dict, connector: Connector) -> None:
    table["a"] = pool.get_new_blocks(4)
    status = connector.knows("a", table["a"])
    second, third = numbers(table["a"])[1:3]
    tables.repoint(scheduler, Holders(), moves((second, 20), (third, 21)))
    assert numbers(table["a"])[1:3] == [20, 21]
    assert status.group_states[0].block_ids == numbers(table["a"])


def test_a_prefix_that_several_share_moves_in_all_tables_at_once(scheduler: Any, pool: Any, table: dict) -> None:
    shared = pool.get_new_blocks(2)
    for place, block in enumerate(shared):
        pool._insert_block_hash(key(place + 1), block, 16)
    pool.touch(shared)
    table["a"] = [*shared, *pool.get_new_blocks(1)]
    table["b"] = [*shared, *pool.get_new_blocks(2)]
    tables.repoint(scheduler, Holders(), moves((shared[0].block_id, 20), (shared[1].block_id, 21)))
    assert numbers(table["a"])[:2] == numbers(table["b"])[:2] == [20, 21]
    assert [pool.blocks[number].ref_cnt for number in (20, 21)] == [2, 2]
    assert [block.ref_cnt for block in shared] == [0, 0]
    assert numbers(pool.get_cached_block(key(1)[:-4], [0])) == [20]


def test_the_place_that_was_left_is_handed_out_next(scheduler: Any, pool: Any, table: dict) -> None:
    table["a"] = pool.get_new_blocks(2)
    left = table["a"][0].block_id
    tables.repoint(scheduler, Holders(), moves((left, 20)))
    assert numbers(pool.get_new_blocks(1)) == [left]


def test_an_idle_block_keeps_its_turn_to_be_dropped(scheduler: Any, pool: Any) -> None:
    blocks = pool.get_new_blocks(3)
    for place, block in enumerate(blocks):
        pool._insert_block_hash(key(place + 1), block, 16)
    pool.free_blocks(blocks)
    tables.repoint(scheduler, Holders(), moves((blocks[0].block_id, 20)))
    order = [one.block_id for one in pool.free_block_queue.get_all_free_blocks() if one.block_hash is not None]
    assert order == [20, *numbers(blocks[1:])]


def movable(scheduler: Any, pool: Any, *, in_flight: bool = False) -> set[int]:
    held = tables.busy(scheduler, in_flight=in_flight)
    return set(np.flatnonzero(tables.layout(pool, GEOMETRY, held).movable).tolist())


def test_blocks_in_transfer_stay(scheduler: Any, pool: Any, table: dict, connector: Connector) -> None:
    table["a"], table["b"] = pool.get_new_blocks(3), pool.get_new_blocks(3)
    connector.knows("a", table["a"], jobs=(7,))
    connector.knows("b", table["b"])
    assert movable(scheduler, pool) == set(numbers(table["b"]))


def test_blocks_of_a_finished_request_that_are_yet_to_be_stored_stay(
    scheduler: Any, pool: Any, connector: Connector
) -> None:
    blocks = pool.get_new_blocks(2)
    for place, block in enumerate(blocks):
        pool._insert_block_hash(key(place + 1), block, 16)
    pool.free_blocks(blocks)
    connector.knows("gone", blocks, finished=True)
    assert not movable(scheduler, pool)
    del connector._req_status["gone"]
    assert movable(scheduler, pool) == set(numbers(blocks))
    connector._block_id_to_pending_jobs[blocks[0].block_id] = {3}
    assert movable(scheduler, pool) == {blocks[1].block_id}


def test_who_waits_for_a_load_stays_and_so_do_blocks_that_are_freed_later(
    scheduler: Any, pool: Any, table: dict
) -> None:
    table["loading"], table["a"] = pool.get_new_blocks(2), pool.get_new_blocks(2)
    scheduler.kv_holding_waiting = [SimpleNamespace(request_id="loading")]
    scheduler.deferred_frees = [(1, [pool.blocks[number] for number in numbers(pool.get_new_blocks(2))])]
    assert movable(scheduler, pool) == set(numbers(table["a"]))


def test_with_batches_in_flight_the_block_that_is_written_stays(scheduler: Any, pool: Any, table: dict) -> None:
    table["a"] = pool.get_new_blocks(3)
    assert movable(scheduler, pool, in_flight=True) == set(numbers(table["a"][:2]))


def test_nothing_moves_beyond_the_pools_end_or_into_a_block_that_holds_something(
    scheduler: Any, pool: Any, table: dict
) -> None:
    table["a"] = pool.get_new_blocks(3)
    first, second, _ = numbers(table["a"])
    asked = moves((first, 20), (second, first), (25, 26), (second, 0), (0, 21), (second, 34))
    assert tables.still_valid(pool, asked, tables.busy(scheduler, in_flight=False)).tolist() == [[first, 20]]
    seen = tables.layout(pool, GEOMETRY, {0})
    assert not seen.free[BLOCKS:].any()
    assert seen.occupancy.free.sum() == BLOCKS - 1 - 3


def test_a_block_that_somebody_else_holds_too_stays(scheduler: Any, pool: Any, table: dict) -> None:
    table["a"] = pool.get_new_blocks(3)
    pinned = table["a"][1]
    pool.touch([pinned])
    asked = moves(*[(number, 20 + number) for number in numbers(table["a"])])
    kept = tables.held_by_tables(scheduler, Holders(), asked)
    assert pinned.block_id not in kept[:, 0]
    assert len(kept) == 2


def test_a_table_that_changed_in_its_middle_is_read_anew(scheduler: Any, pool: Any, table: dict) -> None:
    holders = Holders()
    table["a"] = pool.get_new_blocks(3)
    first = moves((table["a"][1].block_id, 20))
    assert len(tables.held_by_tables(scheduler, holders, first)) == 1
    (table["a"][1],) = pool.get_new_blocks(1)
    now = moves((table["a"][1].block_id, 21))
    assert tables.held_by_tables(scheduler, holders, now).tolist() == now.tolist()


def test_several_groups_are_refused(table: dict) -> None:
    with pytest.raises(TypeError, match="2 KV cache groups"):
        tables.table_of(scheduler_of(BLOCKS, table, groups=2))


def test_a_group_that_gives_blocks_back_under_way_is_refused(scheduler: Any) -> None:
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    manager.kv_cache_spec = SlidingWindowSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=64
    )
    with pytest.raises(TypeError, match="SlidingWindowSpec"):
        tables.table_of(scheduler)


def test_another_connector_is_refused(table: dict) -> None:
    with pytest.raises(TypeError, match="object"):
        tables.busy(scheduler_of(BLOCKS, table, object()), in_flight=False)
