"""The engine in this process: the same seed gives the same history, and its checks see what they are there to see."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest

from loadgen.memory_engine import plans
from loadgen.memory_engine.engine import MemoryEngine, Report
from schemas.engine import (
    AskReceipt,
    Commit,
    Describe,
    Description,
    Evict,
    Failure,
    Prepare,
    Receipt,
    ReturnPages,
    Snapshot,
    SnapshotReply,
    Ticket,
)
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import Pool
from services.actuator.memory.tickets import NoCopiers, moves_of

GEOMETRY = Geometry(block_bytes=512, blocks_per_group=8, groups=32)
FAR_NS = 1 << 62


def engine_over(view: np.ndarray, seed: int = 1) -> MemoryEngine:
    clock = itertools.count()
    return MemoryEngine(
        "n0/0/w0",
        Pool(GEOMETRY, order="lifo"),
        view,
        handle="",
        fence=NoCopiers(),
        first_ticket=1,
        clock_ns=lambda: next(clock),
        rng=np.random.default_rng(seed),
        plan=plans.shuffled(np.random.default_rng(seed)),
    )


async def history(iterations: int = 300, *, copies: bool = True, grace: bool = True) -> Report:
    """A ticket is always open: copied in the middle of an iteration, committed at the third boundary after it."""
    view = np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8)
    engine = engine_over(view)
    age = 0
    for _ in range(iterations):
        engine.begin()
        if not grace:
            engine.pool.tick()  # what was a source a moment ago may be a destination now
        held = engine.arena.open_ticket
        if held is None:
            said = engine.answer(Prepare((), 64 * GEOMETRY.block_bytes, FAR_NS))
            assert isinstance(said, Ticket), said
            if said.moves and copies:
                moves = moves_of(said.plan)
                view[moves[:, 1]] = view[moves[:, 0]]
            age = 0
        elif age == 2:
            assert isinstance(engine.answer(Commit(held.ticket)), asyncio.Future)
        age += 1
        engine.end()
    return engine.report()


async def test_sessions_live_and_every_byte_is_right() -> None:
    report = await history()
    assert report.sessions.wrong_blocks == 0, report.sessions.wrong
    assert report.relocation.moved > 1000
    assert report.relocation.dropped > 20, "sessions end and come back under transfer"
    assert min(report.sessions.freed, report.sessions.idled, report.sessions.resumed) > 20


async def test_a_seed_gives_one_history() -> None:
    assert (await history(50)).sessions == (await history(50)).sessions


async def test_negative_control_a_table_that_points_at_bytes_never_copied_is_noticed() -> None:
    assert (await history(100, copies=False)).sessions.wrong_blocks > 0


async def test_negative_control_without_the_grace_period_a_running_iteration_reads_what_is_not_its_own() -> None:
    report = await history(grace=False)
    assert report.sessions.wrong_blocks > 0
    assert all("in flight" in one for one in report.sessions.wrong), "by its own table everything is right"


async def test_it_describes_itself_and_counts_its_blocks() -> None:
    engine = engine_over(np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8))
    for _ in range(50):
        engine.begin()
        engine.end()
    said = engine.answer(Describe())
    assert isinstance(said, Description)
    assert (said.block_bytes, said.page_group_bytes) == (512, 4096)
    snapshot = engine.answer(Snapshot())
    assert isinstance(snapshot, SnapshotReply)
    used = snapshot.live_bytes + snapshot.idle_bytes + snapshot.relocating_bytes
    assert used + snapshot.free_block_bytes == snapshot.mapped_bytes


async def test_compaction_gives_pages_back() -> None:
    view = np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8)
    engine = engine_over(view)
    engine.arena._plan = plans.compact
    freed = 0
    for _ in range(200):
        engine.begin()
        said = engine.answer(Prepare((), GEOMETRY.arena_bytes, FAR_NS, "compact"))
        if isinstance(said, Ticket) and said.moves:
            moves = moves_of(said.plan)
            view[moves[:, 1]] = view[moves[:, 0]]
            answer = engine.answer(Commit(said.ticket))
            assert isinstance(answer, asyncio.Future)
            engine.end()
            engine.begin()
            freed += (await answer).pages_freed
            engine.end()
            engine.begin()  # the grace period
            back = engine.answer(ReturnPages(GEOMETRY.arena_bytes))
            assert isinstance(back, Receipt)
            receipt = engine.answer(AskReceipt("compact"))
            assert isinstance(receipt, Receipt)
        engine.end()
    assert freed > 10
    report = engine.report()
    assert report.sessions.wrong_blocks == 0, report.sessions.wrong


@pytest.mark.parametrize("body", [Evict((), 1, "a"), AskReceipt("never")])
async def test_what_it_cannot_do_is_a_failure(body: Evict | AskReceipt) -> None:
    engine = engine_over(np.zeros((GEOMETRY.blocks, GEOMETRY.block_bytes), np.uint8))
    assert isinstance(engine.answer(body), Failure)
