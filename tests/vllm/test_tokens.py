"""Moving KV changes no token: the same conversations with and without it, on a real vLLM."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import numpy as np
import pytest

from loadgen.openai.comparing import compare
from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from loadgen.openai.records import RequestRecord
from schemas.engine import Evict, Move, Prefetch, Prepare, Snapshot, Ticket
from services.actuator.engines.protocol import SocketEngine
from services.errors import EngineRefused
from tests.vllm.servers import BLOCK_BYTES, POOL_BLOCKS, VllmServer

LEASE_NS = 6_000_000_000
SESSIONS = 12
Tell = Callable[[str], None]
Act = Callable[[SocketEngine, "Moved"], Awaitable[None]]
RNG = np.random.default_rng(11)


class Moved(msgspec.Struct):
    """What was done to the engine while it served."""

    calls: int = 0
    blocks: int = 0
    dropped: int = 0
    groups: int = 0
    pauses_us: list[float] = []
    evicted: int = 0
    fetched: int = 0


async def converse(server: VllmServer) -> list[RequestRecord]:
    """Multi-turn conversations, a dozen at a time, greedy; the same at every call."""
    records: list[RequestRecord] = []
    await drive(
        Options(
            url=server.url, sessions=SESSIONS, requests=72, seed=5, turns="4", prompt_tokens="120:260",
            turn_tokens="20:60", max_tokens="30:70", is_ignoring_eos=True, think_s="0.4",
        ),
        sink=records.append,
    )  # fmt: skip
    assert not [one for one in records if one.failure], "a request failed"
    return records


async def compact(engine: SocketEngine, moved: Moved) -> None:
    """Every compaction that the planner finds worth it, as fast as the engine takes them."""
    await commit(engine, (), moved)


async def commit(engine: SocketEngine, moves: tuple[Move, ...], moved: Moved) -> None:
    ask = Prepare(moves, 1 << 30, engine.t_ns + LEASE_NS, f"c{moved.calls}")
    ticket: Ticket = await engine.prepare(ask)
    if not ticket.moves:
        await asyncio.sleep(0.01)
        return
    await engine.copy(ticket.ticket)
    said = await engine.commit(ticket.ticket)
    moved.calls += 1
    moved.blocks += said.compacted_bytes // BLOCK_BYTES
    moved.dropped += said.dropped_moves
    moved.groups += said.pages_freed
    moved.pauses_us.append(said.pause_us)


async def shuffle(engine: SocketEngine, moved: Moved) -> None:
    """Blocks to wherever it pleases a die: many more moves than compaction has reason for. The engine leaves out those
    from places that hold nothing and to places that do."""
    drawn = RNG.permutation(np.arange(1, POOL_BLOCKS))[:128].tolist()
    moves = tuple(Move(source, destination) for source, destination in zip(drawn[:64], drawn[64:], strict=True))
    await commit(engine, moves, moved)


async def evict_and_fetch(engine: SocketEngine, moved: Moved) -> None:
    """Everybody who pauses leaves and comes back."""
    said = await engine.snapshot(Snapshot(100, 1e9))
    moved.calls += 1
    with contextlib.suppress(EngineRefused):  # a session may have begun its next turn meanwhile
        gone = await engine.evict(Evict(tuple(one.session for one in said.idle if one.copied), 0, f"e{moved.calls}"))
        moved.evicted += gone.evicted_bytes // BLOCK_BYTES
    await asyncio.sleep(0.1)
    said = await engine.snapshot(Snapshot(0, 1e9))
    if said.away:
        begun = await engine.prefetch(Prefetch(tuple(one.session for one in said.away[:6]), f"p{moved.calls}"))
        moved.fetched += begun.prefetched_bytes // BLOCK_BYTES


@contextlib.asynccontextmanager
async def meanwhile(server: VllmServer, act: Callable[[SocketEngine, Moved], Awaitable[None]]) -> AsyncIterator[Moved]:
    engine, moved = server.engine(), Moved()
    await engine.describe()

    async def again() -> None:
        while True:
            await act(engine, moved)

    task = asyncio.create_task(again())
    try:
        yield moved
    finally:
        failed = task.exception() if task.done() else None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
        await engine.close()
        assert failed is None, f"acting on the engine failed: {failed!r}"


@pytest.mark.parametrize(("act", "least_blocks"), [(compact, 20), (shuffle, 200)])
async def test_tokens_are_the_same_while_blocks_move(
    steered: VllmServer, tell: Tell, act: Act, least_blocks: int
) -> None:
    plain, while_moving, moved = await with_and_without(steered, act)
    found = compare(plain, while_moving)
    pauses = sorted(moved.pauses_us)
    tell(
        f"{act.__name__}: {moved.blocks} blocks moved in {moved.calls} calls, {moved.groups} groups emptied, "
        f"{moved.dropped} moves left out; longest call of each p50 {pauses[len(pauses) // 2] / 1e3:.1f} ms, "
        f"max {pauses[-1] / 1e3:.1f} ms; {found.same} of {len(plain)} answers the same, token by token"
    )
    assert moved.blocks >= least_blocks, "hardly anything was moved: the comparison would show nothing"
    assert not found.different, f"tokens changed: {found.different[:3]}"
    assert found.same == len(plain)


async def test_tokens_change_when_the_bytes_stay_behind(forgetful: VllmServer, tell: Tell) -> None:
    """The negative control: were KV not to matter to the comparison above, this would pass unnoticed."""
    plain, while_moving, moved = await with_and_without(forgetful, shuffle)
    found = compare(plain, while_moving)
    tell(f"negative control: {moved.blocks} blocks re-pointed without bytes, {len(found.different)} answers differ")
    assert found.different, "tables moved without their bytes, and no token changed"


async def test_tokens_are_the_same_when_sessions_leave_and_come_back(steered: VllmServer, tell: Tell) -> None:
    plain, while_moving, moved = await with_and_without(steered, evict_and_fetch)
    found = compare(plain, while_moving)
    tell(
        f"evict and prefetch: {moved.evicted} blocks left, {moved.fetched} fetched ahead; "
        f"{found.same} of {len(plain)} answers the same"
    )
    assert moved.evicted > 100, "hardly anything left: the comparison would show nothing"
    assert moved.fetched > 20
    assert not found.different, f"tokens changed: {found.different[:3]}"
    assert found.same == len(plain)


async def with_and_without(server: VllmServer, act: Act) -> tuple[list[RequestRecord], list[RequestRecord], Moved]:
    server.reset_cache()
    plain = await converse(server)
    server.reset_cache()
    async with meanwhile(server, act) as moved:
        while_moving = await converse(server)
    return plain, while_moving, moved
