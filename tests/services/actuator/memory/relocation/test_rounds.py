"""An engine in a process of its own keeps writing, freeing, resting and resuming while its blocks are moved."""

from __future__ import annotations

import os
import statistics
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from schemas.engine import Description, Move
from services.actuator.engines.protocol import SocketEngine
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.relocation import Relocator
from services.errors import EngineRefused

from .actuator_process import BUDGET_BYTES
from .processes import Child, EngineProcess, assert_served_right, connect, relocator

ROUNDS = int(os.environ.get("TIDEGATE_RELOCATION_ROUNDS", "1000"))
"""The full count of the issue is 10,000: 336 s on two cores at a load of 10, 90 s of CPU."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One for all tests here: nothing that they do may harm it, but for the last one."""
    process = EngineProcess(tmp_path_factory.mktemp("rounds") / "0-w0.sock", "--seed", "1")
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture
async def engine(process: EngineProcess) -> AsyncIterator[SocketEngine]:
    engine = connect(process.path)
    yield engine
    await engine.close()


class Forgetful:
    """An attachment that says it copied and did not."""

    geometry = Geometry(4096, 16, 32)

    def copy(self, ticket: int, moves: NDArray[np.int64], asked_by: str = "") -> Transfer:
        return Transfer("move", asked_by, 0, 0, "none", 0.0)

    def close(self) -> None:
        return None


def forget(said: Description) -> Forgetful:
    return Forgetful()


@pytest.mark.timeout(60 + ROUNDS)
async def test_every_byte_is_right_after_many_rounds(process: EngineProcess, engine: SocketEngine) -> None:
    moving = relocator(engine)
    rng = np.random.default_rng(0)
    rounds = moved_bytes = 0
    pauses_us, refusals = [], []
    while rounds < ROUNDS:
        if rng.random() < 0.05:  # a plan by guess: most are wrong, none may do harm
            guess = tuple(Move(int(source), int(into)) for source, into in rng.integers(-2, 520, (3, 2)))
            try:
                done = await moving.relocate(guess)
            except EngineRefused as error:
                refusals.append((error.reason, error.numbers["count"] >= 1))
                continue
        else:
            done = await moving.relocate(budget_bytes=BUDGET_BYTES, action_id=f"round {rounds}")
        if done is None:
            continue
        assert done.receipt is not None
        rounds += 1
        moved_bytes += done.receipt.compacted_bytes
        pauses_us.append(done.receipt.pause_us)
        if rounds % 100 == 0:
            assert_served_right(process.report())
    moving.close()
    report = process.report()
    assert_served_right(report)
    assert len(refusals) > ROUNDS // 100, "the guesses were to be refused"
    assert set(refusals) == {("malformed", True)}
    figures = report.relocation
    assert moved_bytes == figures.moved * 4096, "receipts and the engine's own count agree"
    assert figures.committed == rounds
    assert figures.dropped > 0, "no session ended under transfer: the epoch check was not tried"
    assert (figures.aborted, figures.lapsed, report.open_ticket) == (0, 0, 0)
    sessions = report.sessions
    assert min(sessions.freed, sessions.idled, sessions.resumed) > ROUNDS // 50, "the engine did not live meanwhile"
    assert report.iterations_with_ticket > ROUNDS, "the engine went on while blocks were under transfer"
    assert min(pauses_us) > 0, "every receipt tells its pause"
    print(  # noqa: T201
        f"{rounds} rounds, {figures.moved} moved, {figures.dropped} dropped, {sessions.checked_blocks} blocks read; "
        f"pause p50 {statistics.median(pauses_us):.0f} us, p99 {np.quantile(pauses_us, 0.99):.0f} us, "
        f"longest {max(pauses_us):.0f} us; iteration {report.mean_with_ticket_us:.0f} us with a ticket open, "
        f"{report.mean_without_ticket_us:.0f} us without"
    )


async def test_nothing_waits_for_a_copy_that_takes_its_time(process: EngineProcess) -> None:
    before = process.report()
    slow = Child(Child.ACTUATOR, str(process.path), "copying", "600")
    try:
        assert slow.line() == "copying"
        first = last = process.report()
        while last.sessions.freed < first.sessions.freed + 5 or last.sessions.resumed < first.sessions.resumed + 5:
            last = process.report()
            assert last.open_ticket, "the copy is under way"
        assert last.iterations_with_ticket > first.iterations_with_ticket
        assert last.relocation.committed == before.relocation.committed
        assert slow.ask("go on") == "committed"
    finally:
        slow.kill()
    assert_served_right(process.report())


async def test_negative_control_without_copying_the_checksums_fail(
    process: EngineProcess, engine: SocketEngine
) -> None:
    assert_served_right(process.report())
    moving = Relocator(engine, forget)
    while await moving.relocate(budget_bytes=BUDGET_BYTES) is None:
        pass
    report = process.report()
    assert report.sessions.wrong_blocks > 0, "tables point at blocks that nobody filled: the checks see nothing"
