"""Completing a shrink below use, which kvcached alone defers until requests happen to end.

kvcached counts a page as used while one block of it is taken, and gives empty ones back by itself. So there are two
ways to bring use down, in the order that costs least: evict exactly the deficit of idle KV, then relocate the blocks
that are left on sparse pages. Running requests are never touched here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

from schemas.engine import Evict, Prepare, Receipt
from services.actuator.engines.protocol import Engine
from services.clock import Clock
from services.errors import EngineRefused, EngineUnreachable
from services.kvsegment import Usage

CAN_EVICT: Final = "evict"
CAN_COMPACT: Final = "compact"
STALLED_ROUNDS: Final = 3
"""Rounds without a byte given back before it is left to the requests' ends."""


class Terms(NamedTuple):
    """``deadline_ns`` and ``lease_ns`` are instants of the node clock."""

    target_bytes: int
    deadline_ns: int
    lease_ns: int
    action_id: str
    poll_s: float = 0.05


class Shrunk(NamedTuple):
    """What became of it so far; bytes."""

    target_bytes: int
    before_bytes: int
    used_bytes: int
    evicted_bytes: int = 0
    compacted_bytes: int = 0
    rounds: int = 0
    done: bool = False
    why: str = ""
    """Not done: what stands in the way."""


async def shrink(
    engine: Engine,
    read: Callable[[], Usage],
    capabilities: Collection[str],
    terms: Terms,
    clock: Clock,
    tell: Callable[[Shrunk], None] = lambda _: None,
) -> Shrunk:
    """Bring use to the target; what is given back, and why not all of it. ``tell`` hears every round.

    SegmentError when the segment is lost, EngineUnreachable when the engine is; both leave the limit as it is.
    """
    means = [way for way in (CAN_EVICT, CAN_COMPACT) if way in capabilities]
    used = read().used_bytes
    state = Shrunk(terms.target_bytes, used, used)
    refusals: dict[str, str] = {}
    stalled = 0
    while True:
        state = state._replace(used_bytes=read().used_bytes)
        open_ways = [way for way in means if way not in refusals]
        if state.used_bytes <= terms.target_bytes:
            state = state._replace(done=True, why="")
        elif clock.now_ns() > terms.deadline_ns:
            state = state._replace(why="the deadline passed")
        elif not means:
            state = state._replace(why="the engine can neither evict nor compact: left to kvcached")
        elif not open_ways:
            state = state._replace(why="; ".join(refusals.values()))
        elif stalled >= STALLED_ROUNDS:
            state = state._replace(why="nothing idle is left and nothing compacts: running requests hold it")
        else:
            tell(state)
            after = await _round(engine, read, open_ways, terms, state, refusals)
            stalled = 0 if after.used_bytes < state.used_bytes else stalled + 1
            state = after
            if stalled:
                await asyncio.sleep(terms.poll_s)
            continue
        tell(state)
        return state


async def _round(
    engine: Engine, read: Callable[[], Usage], ways: list[str], terms: Terms, state: Shrunk, refusals: dict[str, str]
) -> Shrunk:
    state = state._replace(rounds=state.rounds + 1)
    for way in ways:
        missing = state.used_bytes - terms.target_bytes
        if missing <= 0:
            break
        name = f"{terms.action_id}/{way}-{state.rounds}"
        try:
            if way == CAN_EVICT:
                receipt = await _finished(engine, await engine.evict(Evict((), missing, name)), terms)
                state = state._replace(evicted_bytes=state.evicted_bytes + receipt.evicted_bytes)
            else:
                compacted = await _compact(engine, Prepare((), missing, terms.lease_ns, name))
                state = state._replace(compacted_bytes=state.compacted_bytes + compacted)
        except EngineRefused as error:
            if error.reason != "busy":  # busy passes; the others do not
                refusals[way] = f"{way}: {error}"
        state = state._replace(used_bytes=read().used_bytes)
    return state


async def _finished(engine: Engine, receipt: Receipt, terms: Terms) -> Receipt:
    """Ask until the copies are through, at most some polls: the next round sees what they freed anyway."""
    for _ in range(10):
        if receipt.done:
            break
        await asyncio.sleep(terms.poll_s)
        receipt = await engine.receipt(receipt.action_id)
    return receipt


async def _compact(engine: Engine, command: Prepare) -> int:
    ticket = await engine.prepare(command)
    if not ticket.moves:
        return 0
    try:
        await engine.copy(ticket.ticket)
        receipt = await engine.commit(ticket.ticket)
    except (EngineRefused, EngineUnreachable):
        await _give_up(engine, ticket.ticket)
        raise
    return receipt.compacted_bytes


async def _give_up(engine: Engine, ticket: int) -> None:
    try:
        await engine.abort(ticket)
    except (EngineRefused, EngineUnreachable):
        return  # its lease runs out by itself
