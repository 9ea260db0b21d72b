"""Sessions, transfers and relocation, call by call; long mixtures of them are in test_pool_histories."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.actuator.memory.errors import BadGeometry, BadMoves, IllegalTransition, InvariantBroken, UnknownTicket
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import BlockState, Pool, SessionState
from tests.services.actuator.memory.history import fingerprint


def pool_with(*sizes: int) -> Pool:
    """Owners 0, 1, ... with so many blocks each, in 4 groups of 8."""
    pool = Pool(Geometry(16, 8, 4))
    pool.map_groups(4)
    for owner, size in enumerate(sizes):
        pool.allocate(owner, size)
    return pool


def test_a_session_goes_away_and_comes_back() -> None:
    pool = pool_with(5)
    pool.make_idle(0, since=12.5)
    owners, blocks, since = pool.idle_owners()
    assert (owners.tolist(), blocks.tolist(), since.tolist()) == ([0], [5], [12.5])
    assert pool.begin_leave(0).tolist() == [0, 1, 2, 3, 4]
    assert pool.counts()[BlockState.LEAVING] == 5
    pool.complete_leave(0)
    assert (pool.session_state(0), pool.used_blocks) == (SessionState.AWAY, 0)
    assert len(pool.begin_return(0)) == 5
    pool.complete_return(0)
    pool.resume(0)
    assert pool.session_state(0) is SessionState.LIVE
    pool.check()


def test_idle_sessions_come_longest_idle_first() -> None:
    pool = pool_with(1, 1, 1)
    for owner in (1, 0, 2):
        pool.make_idle(owner)
    pool.resume(0)
    pool.make_idle(0)
    assert pool.idle_owners()[0].tolist() == [1, 2, 0]


ILLEGAL: list[tuple[str, Callable[[Pool], object]]] = [
    ("session 9 is unknown", lambda pool: pool.free(9)),
    ("session 0 is live: cannot resume", lambda pool: pool.resume(0)),
    ("session 0 is live: cannot begin to leave", lambda pool: pool.begin_leave(0)),
    ("session 1 is idle: cannot grow", lambda pool: pool.allocate(1, 1)),
    ("session 1 is idle: cannot become idle", lambda pool: pool.make_idle(1)),
    ("session 2 is leaving: cannot be freed", lambda pool: pool.free(2)),
    ("session 2 is leaving: cannot resume", lambda pool: pool.resume(2)),
    ("session 3 is away: cannot complete returning", lambda pool: pool.complete_return(3)),
    ("session 0 is live: cannot be adopted", lambda pool: pool.adopt(0, 3)),
    ("session 0 is 3 blocks long: cannot have 4 full", lambda pool: pool.fill(0, 4)),
    ("session 0 is live: cannot be the prefix of session 1", lambda pool: pool.attach(1, 0)),
    ("session 0 is without a prefix", lambda pool: pool.detach(0)),
    ("group 3 is not mapped", lambda pool: pool.protect(1, np.array([3]))),
]


@pytest.mark.parametrize(("message", "call"), ILLEGAL, ids=[message for message, _ in ILLEGAL])
def test_illegal_transitions_tell_their_numbers_and_change_nothing(
    message: str, call: Callable[[Pool], object]
) -> None:
    pool = pool_with(3, 3, 3, 3)
    pool.give_back(np.array([3]))
    for owner in (1, 2, 3):
        pool.make_idle(owner)
    pool.begin_leave(2)
    pool.begin_leave(3)
    pool.complete_leave(3)
    before = fingerprint(pool)
    with pytest.raises(IllegalTransition, match=message):
        call(pool)
    assert fingerprint(pool) == before


@pytest.mark.parametrize(
    ("message", "moves"),
    [
        ("shape", [1, 2, 3]),
        ("outside blocks 0 to 31", [[0, 32]]),
        ("named more than once", [[0, 20], [1, 20]]),
        ("named more than once", [[0, 20], [0, 21]]),
        ("named more than once", [[0, 1], [1, 20]]),
        ("source is not live or idle: 2 moves, the first is number 1 with block 18", [[0, 20], [18, 21], [19, 22]]),
        ("source is being written", [[3, 20]]),
        ("source is pinned", [[8, 20]]),
        ("destination is not free", [[0, 1]]),
        ("protected", [[0, 31]]),
    ],
)
def test_plans_that_cannot_be_are_refused_whole(message: str, moves: list[list[int]]) -> None:
    pool = pool_with(4)
    pool.allocate(1, 2, pinned=True)
    assert pool.table(1).tolist() == [8, 9]
    pool.protect(1, np.array([3]))
    before = fingerprint(pool)
    with pytest.raises(BadMoves, match=message):
        pool.prepare(np.array(moves))
    assert fingerprint(pool) == before


def test_a_moved_block_is_free_one_iteration_after_the_commit() -> None:
    pool = pool_with(4)
    ticket = pool.prepare(np.array([[0, 24], [2, 25]]))
    assert pool.state[[0, 24]].tolist() == [BlockState.MOVING, BlockState.RESERVED]
    done = pool.commit(ticket.number)
    assert (done.moved, done.dropped) == (2, 0)
    assert pool.table(0).tolist() == [24, 1, 25, 3]
    assert pool.state[0] == BlockState.QUARANTINED, "a kernel already launched may read it"
    assert (pool.tick(), pool.tick()) == (2, 0)
    assert pool.state[0] == BlockState.FREE
    pool.check()


def test_freeing_a_session_under_relocation_drops_its_moves_and_reuses_nothing_before() -> None:
    pool = pool_with(4, 4)
    ticket = pool.prepare(np.array([[0, 24], [4, 25]]))
    pool.free(0)
    assert pool.state[0] == BlockState.MOVING, "the copy still reads it"
    done = pool.commit(ticket)
    assert (done.moved, done.lost.tolist()) == (1, [[0, 24]])
    assert pool.state[[0, 24]].tolist() == [BlockState.FREE, BlockState.FREE]
    pool.check()


def test_a_rewritten_block_is_not_moved_and_a_full_one_of_a_resumed_session_is() -> None:
    pool = pool_with(3)
    pool.make_idle(0)
    ticket = pool.prepare(np.array([[0, 24], [2, 25]]))
    pool.resume(0)
    done = pool.commit(ticket)
    assert done.moves.tolist() == [[0, 24]], "resuming does not wait for the copy of a full block"
    assert done.lost.tolist() == [[2, 25]], "the last block may be written as soon as the turn begins"
    pool.fill(0, 3)
    second = pool.prepare(np.array([[1, 26], [2, 27]]))
    pool.written(0, first=2)
    assert pool.commit(second).lost.tolist() == [[2, 27]]
    pool.check()


def test_a_session_under_relocation_does_not_leave() -> None:
    pool = pool_with(3)
    pool.make_idle(0)
    ticket = pool.prepare(np.array([[0, 24]]))
    with pytest.raises(IllegalTransition, match="under relocation with 1 blocks"):
        pool.begin_leave(0)
    pool.abort(ticket)
    pool.begin_leave(0)
    pool.check()


def test_where_an_aborted_copier_may_still_write_nothing_is_allocated() -> None:
    pool = pool_with(3)
    ticket = pool.prepare(np.array([[0, 24]]))
    pool.abort(ticket, copier_stopped=False)
    pool.tick()
    assert pool.state[24] == BlockState.QUARANTINED
    pool.release_held(ticket.number)
    pool.tick()
    assert pool.state[24] == BlockState.FREE
    pool.check()


def test_a_ticket_ends_once() -> None:
    pool = pool_with(3)
    ticket = pool.prepare(np.array([[0, 24]]))
    pool.commit(ticket)
    for call in (pool.commit, pool.abort, pool.release_held):
        with pytest.raises(UnknownTicket, match="ticket 1 is not open: 0 are, the newest given out is 1"):
            call(1)


def test_a_shared_prefix_stays_while_somebody_reads_it() -> None:
    pool = Pool(Geometry(16, 8, 4))
    pool.allocate(0, 4, pinned=True)
    pool.allocate(1, 2)
    pool.make_idle(0)
    pool.attach(1, 0)
    assert pool.idle_owners()[0].tolist() == [], "nothing that is read is offered as a victim"
    for call in (pool.begin_leave, pool.free):
        with pytest.raises(IllegalTransition, match="read as a prefix by 1 sessions"):
            call(0)
    pool.free(1)
    pool.begin_leave(0)
    pool.check()


def test_a_session_found_in_a_lower_tier_can_return() -> None:
    pool = pool_with()
    pool.adopt(5, 3)
    assert len(pool.begin_return(5)) == 3
    pool.abort_return(5)
    assert pool.counts()[BlockState.QUARANTINED] == 3, "a load may still be writing"
    pool.tick()
    assert pool.session_state(5) is SessionState.AWAY
    pool.free(5)
    pool.check()


def test_the_reported_pool_of_scattered_survivors() -> None:
    """6,400 blocks in groups of 64, every 40th kept: nothing is empty, and 3 groups would hold what is left."""
    pool = Pool(Geometry(16, 64, 100))
    for block in range(6400):
        pool.allocate(block, 1)
    for block in range(6400):
        if block % 40:
            pool.free(block)
    assert len(pool.empty_groups()) == 0
    assert pool.geometry.groups_for(pool.used_blocks) == 3


def test_a_geometry_that_cannot_be_is_told() -> None:
    with pytest.raises(BadGeometry, match="blocks_per_group: found 0, expected 1 or more"):
        Geometry(16, 0, 4)
    with pytest.raises(BadGeometry, match="owner: found -1"):
        pool_with().allocate(-1, 1)


def test_the_check_finds_a_block_in_two_tables() -> None:
    pool = pool_with(2, 2)
    pool.tables.cells[pool.sessions[1].at] = 0
    with pytest.raises(InvariantBroken):
        pool.check()
