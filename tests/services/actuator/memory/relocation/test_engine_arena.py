"""The engine's end of relocation, without processes: tickets, leases, epochs, the grace period, and bad input."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.engine import Failure, Move, Prepare, Receipt, Ticket
from services.actuator.memory.engine_arena import EngineArena
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.pool import BlockState, Pool
from services.actuator.memory.tickets import Planned

GEOMETRY = Geometry(block_bytes=64, blocks_per_group=4, groups=6)
FIRST = 1000
LEASE_NS = 500
RUNNING, IDLE = 1, 2


class Copier:
    """The fence as a test holds it."""

    def __init__(self) -> None:
        self.inside = False
        self.open_ticket = 0

    def open(self, ticket: int) -> None:
        self.open_ticket = ticket

    def close(self) -> bool:
        if not self.inside:
            self.open_ticket = 0
        return not self.inside


def no_plan(pool: Pool, budget_bytes: int) -> Planned:
    return Planned(np.zeros((0, 2), np.int64))


def base(action_id: str) -> Receipt:
    return Receipt(action_id, True, 0, 1.0, 0, 0, 0, 0)


class Bench:
    """A running session of 5 blocks (the last one being written), an idle one of 3, everything else free."""

    def __init__(self) -> None:
        self.pool = Pool(GEOMETRY, order="lowest")
        self.pool.map_groups(GEOMETRY.groups)
        self.pool.allocate(RUNNING, 5)
        self.pool.allocate(IDLE, 3)
        self.pool.make_idle(IDLE)
        self.copier = Copier()
        times = iter(range(0, 10**9, 150_000))  # each look at the timer is 150 us later
        self.arena = EngineArena(
            self.pool, first_ticket=FIRST, plan=no_plan, base=base, fence=self.copier, timer_ns=lambda: next(times)
        )

    def prepare(self, *moves: tuple[int, int], now_ns: int = 0, action_id: str = "") -> Ticket | Failure:
        return self.arena.prepare(Prepare(tuple(Move(*move) for move in moves), 0, LEASE_NS, action_id), now_ns)

    def ticket(self, *moves: tuple[int, int]) -> Ticket:
        said = self.prepare(*moves)
        assert isinstance(said, Ticket), said
        return said

    def commit(self, number: int) -> Receipt:
        assert self.arena.commit(number, 1) is None, "the receipt comes from the boundary"
        ((answered, receipt),) = self.arena.boundary(1)
        assert answered == number
        return receipt

    def states(self, *blocks: int) -> list[BlockState]:
        return [BlockState(self.pool.state[block]) for block in blocks]

    def image(self) -> tuple[bytes, ...]:
        pool = self.pool
        arrays = (pool.state, pool.owner, pool.epoch, pool.pinned, pool.mapped, pool.table(RUNNING), pool.table(IDLE))
        return tuple(array.tobytes() for array in arrays)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_tables_change_at_the_boundary_after_the_commit_and_not_before(bench: Bench) -> None:
    ticket = bench.ticket((0, 20), (5, 21))
    assert (ticket.ticket, ticket.moves, ticket.bytes) == (FIRST, 2, 128)
    assert bench.states(0, 5, 20, 21) == [BlockState.MOVING] * 2 + [BlockState.RESERVED] * 2
    before = bench.image()
    assert bench.arena.commit(ticket.ticket, 1) is None
    assert bench.image() == before, "an iteration is under way: its tables must not change under it"
    ((_, receipt),) = bench.arena.boundary(1)
    assert bench.pool.table(RUNNING).tolist() == [20, 1, 2, 3, 4]
    assert bench.pool.table(IDLE).tolist() == [21, 6, 7]
    assert receipt.compacted_bytes == 128
    assert receipt.pause_us == 150.0, "the pause is the swap, by the timer"
    assert receipt.detail == "2 moved, 0 dropped"
    assert bench.states(20, 21) == [BlockState.LIVE, BlockState.IDLE]


def test_a_source_is_free_one_iteration_after_the_swap(bench: Bench) -> None:
    bench.commit(bench.ticket((0, 20)).ticket)
    assert bench.states(0) == [BlockState.QUARANTINED], "kernels already launched read it"
    bench.arena.boundary(2)
    assert bench.states(0) == [BlockState.FREE]
    bench.pool.check()


def test_pages_freed_counts_groups_that_nobody_uses(bench: Bench) -> None:
    receipt = bench.commit(bench.ticket((0, 20), (1, 21), (2, 22), (3, 23)).ticket)
    assert receipt.pages_freed == 1, "group 0 held nothing else"


def test_a_move_whose_session_ended_is_dropped(bench: Bench) -> None:
    ticket = bench.ticket((0, 20), (5, 21))
    bench.pool.free(IDLE)
    assert bench.states(5) == [BlockState.MOVING], "a block under transfer is not freed"
    receipt = bench.commit(ticket.ticket)
    assert receipt.detail == "1 moved, 1 dropped"
    assert bench.states(21) == [BlockState.FREE]
    bench.arena.boundary(2)
    assert bench.states(5) == [BlockState.FREE]
    bench.pool.check()


def test_a_partial_block_of_a_session_that_came_back_is_dropped_and_its_full_ones_move(bench: Bench) -> None:
    ticket = bench.ticket((5, 20), (7, 21))
    bench.pool.resume(IDLE)  # block 7 is its partial last one and may be written from now on
    assert bench.states(5, 7) == [BlockState.MOVING] * 2, "they stay in transfer until the ticket ends"
    assert bench.commit(ticket.ticket).detail == "1 moved, 1 dropped"
    assert bench.pool.table(IDLE).tolist() == [20, 6, 7]
    assert bench.states(20, 7) == [BlockState.LIVE] * 2
    bench.pool.check()


@pytest.mark.parametrize(
    ("moves", "reason", "number"),
    [
        (((4, 20),), "malformed", ("block", 4)),
        (((0, 20), (0, 21)), "malformed", ("count", 2)),
        (((0, 20), (1, 20)), "malformed", ("count", 2)),
        (((0, 1),), "malformed", ("block", 1)),
        (((20, 21),), "malformed", ("block", 20)),
        (((0, 0),), "malformed", ("count", 1)),
        (((0, 24),), "malformed", ("block", 0)),
        (((-1, 20),), "malformed", ("count", 1)),
        (((0, 20), (2**63, 21)), "malformed", ("count", 2)),
    ],
    ids=(
        "block being written", "source twice", "destination twice", "destination in use", "free source", "onto itself",
        "beyond the arena", "negative", "beyond 64 bits",
    ),
)  # fmt: skip
def test_bad_moves_are_refused_with_numbers_and_change_nothing(
    bench: Bench, moves: tuple[tuple[int, int], ...], reason: str, number: tuple[str, int]
) -> None:
    before = bench.image()
    said = bench.prepare(*moves)
    assert isinstance(said, Failure), said
    assert said.reason == reason
    assert said.numbers[number[0]] == number[1], said
    assert bench.image() == before
    assert bench.arena.open_ticket is None


def test_one_ticket_at_a_time_and_the_refusal_names_it(bench: Bench) -> None:
    first = bench.ticket((0, 20))
    before = bench.image()
    said = bench.prepare((0, 21))
    assert isinstance(said, Failure)
    assert (said.reason, said.numbers["ticket"], said.numbers["lease_ns"]) == ("busy", first.ticket, LEASE_NS)
    assert bench.image() == before


def test_a_repeated_request_is_the_same_request(bench: Bench) -> None:
    first = bench.prepare((0, 20), action_id="a")
    assert bench.prepare((0, 20), action_id="a") == first, "the answer was lost, the caller asks again"
    assert isinstance(bench.prepare((1, 21), action_id="a"), Failure), "other moves are another request"
    receipt = bench.commit(FIRST)
    assert bench.arena.commit(FIRST, 1) == receipt
    assert bench.arena.receipt("a") == receipt
    assert bench.pool.table(RUNNING).tolist() == [20, 1, 2, 3, 4], "moved once"


def test_tickets_that_are_unknown_or_over_are_refused_with_numbers(bench: Bench) -> None:
    done = bench.ticket((0, 20)).ticket
    bench.commit(done)
    given_up = bench.ticket((1, 21)).ticket
    assert isinstance(bench.arena.abort(given_up, 1), Receipt)
    before = bench.image()
    for number, ask in (
        (5, bench.arena.commit),
        (5, bench.arena.abort),
        (given_up, bench.arena.commit),
        (done, bench.arena.abort),
    ):
        said = ask(number, 1)
        assert isinstance(said, Failure)
        assert said.reason == "unknown_ticket"
        assert said.numbers == {"ticket": number, "newest": given_up, "open": 0}
    assert bench.image() == before
    assert isinstance(bench.arena.receipt("never"), Failure)


def test_a_ticket_ends_at_its_lease(bench: Bench) -> None:
    ticket = bench.ticket((0, 20)).ticket
    bench.arena.boundary(LEASE_NS - 1)
    assert bench.arena.open_ticket is not None
    bench.arena.boundary(LEASE_NS)
    assert bench.arena.open_ticket is None
    assert bench.states(0) == [BlockState.LIVE]
    assert bench.pool.table(RUNNING).tolist() == [0, 1, 2, 3, 4]
    bench.arena.boundary(LEASE_NS + 1)
    assert bench.states(20) == [BlockState.FREE]
    said = bench.arena.commit(ticket, LEASE_NS)
    assert isinstance(said, Failure)
    assert said.reason == "unknown_ticket"
    late = bench.prepare((0, 20), now_ns=LEASE_NS)
    assert isinstance(late, Failure)
    assert (late.reason, late.numbers) == ("late", {"now_ns": LEASE_NS, "lease_ns": LEASE_NS})


def test_blocks_are_nobody_elses_while_the_copier_of_a_lapsed_ticket_still_writes(bench: Bench) -> None:
    ticket = bench.ticket((0, 20)).ticket
    bench.copier.inside = True
    for now_ns in range(LEASE_NS, LEASE_NS + 10):
        bench.arena.boundary(now_ns)
        assert bench.states(0, 20) == [BlockState.LIVE, BlockState.QUARANTINED], "it may be written at any moment"
    said = bench.prepare((1, 21), now_ns=LEASE_NS - 1)
    assert isinstance(said, Failure)
    assert said.reason == "busy"
    bench.copier.inside = False
    bench.arena.boundary(LEASE_NS + 10)
    bench.arena.boundary(LEASE_NS + 11)
    assert bench.states(20) == [BlockState.FREE]
    assert bench.arena.figures.fenced == 1
    assert isinstance(bench.arena.commit(ticket, 0), Failure)
    bench.pool.check()


def test_a_commit_while_somebody_copies_is_refused(bench: Bench) -> None:
    ticket = bench.ticket((0, 20)).ticket
    bench.copier.inside = True
    said = bench.arena.commit(ticket, 1)
    assert isinstance(said, Failure)
    assert said.reason == "busy"
    bench.copier.inside = False
    bench.commit(ticket)


def test_bytes_that_differ_are_found_before_the_swap_where_that_is_asked_for() -> None:
    bench = Bench()
    view = np.arange(GEOMETRY.arena_bytes, dtype=np.uint64).astype(np.uint8).reshape(GEOMETRY.blocks, -1)
    view[:, 0] = np.arange(GEOMETRY.blocks)
    arena = EngineArena(
        bench.pool,
        first_ticket=1,
        plan=no_plan,
        base=base,
        same=lambda moves: (view[moves[:, 0]] == view[moves[:, 1]]).all(axis=1),
        copy=lambda moves: view.__setitem__(moves[:, 1], view[moves[:, 0]]),
    )
    assert isinstance(arena.prepare(Prepare((Move(0, 20), Move(5, 21)), 0, LEASE_NS), 0), Ticket)
    said = arena.commit(1, 1)
    assert isinstance(said, Failure)
    assert (said.reason, said.numbers["differing"], said.numbers["moves"]) == ("busy", 2, 2)
    assert isinstance(arena.copy(1, 1), Receipt), "the engine's own mover"
    assert arena.commit(1, 1) is None
    assert arena.boundary(1)[0][1].compacted_bytes == 128


def test_an_engine_without_a_mover_says_so(bench: Bench) -> None:
    said = bench.arena.copy(bench.ticket((0, 20)).ticket, 1)
    assert isinstance(said, Failure)
    assert said.reason == "unsupported"


def test_any_history_leaves_the_pool_whole() -> None:
    """1,000 random requests, many of them wrong: what is refused changes nothing, and nothing is ever lost."""
    rng = np.random.default_rng(3)
    bench = Bench()
    refused = accepted = 0
    for now_ns in range(1000):
        before, lapsed = bench.image(), bench.arena.figures.lapsed
        open_ticket = bench.arena.open_ticket
        number = open_ticket.ticket if open_ticket and rng.random() < 0.7 else FIRST + int(rng.integers(-1, 3))
        said: object = None
        match int(rng.integers(6)):
            case 0 | 1:
                pairs = rng.integers(-1, 25, (int(rng.integers(1, 4)), 2))
                if rng.random() < 0.5:
                    pairs[:, 0] = rng.choice(np.flatnonzero(bench.pool.movable()), len(pairs))
                    pairs[:, 1] = rng.choice(np.flatnonzero(bench.pool.holes()), len(pairs))
                moves = tuple(Move(int(source), int(into)) for source, into in pairs)
                said = bench.arena.prepare(Prepare(moves, 0, now_ns + int(rng.integers(0, 20))), now_ns)
            case 2:
                said = bench.arena.commit(number, now_ns)
            case 3:
                said = bench.arena.abort(number, now_ns)
            case 4:
                bench.copier.inside = bool(rng.random() < 0.3)
            case _:
                bench.arena.boundary(now_ns)
        if isinstance(said, Failure) and bench.arena.figures.lapsed == lapsed:
            assert bench.image() == before
            refused += said.reason == "malformed"
        accepted += isinstance(said, Ticket)
        if now_ns % 10 == 0:
            bench.pool.check()
        assert len({*bench.pool.table(RUNNING).tolist(), *bench.pool.table(IDLE).tolist()}) == 8
    assert refused > 50, "the history tried too little that is wrong"
    assert accepted > 50, "the history tried too little that is right"
    assert bench.arena.figures.committed > 10
