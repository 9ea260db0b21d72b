"""The actuator's end: what a ticket may do next, plans that must not be copied, and engines of every kind."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.engine import Description, Move, Prepare, Receipt, Ticket
from services.actuator.engines.loopback import LoopbackEngine
from services.actuator.memory.errors import BadGeometry, BadMoves, IllegalTransition, SegmentGone, UnknownTicket
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.relocation import Relocation, Relocator
from services.errors import EngineRefused, EngineUnreachable

GEOMETRY = Geometry(block_bytes=2 << 20, blocks_per_group=64, groups=4)
RECEIPT = Receipt("a", True, 0, 1.0, 0, 0, 0, 0)


def ticket(*moves: tuple[int, int], said: int | None = None) -> Ticket:
    return Ticket(9, len(moves) if said is None else said, 0, tuple(Move(*move) for move in moves))


class FakeEngine(LoopbackEngine):
    """Answers prepare with the ticket it was given, and writes down what it is asked."""

    def __init__(self, answer: Ticket, handle: str = "arena") -> None:
        super().__init__("n0/0/w0")
        self.asked: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.connection = 1
        self.late_until_ns = 0
        self.described: Description | None = None
        self._answer = answer
        self._handle = handle

    async def describe(self) -> Description:
        self._ask("describe")
        return self.described or msgspec.structs.replace(await super().describe(), handle=self._handle)

    async def prepare(self, command: Prepare) -> Ticket:
        self._ask(f"prepare until {command.lease_ns}")
        if command.lease_ns <= self.late_until_ns:
            self.t_ns = self.late_until_ns
            raise EngineRefused(self.worker, "late")
        return self._answer

    async def copy(self, ticket: int) -> Receipt:
        self._ask(f"copy {ticket}")
        return RECEIPT

    async def commit(self, ticket: int) -> Receipt:
        self._ask(f"commit {ticket}")
        return RECEIPT

    async def abort(self, ticket: int) -> Receipt:
        self._ask(f"abort {ticket}")
        return RECEIPT

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        error = self.failing.get(what.split()[0])
        if error is not None:
            raise error


class FakeAttachment:
    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        self.geometry = geometry
        self.copied: list[list[list[int]]] = []
        self.error: Exception | None = None
        self.closed = 0

    def copy(self, ticket: int, moves: NDArray[np.int64], asked_by: str = "") -> Transfer:
        if self.error is not None:
            raise self.error
        self.copied.append(moves.tolist())
        return Transfer("move", asked_by, moves.shape[0] * self.geometry.block_bytes, moves.shape[0], "fake", 0.5)

    def close(self) -> None:
        self.closed += 1


def test_a_ticket_goes_one_way_only() -> None:
    one = Relocation(ticket((0, 70)), GEOMETRY)
    with pytest.raises(IllegalTransition) as caught:
        one.committed(RECEIPT)
    assert (caught.value.number, caught.value.found) == (9, "prepared"), "tables would point at bytes never copied"
    one.copied(0.1)
    one.committed(RECEIPT)
    steps: tuple[Callable[[], None], ...] = (one.aborted, lambda: one.copied(0.1), lambda: one.committed(RECEIPT))
    for step in steps:
        with pytest.raises(IllegalTransition):
            step()
    assert one.stage == "committed"


@pytest.mark.parametrize(
    ("bad", "error", "numbers"),
    [
        (ticket((0, 70), (0, 71)), BadMoves, {"count": 1, "index": 0, "block": 0}),
        (ticket((1, 70), (2, 70)), BadMoves, {"count": 1, "index": 0, "block": 70}),
        (ticket((1, 70), (70, 71)), BadMoves, {"count": 1, "index": 0, "block": 70}),
        (ticket((1, 256)), BadGeometry, {"found": 256}),
        (ticket((-1, 70)), BadGeometry, {"found": -1}),
        (ticket((1, 70), said=2), BadMoves, {"count": 1}),
        (ticket((2**63, 70)), BadMoves, {"count": 1}),
    ],
    ids=("source twice", "destination twice", "chain", "beyond the arena", "negative", "another number", "huge"),
)
async def test_a_plan_that_cannot_be_copied_is_given_up(
    bad: Ticket, error: type[Exception], numbers: dict[str, int]
) -> None:
    engine, attachment = FakeEngine(bad), FakeAttachment()
    with pytest.raises(error) as caught:
        await Relocator(engine, lambda said: attachment).relocate(budget_bytes=1)
    assert {name: getattr(caught.value, name) for name in numbers} == numbers
    assert attachment.copied == []
    assert engine.asked[-1] == "abort 9"


async def test_prepare_copy_commit() -> None:
    engine, attachment = FakeEngine(ticket((0, 70), (3, 71))), FakeAttachment()
    moving = Relocator(engine, lambda said: attachment)
    for _ in range(2):
        done = await moving.relocate(budget_bytes=1, lease_s=2.0)
        assert done is not None
        assert (done.stage, done.receipt) == ("committed", RECEIPT)
    once = ["prepare until 2000000000", "commit 9"]
    assert engine.asked == ["describe", *once, *once], "the arena is opened once, the lease is by the engine's clock"
    assert attachment.copied == [[[0, 70], [3, 71]]] * 2


async def test_a_lease_on_the_engines_clock_is_taken_as_it_is_and_the_transfer_is_kept() -> None:
    engine = FakeEngine(ticket((0, 70), (3, 71)))
    moving = Relocator(engine, lambda said: FakeAttachment())
    done = await moving.relocate(budget_bytes=1, action_id="a", lease_ns=7)
    assert done is not None
    assert engine.asked[1] == "prepare until 7"
    assert done.transfer == Transfer("move", "a", 4 << 20, 2, "fake", 0.5)
    engine.late_until_ns = 60_000_000_000
    with pytest.raises(EngineRefused, match="late"):
        await moving.relocate(budget_bytes=1, lease_ns=7)
    assert engine.asked.count("prepare until 7") == 2, "no lease but the command's"


async def test_a_clock_heard_of_long_ago_is_not_trusted_with_a_lease() -> None:
    engine = FakeEngine(ticket((0, 70)))
    engine.late_until_ns = 60_000_000_000
    done = await Relocator(engine, lambda said: FakeAttachment()).relocate(budget_bytes=1, lease_s=2.0)
    assert done is not None
    assert engine.asked[1:3] == ["prepare until 2000000000", "prepare until 62000000000"]


async def test_nothing_to_gain_needs_no_commit() -> None:
    engine = FakeEngine(Ticket(0, 0, 0))
    assert await Relocator(engine, lambda said: FakeAttachment()).relocate(budget_bytes=1) is None
    assert engine.asked[1:] == ["prepare until 6000000000"]


async def test_an_engine_without_an_arena_copies_itself() -> None:
    engine = FakeEngine(ticket(said=5), handle="")
    done = await Relocator(engine, lambda said: pytest.fail("there is nothing to attach")).relocate(budget_bytes=1)
    assert done is not None
    assert engine.asked[-2:] == ["copy 9", "commit 9"]


@pytest.mark.parametrize("error", [UnknownTicket(9, 10, 1), EngineRefused("n0/0/w0", "busy")])
async def test_what_fails_after_prepare_is_given_up_and_told(error: Exception) -> None:
    engine, attachment = FakeEngine(ticket((0, 70))), FakeAttachment()
    if isinstance(error, UnknownTicket):
        attachment.error = error
    else:
        engine.failing["commit"] = error
    with pytest.raises(type(error)):
        await Relocator(engine, lambda said: attachment).relocate(budget_bytes=1)
    assert engine.asked[-1] == "abort 9"


async def test_an_engine_that_died_is_not_asked_to_answer_an_abort() -> None:
    engine = FakeEngine(ticket((0, 70)))
    gone = EngineUnreachable("n0/0/w0", "connection closed")
    engine.failing.update(commit=gone, abort=gone)
    with pytest.raises(EngineUnreachable):
        await Relocator(engine, lambda said: FakeAttachment()).relocate(budget_bytes=1)


async def test_another_life_of_the_engine_has_another_arena() -> None:
    engine, attached = FakeEngine(ticket((0, 70))), []

    def attach(said: Description) -> FakeAttachment:
        attached.append(FakeAttachment())
        return attached[-1]

    moving = Relocator(engine, attach)
    await moving.relocate(budget_bytes=1)
    engine.connection += 1
    await moving.relocate(budget_bytes=1)
    assert [one.closed for one in attached] == [1, 0]
    assert [len(one.copied) for one in attached] == [1, 1]


async def test_an_arena_that_is_cut_otherwise_than_described_is_not_used() -> None:
    attachment = FakeAttachment(Geometry(4096, 64, 4))
    with pytest.raises(BadGeometry) as caught:
        await Relocator(FakeEngine(ticket((0, 70))), lambda said: attachment).relocate(budget_bytes=1)
    assert (caught.value.found, attachment.closed) == (4096, 1)


async def test_a_scaled_down_arena_is_cut_as_the_model_is() -> None:
    engine = FakeEngine(ticket((0, 70)))
    plain = await LoopbackEngine("n0/0/w0").describe()  # blocks of 2 MiB, groups of 128 MiB
    engine.described = msgspec.structs.replace(plain, handle="arena", arena_scale=512)
    moving = Relocator(engine, lambda said: FakeAttachment(Geometry(4096, 64, 4)))
    done = await moving.relocate(budget_bytes=1)
    assert done is not None
    assert moving.scale == 512
    for cut, found in ((Geometry(2048, 64, 4), 2048), (Geometry(4096, 32, 4), 4096 * 32)):
        with pytest.raises(BadGeometry, match="at a scale of 512") as caught:
            await Relocator(engine, lambda said, cut=cut: FakeAttachment(cut)).relocate(budget_bytes=1)
        assert caught.value.found == found
    engine.described = msgspec.structs.replace(plain, handle="arena", arena_scale=0)
    with pytest.raises(BadGeometry, match="arena_scale"):
        await Relocator(engine, lambda said: FakeAttachment()).relocate(budget_bytes=1)


async def test_an_arena_that_vanished_is_looked_for_anew() -> None:
    engine, attached = FakeEngine(ticket((0, 70))), []

    def attach(said: Description) -> FakeAttachment:
        attached.append(FakeAttachment())
        return attached[-1]

    moving = Relocator(engine, attach)
    await moving.relocate(budget_bytes=1)
    attached[0].error = SegmentGone("arena", 0, 1)
    with pytest.raises(SegmentGone):
        await moving.relocate(budget_bytes=1)
    assert (engine.asked[-1], attached[0].closed) == ("abort 9", 1)
    await moving.relocate(budget_bytes=1)
    assert len(attached) == 2
