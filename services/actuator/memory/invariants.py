"""What must hold in a pool after every call. Slow and independent of how the pool keeps its counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import NO_CELL, NO_OWNER, NO_WAITER, Blocks
from services.actuator.memory.errors import InvariantBroken
from services.actuator.memory.quota import Quota
from services.actuator.memory.relocations import Relocations
from services.actuator.memory.states import BlockState, SessionState
from services.actuator.memory.tables import Session, Tables

I8 = NDArray[np.int64]


def check(
    blocks: Blocks,
    tables: Tables,
    sessions: Mapping[int, Session],
    idle: Iterable[int],
    relocations: Relocations,
    quota: Quota,
) -> None:
    """Raise InvariantBroken at the first rule that does not hold."""
    _tables(blocks, tables, sessions)
    _transfers(blocks, relocations)
    _accounts(blocks, quota)
    idle_now = {owner for owner, session in sessions.items() if session.state is SessionState.IDLE}
    _same("idle sessions are on the idle list", len(idle_now ^ set(idle)), 0)
    readers = dict.fromkeys(sessions, 0)
    for session in sessions.values():
        if session.prefix is not None:
            readers[session.prefix] += 1
    for owner, session in sessions.items():
        _same("readers of a prefix", session.readers, readers[owner], owner)


def _tables(blocks: Blocks, tables: Tables, sessions: Mapping[int, Session]) -> None:
    """No block is owned twice, none is lost."""
    seen = np.zeros(len(blocks.state), np.int64)
    spans = np.zeros(len(tables.cells), np.int64)
    for owner, session in sessions.items():
        table = tables.table(session)
        np.add.at(seen, table, 1)
        spans[session.at : session.at + session.span] += 1
        _all("a table's blocks are its owner's", blocks.owner[table] == owner, owner)
        _all("a block knows its cell", blocks.cell[table] == np.arange(session.at, session.at + session.size), owner)
        if session.state is SessionState.AWAY:
            _same("a session that is away has no block", session.size, 0, owner)
        _all("blocks rest in their session's state", blocks.resting[table] == session.state, owner)
        state = blocks.state[table]
        _all("blocks are in their session's state", (state == session.state) | (state == BlockState.MOVING), owner)
        writing = np.arange(session.size) >= session.full
        writing &= session.state is SessionState.LIVE
        _all("only a live session's unfilled blocks are written", blocks.writing[table] == writing, owner)
    _all("no block is in two tables", seen <= 1)
    _all("no two tables share a cell", spans <= 1)
    _all("an owned block is in a table", (seen == 1) == (blocks.owner != NO_OWNER))
    _all("a block in no table has no cell", (seen == 1) | (blocks.cell == NO_CELL))
    nobodys = np.isin(blocks.state, (BlockState.FREE, BlockState.RESERVED, BlockState.QUARANTINED))
    _all("free, reserved and quarantined blocks are nobody's", ~nobodys | (seen == 0))
    _all("a nobody's block is free or in transfer", nobodys | (blocks.state == BlockState.MOVING) | (seen == 1))
    _all("a nobody's block is not pinned or written", (seen == 1) | ~(blocks.pinned | blocks.writing))


def _transfers(blocks: Blocks, relocations: Relocations) -> None:
    """Blocks in transfer are those of open tickets, and quarantine knows all of its own."""
    moves = [ticket.moves for ticket in relocations.tickets.values()]
    both = np.concatenate(moves) if moves else np.zeros((0, 2), np.int64)
    _same_blocks("sources of open tickets", both[:, 0], blocks.state == BlockState.MOVING)
    _same_blocks("destinations of open tickets", both[:, 1], blocks.state == BlockState.RESERVED)
    waiting = [*relocations.quarantined, *relocations.held.values(), np.zeros(0, np.int64)]
    _same_blocks("quarantined blocks", np.concatenate(waiting), blocks.state == BlockState.QUARANTINED)


def _accounts(blocks: Blocks, quota: Quota) -> None:
    """Counts add up; no unmapped group holds a block."""
    per_group = blocks.geometry.blocks_per_group
    free = (blocks.state == BlockState.FREE).reshape(-1, per_group).sum(axis=1)
    _all("free blocks per group", blocks.free_in_group == free)
    _all("pinned blocks per group", blocks.pinned_in_group == blocks.pinned.reshape(-1, per_group).sum(axis=1))
    _all("an unmapped group has no block in use", blocks.mapped | (free == per_group))
    _all("an unmapped group is not protected", blocks.mapped | (blocks.protected == NO_WAITER))
    _same("used blocks", blocks.used, int((blocks.state != BlockState.FREE).sum()))
    _same("mapped groups", blocks.mapped_groups, int(blocks.mapped.sum()))
    _same("free blocks in mapped groups", blocks.free_blocks(), int(free[blocks.mapped].sum()))
    _same("promised blocks", quota.promised_blocks, sum(quota.promises().values()))


def _same_blocks(rule: str, named: I8, mask: NDArray[np.bool_]) -> None:
    found = np.flatnonzero(mask)
    _same(rule, len(named), len(found))
    _all(rule, np.sort(named) == found)


def _same(rule: str, found: int, expected: int, index: int = 0) -> None:
    if found != expected:
        raise InvariantBroken(rule, found, expected, index)


def _all(rule: str, holds: NDArray[np.bool_], index: int | None = None) -> None:
    if not holds.all():
        wrong = int((~holds).sum())
        raise InvariantBroken(rule, wrong, 0, int((~holds).argmax()) if index is None else index)
