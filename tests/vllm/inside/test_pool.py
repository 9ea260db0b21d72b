"""Run by vLLM's own interpreter: the bounded pool and relocation against random histories of vLLM's block pool.

Each block carries a number that stands for its content. Whatever is allocated, cached, hit, freed, bounded and moved, a
request's table must read the numbers that were written through it, and so must a hit in the prefix cache.
"""

import random

import numpy as np
import pytest
from vllm.v1.core.block_pool import BlockPool

from services.actuator.engines.vllm import tables
from services.actuator.engines.vllm.holders import Holders
from services.actuator.engines.vllm.pool import BoundedPool
from tests.vllm.inside.worlds import key, scheduler_of

BLOCKS = 40


class World:
    """A pool, requests as tables of blocks, and what each block's bytes would be."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.holders = Holders()
        self.table: dict[str, list] = {}
        self.scheduler = scheduler_of(BLOCKS, self.table)
        self.pool: BoundedPool = self.scheduler.kv_cache_manager.block_pool
        self.written: dict[str, list[int]] = {}
        self.bytes = [0] * BLOCKS
        self.hashes: dict[bytes, int] = {}
        self.next = 1

    def allocate(self) -> None:
        count = self.rng.randint(1, 6)
        if count > self.pool.get_num_free_blocks():
            return
        name = f"r{self.next}"
        self.table[name], self.written[name] = self.pool.get_new_blocks(count), []
        for block in self.table[name]:
            self.next += 1
            self.bytes[block.block_id] = self.next
            self.written[name].append(self.next)

    def cache(self) -> None:
        name = self._any()
        for block in self.table.get(name, []):
            if block.block_hash is None:
                content = self.bytes[block.block_id]
                self.pool._insert_block_hash(key(content), block, 16)
                self.hashes[key(content)[:-4]] = content

    def hit(self) -> None:
        found = [self.pool.blocks[number] for number in self.pool.idle][:2]
        found += [block for blocks in self.table.values() for block in blocks if block.block_hash is not None][:1]
        cost = sum(block.ref_cnt == 0 for block in found)
        if not found or cost > self.pool.get_num_free_blocks():
            return
        self.pool.touch(found)
        name = f"r{self.next}"
        self.next += 1
        self.table[name] = found
        self.written[name] = [self.bytes[block.block_id] for block in found]

    def free(self) -> None:
        name = self._any()
        if name:
            self.written.pop(name)
            self.pool.free_blocks(reversed(self.table.pop(name)))

    def bind(self) -> None:
        self.pool.bind(self.rng.randint(5, BLOCKS))

    def drop(self) -> None:
        self.pool.evict_blocks(set(list(self.pool.idle)[:3]))

    def move(self) -> None:
        drawn = self.rng.sample(range(1, BLOCKS), 20)
        plan = np.array(list(zip(drawn[:10], drawn[10:], strict=True)), np.int64)
        held = tables.busy(self.scheduler, in_flight=self.rng.random() < 0.5)
        valid = tables.held_by_tables(self.scheduler, self.holders, tables.still_valid(self.pool, plan, held))
        for source, destination in valid.tolist():
            self.bytes[destination] = self.bytes[source]
        for source, _ in valid.tolist():
            self.bytes[source] = -1  # whoever still reads it is wrong
        tables.repoint(self.scheduler, self.holders, valid)

    def _any(self) -> str:
        return self.rng.choice(sorted(self.table)) if self.table else ""

    def check(self) -> None:
        for name, blocks in self.table.items():
            assert [self.bytes[block.block_id] for block in blocks] == self.written[name], f"{name} reads other bytes"
            assert all(block.ref_cnt > 0 for block in blocks)
        queue = self.pool.free_block_queue
        free = queue.get_all_free_blocks()
        assert len(free) == queue.num_free_blocks == len({block.block_id for block in free})
        idle = [block.block_id for block in free if block.block_hash is not None]
        assert sorted(idle) == sorted(self.pool.idle), "the account of idle blocks is off"
        for block_hash, content in self.hashes.items():
            for block in self.pool.get_cached_block(block_hash, [0]) or ():
                assert self.bytes[block.block_id] == content, "the prefix cache gives other bytes"
        live = {block.block_id for blocks in self.table.values() for block in blocks}
        assert self.pool.live_blocks == len(live)
        assert len(idle) + len(live) <= max(self.pool.bound_blocks, len(live)), "more idles than the bound leaves"
        holding = {int(number) for number in np.flatnonzero(self.pool.holding)}
        assert holding == live | set(idle) | {0}, "the mask of blocks that hold anything is off"


@pytest.mark.parametrize("seed", range(8))
def test_tables_and_cache_read_what_was_written_whatever_moves(seed: int) -> None:
    world = World(seed)
    does = [world.allocate, world.allocate, world.cache, world.hit, world.free, world.bind, world.drop, world.move]
    for _ in range(250):
        world.rng.choice([*does, world.move])()
        world.check()


def test_a_full_reset_leaves_nothing_idle_and_keeps_the_bound() -> None:
    world = World(1)
    for _ in range(5):
        world.allocate()
        world.cache()
    world.pool.bind(30)
    while world.table:
        world.free()
    assert world.pool.reset_prefix_cache()
    assert not world.pool.idle
    assert world.pool.bound_blocks == 30
    assert world.pool.get_num_free_blocks() == 30


def test_an_error_of_who_watches_costs_the_watching_and_no_allocation() -> None:
    class Broken:
        def rested(self, block_hash: bytes) -> None:
            raise KeyError(block_hash)

        left = cleared = rested

    world = World(2)
    world.pool.watcher = Broken()
    for _ in range(8):
        world.allocate()
        world.cache()
    while world.table:
        world.free()
        world.check()
    assert world.pool.watcher is None


def test_a_released_pool_is_vllms_own_again_and_free_of_its_bound() -> None:
    world = World(3)
    for _ in range(5):
        world.allocate()
    world.pool.bind(20)
    world.pool.release()
    assert type(world.pool) is BlockPool
    free = world.pool.get_num_free_blocks()
    assert free == BLOCKS - 1 - sum(map(len, world.table.values()))
    world.pool.get_new_blocks(free)


def test_a_pool_of_another_kind_is_refused() -> None:
    class Other(BlockPool):
        pass

    with pytest.raises(TypeError, match="Other"):
        BoundedPool.adopt(Other(BLOCKS, True, 16))
