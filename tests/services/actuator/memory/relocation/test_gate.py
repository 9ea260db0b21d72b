"""The gate of a shared arena: only the open ticket is copied, and nobody is shut out while he copies."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.actuator.memory.errors import SegmentGone, UnknownTicket
from services.actuator.memory.gate import Gate, GateKeeper

TICKET = 7


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[GateKeeper]:
    keeper = GateKeeper.create(tmp_path / "gate")
    yield keeper
    keeper.remove()


@pytest.fixture
def gate(keeper: GateKeeper) -> Iterator[Gate]:
    gate = Gate.attach(keeper.path)
    yield gate
    gate.close()


def test_only_the_open_ticket_passes(keeper: GateKeeper, gate: Gate) -> None:
    keeper.open(TICKET)
    with gate.passage(TICKET):
        pass
    with pytest.raises(UnknownTicket) as caught, gate.passage(TICKET - 1):
        pytest.fail("a ticket that is not the open one was let through")
    assert (caught.value.number, caught.value.newest) == (TICKET - 1, TICKET)


def test_nobody_passes_a_closed_gate(keeper: GateKeeper, gate: Gate) -> None:
    for number in (TICKET, 0):
        with pytest.raises(UnknownTicket), gate.passage(number):
            pytest.fail("a closed gate let somebody through")


def test_it_does_not_close_while_somebody_copies_and_never_waits(keeper: GateKeeper, gate: Gate) -> None:
    keeper.open(TICKET)
    with gate.passage(TICKET):
        assert not keeper.close(), "the blocks would be given to others while they are written"
    assert keeper.close()
    with pytest.raises(UnknownTicket), gate.passage(TICKET):
        pytest.fail("the copier came back after the gate was closed")


def test_an_engine_that_stopped_while_closing_the_gate_keeps_nobody_waiting(keeper: GateKeeper, gate: Gate) -> None:
    keeper.open(TICKET)
    with keeper.path.open() as closing:
        fcntl.flock(closing, fcntl.LOCK_EX)
        with pytest.raises(UnknownTicket), gate.passage(TICKET):
            pytest.fail("the ticket was ending")


def test_a_killed_copier_holds_nothing(keeper: GateKeeper) -> None:
    keeper.open(TICKET)
    code = (
        "import sys, pathlib; from services.actuator.memory.gate import Gate\n"
        f"with Gate.attach(pathlib.Path(sys.argv[1])).passage({TICKET}):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(keeper.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as copier:
        assert copier.stdout is not None
        assert copier.stdout.readline() == b"in\n"
        assert not keeper.close(), "it is copying"
        copier.kill()
        copier.wait()
        assert keeper.close(), "the kernel gives the lock back with the process"


def test_a_gate_that_is_gone_or_cut_short_is_told_with_numbers(keeper: GateKeeper, gate: Gate, tmp_path: Path) -> None:
    with pytest.raises(SegmentGone):
        Gate.attach(tmp_path / "none")
    os.truncate(keeper.path, 3)
    with pytest.raises(SegmentGone) as caught, gate.passage(TICKET):
        pytest.fail("half a number was read as a ticket")
    assert (caught.value.found, caught.value.expected) == (3, 8)


def test_a_new_life_replaces_what_a_dead_engine_left(keeper: GateKeeper, gate: Gate) -> None:
    keeper.open(TICKET)
    again = GateKeeper.create(keeper.path)
    again.open(TICKET + 1)
    fresh = Gate.attach(keeper.path)
    with fresh.passage(TICKET + 1):
        assert keeper.close(), "locks of the old file say nothing about the new one"
    fresh.close()
    again.remove()
