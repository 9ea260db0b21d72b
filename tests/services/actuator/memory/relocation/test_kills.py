"""Either process is killed in the middle: the other goes on, nothing dangles, nothing is lost or served wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.engine import SetQuota
from services.actuator.memory.attachment import SharedAttachment, gate_path
from services.actuator.memory.errors import SegmentGone
from services.actuator.memory.relocation import Relocation, Relocator
from services.actuator.memory.segment import HEADER_BYTES
from services.errors import EngineRefused, EngineUnreachable

from .actuator_process import BUDGET_BYTES
from .processes import Child, EngineProcess, assert_served_right, connect, relocator

LEASE_S = 0.3
SEGMENT_BYTES = 32 * 16 * 4096 + HEADER_BYTES


@pytest.fixture(scope="module")
def survivor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """The engine of all tests that kill actuators only: one after the other dies on it."""
    process = EngineProcess(tmp_path_factory.mktemp("survivor") / "0-w0.sock", "--seed", "2")
    try:
        process.start()
        yield process
    finally:
        process.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[EngineProcess]:
    """An engine that the test may kill."""
    process = EngineProcess(tmp_path / "0-w0.sock", "--seed", "3")
    try:
        process.start()
        yield process
    finally:
        process.close()


async def prepared(moving: Relocator) -> Relocation:
    while True:
        relocation = await moving.prepare(budget_bytes=BUDGET_BYTES)
        if relocation is not None:
            return relocation


async def rounds(process: EngineProcess, count: int) -> None:
    """A new actuator relocates, and everything is served right."""
    engine = connect(process.path)
    moving = relocator(engine)
    done = 0
    while done < count:
        done += await moving.relocate(budget_bytes=BUDGET_BYTES) is not None
    moving.close()
    await engine.close()
    assert_served_right(process.report())


def lapse(process: EngineProcess) -> None:
    """Wait until the engine has no ticket open."""
    while process.report().open_ticket:
        pass


@pytest.mark.parametrize("stage", ["prepared", "copying"])
async def test_a_killed_actuator_leaves_nothing_behind(survivor: EngineProcess, stage: str) -> None:
    before = survivor.report().relocation
    actuator = Child(Child.ACTUATOR, str(survivor.path), stage, str(LEASE_S))
    assert actuator.line() == stage
    actuator.kill()
    lapse(survivor)
    report = survivor.report()
    assert_served_right(report)
    assert report.relocation.lapsed == before.lapsed + 1
    assert report.relocation.committed == before.committed
    await rounds(survivor, 20)  # with a ticket left dangling the first prepare would be refused


async def test_a_restarted_actuator_may_end_the_ticket_of_its_earlier_life(survivor: EngineProcess) -> None:
    actuator = Child(Child.ACTUATOR, str(survivor.path), "copied", "600")
    assert actuator.line() == "copied"
    actuator.kill()
    engine = connect(survivor.path)
    moving = relocator(engine)
    with pytest.raises(EngineRefused) as caught:
        await moving.relocate(budget_bytes=BUDGET_BYTES)
    assert caught.value.reason == "busy"
    await engine.abort(int(caught.value.numbers["ticket"]))
    moving.close()
    await engine.close()
    await rounds(survivor, 20)


async def test_an_actuator_that_slept_past_its_lease_writes_into_nobodys_blocks(survivor: EngineProcess) -> None:
    first = last = survivor.report()
    actuator = Child(Child.ACTUATOR, str(survivor.path), "copying", str(LEASE_S))
    try:
        assert actuator.line() == "copying"
        actuator.send(signal.SIGSTOP)
        while last.relocation.fenced == first.relocation.fenced or last.sessions.turns < first.sessions.turns + 30:
            last = survivor.report()
        assert last.open_ticket, "its lease is over, its copy is not: its blocks are not for others"
        actuator.send(signal.SIGCONT)
        assert actuator.ask("go on") == "EngineRefused", "a lapsed ticket is not committed"
        lapse(survivor)
        report = survivor.report()
        assert_served_right(report)
        assert report.relocation.committed == first.relocation.committed
    finally:
        actuator.kill()
    await rounds(survivor, 20)


@pytest.mark.parametrize("stage", ["prepared", "copied"])
async def test_a_killed_engine_is_told_and_its_next_life_is_found(process: EngineProcess, stage: str) -> None:
    engine = connect(process.path)
    moving = relocator(engine)
    relocation = await prepared(moving)
    if stage == "copied":
        await moving.copy(relocation)
    said = await engine.describe()
    process.kill()
    with pytest.raises(SegmentGone) as gone:
        SharedAttachment.open(said)
    assert (gone.value.found, gone.value.expected) == (SEGMENT_BYTES,) * 2, "it is whole, but its maker is dead"
    if stage == "prepared":
        with pytest.raises(SegmentGone):
            await moving.copy(relocation)
    else:
        with pytest.raises(EngineUnreachable):
            await moving.commit(relocation)
    with pytest.raises(EngineUnreachable):
        await moving.relocate(budget_bytes=BUDGET_BYTES)
    process.start()
    with pytest.raises(EngineRefused) as caught:
        await engine.commit(relocation.ticket.ticket)
    assert caught.value.reason == "unknown_ticket", "the new life has not heard of it and gives out other numbers"
    assert caught.value.numbers["ticket"] == relocation.ticket.ticket
    done = 0
    while done < 20:
        done += await moving.relocate(budget_bytes=BUDGET_BYTES) is not None
    moving.close()
    await engine.close()
    assert_served_right(process.report())


async def test_a_segment_that_was_cut_short_is_not_touched(process: EngineProcess) -> None:
    assert process.child is not None
    engine = connect(process.path)
    moving = relocator(engine)
    relocation = await prepared(moving)
    process.child.send(signal.SIGSTOP)  # the engine itself could not survive it
    os.truncate(process.segment, 8192)
    with pytest.raises(SegmentGone) as caught:
        await moving.copy(relocation)
    assert (caught.value.found, caught.value.expected) == (8192, SEGMENT_BYTES)
    assert relocation.stage == "prepared"
    moving.close()
    await engine.close()


async def test_a_gate_that_vanished_is_told(survivor: EngineProcess) -> None:
    engine = connect(survivor.path)
    path = gate_path(survivor.arena)
    path.rename(path.with_suffix(".away"))
    with pytest.raises(SegmentGone):
        await relocator(engine).relocate(budget_bytes=BUDGET_BYTES)
    path.with_suffix(".away").rename(path)
    await engine.close()
    assert_served_right(survivor.report())


async def test_a_command_on_an_older_generation_changes_nothing(survivor: EngineProcess) -> None:
    engine = connect(survivor.path)
    group_bytes = 16 * 4096
    receipt = await engine.set_quota(SetQuota(1, 0, "a", 1.0, 0, 30 * group_bytes, 8, 0, 0, 0))
    assert receipt.generation == 1
    with pytest.raises(EngineRefused) as caught:
        await engine.set_quota(SetQuota(1, 0, "b", 1.0, 0, 20 * group_bytes, 8, 0, 0, 0))
    assert (caught.value.reason, caught.value.numbers) == ("stale_generation", {"found": 0, "current": 1})
    assert (await engine.snapshot()).quota_hard_bytes == 30 * group_bytes
    await engine.close()
