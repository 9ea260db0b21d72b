"""The node's bytes follow the fleet's tables, and what is mixed up or lost is found. Real fleet, real shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from loadgen.load import tables_at
from loadgen.node import memory
from loadgen.node.emulation import Emulation
from loadgen.node.memory import NodeMemory, scale_for
from loadgen.requests import RequestTable
from loadgen.workload import builtin
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Evict,
    Failure,
    Prefetch,
    Prepare,
    Receipt,
    Reply,
    Snapshot,
    Ticket,
    frame,
)
from schemas.identity import STEP_NS
from schemas.metrics import COLUMN
from services.actuator.memory.attachment import SharedAttachment
from services.actuator.memory.errors import SegmentGone, UnknownTicket
from services.actuator.memory.tickets import moves_of

WORKERS = ("n0/0/w0", "n0/0/w1")
W0 = WORKERS[0]
BUDGET = 4 << 30


@pytest.fixture(scope="module")
def tables() -> list[RequestTable]:
    return tables_at(builtin("agent", duration_s=300.0, seed=3).within_context(131_072), 0.8, 2, 300.0, 3)


@pytest.fixture
def engines(tables: list[RequestTable], tmp_path: Path) -> Iterator[Emulation]:
    config = FleetConfig(workers_per_card=2)
    config = msgspec.structs.replace(config, mode=msgspec.structs.replace(config.mode, prefetch=False))
    fleet = Fleet(config, tables)
    made = Emulation(fleet, WORKERS, (0, 0), config.limits)
    made.memory = memory.create(
        fleet, str(tmp_path), made.base_receipt, made.asker, budget_bytes=8 << 20, folder=tmp_path
    )
    yield made
    made.memory.close()
    assert not list(tmp_path.iterdir()), "a node that stops leaves no segment and no gate"


def bytes_of(engines: Emulation) -> NodeMemory:
    assert engines.memory is not None
    return engines.memory


def describe(engines: Emulation) -> Description:
    said = engines.answer(W0, Describe())
    assert isinstance(said, Description)
    return said


def prepared(engines: Emulation, action: str = "a", steps: int = 3) -> Ticket:
    """A ticket of worker 0, after as many steps as it takes until there is something to gain."""
    for _ in range(60):
        said = engines.answer(W0, Prepare((), BUDGET, engines.t_ns + steps * STEP_NS, action))
        assert isinstance(said, Ticket), said
        if said.moves:
            return said
        engines.advance()
    raise AssertionError("nothing to compact in 60 steps")


def evict_idle(engines: Emulation, worker: str, action: str, most: int = 4) -> tuple[int, ...]:
    idle = engines.answer(worker, Snapshot(idle_listed=1024)).idle
    sessions = tuple(one.session for one in idle[:most])
    if sessions:
        engines.answer(worker, Evict(sessions, 0, action))
    return sessions


def test_the_arena_is_the_models_at_a_power_of_two_that_fits_the_budget(engines: Emulation, tmp_path: Path) -> None:
    said = describe(engines)
    attached = SharedAttachment.open(said, folder=tmp_path)
    assert attached.geometry.block_bytes * said.arena_scale == said.block_bytes
    assert attached.geometry.group_bytes * said.arena_scale == said.page_group_bytes
    assert 2 * attached.geometry.arena_bytes <= 8 << 20 < 4 * attached.geometry.arena_bytes, "no smaller than needed"
    attached.close()


@pytest.mark.parametrize(("budget", "scale"), [(1 << 40, 1), (48 << 20, 4096), (1, 32768)])
def test_the_scale_leaves_whole_cache_lines(budget: int, scale: int) -> None:
    blocks, sizes = np.array([40_960, 40_960]), np.array([2 << 20, 2 << 20])
    assert scale_for(sizes, blocks, budget) == scale


def test_every_block_is_verified_over_a_history_with_everything_in_it(engines: Emulation) -> None:
    for step in range(140):
        for worker in WORKERS:
            if step % 9 == 4:
                evict_idle(engines, worker, f"e{step}")
            away = engines.answer(worker, Snapshot(due_within_s=6.0)).away
            if away:
                engines.answer(worker, Prefetch(tuple(one.session for one in away[:4]), f"p{step}"))
            if step % 5 == 2:
                ticket = engines.answer(worker, Prepare((), BUDGET, engines.t_ns + STEP_NS, f"c{step}"))
                if ticket.moves:
                    engines.answer(worker, Copy(ticket.ticket))
                    assert isinstance(engines.answer(worker, Commit(ticket.ticket)), Receipt)
        engines.advance()
    found = bytes_of(engines).figures()
    assert found["wrong"] == 0
    assert min(found[name] for name in ("moved", "swapped_out", "brought_back")) > 100, found
    assert found["verified"] > found["written"] > 0
    assert found["unseen"] <= 0.05 * found["brought_back"], "nearly every session was seen on the card before it left"


def test_a_full_host_tier_gives_the_room_of_some_to_others_and_the_bytes_follow(
    tables: list[RequestTable], tmp_path: Path
) -> None:
    config = FleetConfig(workers_per_card=2, host_bytes_per_card=20e9)
    mode = msgspec.structs.replace(config.mode, offload=True, prefetch=False)
    fleet = Fleet(msgspec.structs.replace(config, mode=mode), tables)
    made = Emulation(fleet, WORKERS, (0, 0), config.limits)
    made.memory = memory.create(
        fleet, str(tmp_path), made.base_receipt, made.asker, budget_bytes=8 << 20, folder=tmp_path
    )
    least_free = np.inf
    for _ in range(90):
        made.advance()
        free = made.metrics[0, COLUMN["host_capacity_bytes"]] - made.metrics[0, COLUMN["host_used_bytes"]]
        least_free = min(least_free, float(free))
    found = made.memory.figures()
    made.memory.close()
    assert least_free < 0.05 * 20e9, "the tier was full"
    assert found["wrong"] == 0
    assert found["unseen"] <= 0.05 * found["brought_back"], found


def test_one_byte_that_changed_by_itself_is_found(engines: Emulation) -> None:
    for _ in range(10):
        engines.advance()
    arena = bytes_of(engines).workers[0].arena
    block = int(np.flatnonzero(arena.held >= 0)[3])
    values = arena.arena.read(np.array([block]))
    values[0, 17] ^= 1
    arena.arena.write(np.array([block]), values)
    assert bytes_of(engines).figures()["wrong"] == 1


def test_blocks_that_were_swapped_are_found(engines: Emulation) -> None:
    for _ in range(10):
        engines.advance()
    arena = bytes_of(engines).workers[0].arena
    two = np.flatnonzero(arena.held >= 0)[:2]
    arena.arena.write(two, arena.arena.read(two[::-1].copy()))
    assert bytes_of(engines).figures()["wrong"] == 2


def test_a_byte_that_changed_in_the_host_tier_is_found_when_its_session_comes_back(engines: Emulation) -> None:
    sessions: tuple[int, ...] = ()
    for step in range(60):
        engines.advance()
        if step > 10 and not sessions:
            sessions = evict_idle(engines, W0, "e", most=1)
        worker = bytes_of(engines).workers[0]
        entry = worker.arena.tier.account.held(sessions[0]) if sessions else None
        if entry is not None:
            break
    assert entry is not None
    slot = np.array([entry.slots[0]])
    worker.arena.tier.arena.write(slot, worker.arena.tier.arena.read(slot) ^ np.uint8(1))
    for step in range(60):
        engines.answer(W0, Prefetch(sessions, f"p{step}"))
        engines.advance()
        if worker.arena.figures.wrong:
            return
    raise AssertionError("the session came back with a changed byte and nobody noticed")


def test_the_actuators_copy_is_what_a_commit_takes_over(engines: Emulation, tmp_path: Path) -> None:
    attached = SharedAttachment.open(describe(engines), folder=tmp_path)
    ticket = prepared(engines)
    assert isinstance(engines.answer(W0, Commit(ticket.ticket)), Failure), "nothing was copied yet"
    attached.copy(ticket.ticket, moves_of(ticket.plan))
    mapped = describe(engines).mapped_bytes
    done = engines.answer(W0, Commit(ticket.ticket))
    assert isinstance(done, Receipt)
    assert (done.compacted_bytes, done.dropped_moves) == (ticket.bytes, 0)
    assert done.pages_freed > 0
    assert done.mapped_bytes == mapped - done.pages_freed * describe(engines).page_group_bytes, "given back for good"
    assert done.lower_bound_bytes == ticket.lower_bound_bytes > 0
    engines.advance()
    assert bytes_of(engines).figures()["wrong"] == 0
    assert engines.answer(W0, AskReceipt("a")).compacted_bytes == ticket.bytes
    attached.close()


def test_time_may_pass_under_an_open_ticket_and_nothing_is_lost(engines: Emulation, tmp_path: Path) -> None:
    attached = SharedAttachment.open(describe(engines), folder=tmp_path)
    ticket = prepared(engines, steps=5)
    attached.copy(ticket.ticket, moves_of(ticket.plan))
    engines.advance()
    engines.advance()
    done = engines.answer(W0, Commit(ticket.ticket))
    if isinstance(done, Failure):  # a source was written anew: what was copied of it is not what is there now
        assert done.reason == "busy"
    else:
        assert done.compacted_bytes + done.dropped_moves * describe(engines).block_bytes == ticket.bytes
    for _ in range(3):
        engines.advance()
    assert bytes_of(engines).figures()["wrong"] == 0
    attached.close()


def test_an_actuator_that_died_after_prepare_costs_a_lease_and_nothing_else(engines: Emulation) -> None:
    ticket = prepared(engines, steps=2)
    assert engines.fleet.snapshot(0).blocks_reserved == ticket.moves  # type: ignore[attr-defined]
    assert engines.answer(W0, Prepare((), BUDGET, engines.t_ns + STEP_NS, "b")).reason == "busy"
    engines.advance()
    engines.advance()
    assert engines.fleet.snapshot(0).blocks_reserved == 0, "its destinations are free again"  # type: ignore[attr-defined]
    assert engines.answer(W0, Commit(ticket.ticket)).reason == "unknown_ticket"
    assert isinstance(engines.answer(W0, Prepare((), BUDGET, engines.t_ns + STEP_NS, "b")), Ticket)
    assert bytes_of(engines).figures()["wrong"] == 0


def test_a_copier_that_sleeps_past_its_lease_writes_into_nobodys_blocks(engines: Emulation, tmp_path: Path) -> None:
    attached = SharedAttachment.open(describe(engines), folder=tmp_path)
    ticket = prepared(engines, steps=1)
    with attached._gate.passage(ticket.ticket):  # stopped in the middle of its copy
        engines.advance()
        engines.advance()
        assert engines.fleet.snapshot(0).blocks_reserved == ticket.moves, "held while it may still write"  # type: ignore[attr-defined]
        attached._mover.move(attached._arena, moves_of(ticket.plan))
    engines.advance()
    assert engines.fleet.snapshot(0).blocks_reserved == 0  # type: ignore[attr-defined]
    with pytest.raises(UnknownTicket):
        attached.copy(ticket.ticket, moves_of(ticket.plan))
    assert bytes_of(engines).figures()["wrong"] == 0
    attached.close()


def test_a_lease_of_the_worker_that_runs_out_ends_its_ticket(engines: Emulation) -> None:
    ticket = prepared(engines, steps=100)
    worker = bytes_of(engines).workers[0]
    worker.boundary(engines.t_ns, lapsed=True)
    assert worker.relocation.open_ticket is None
    assert engines.answer(W0, Abort(ticket.ticket)).action_id == "a", "given up already: a repeat is no error"


def test_receipts_tell_the_transfers_of_their_action(engines: Emulation) -> None:
    for step in range(60):
        engines.advance()
        if step > 5 and evict_idle(engines, W0, f"e{step}"):
            break
    for _ in range(3):
        engines.advance()
    receipt = engines.answer(W0, AskReceipt(f"e{step}"))
    assert receipt.done
    (moved,) = receipt.moved
    assert (moved.kind, moved.asked_by, moved.scale) == ("out", f"e{step}", bytes_of(engines).scale)
    assert moved.bytes == moved.pieces * describe(engines).block_bytes // moved.scale > 0
    assert moved.seconds > 0
    assert moved.queue_s > 0


def test_without_room_for_shared_memory_the_engine_copies(
    tables: list[RequestTable], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    fleet = Fleet(FleetConfig(workers_per_card=2), tables)
    made = Emulation(fleet, WORKERS, (0, 0))
    made.memory = memory.create(fleet, "x", made.base_receipt, made.asker, budget_bytes=8 << 20, folder=tmp_path)
    assert describe(made).handle == ""
    ticket = prepared(made)
    assert isinstance(made.answer(W0, Copy(ticket.ticket)), Receipt)
    assert made.answer(W0, Commit(ticket.ticket)).compacted_bytes == ticket.bytes
    assert made.memory.figures()["wrong"] == 0


def test_a_node_that_is_gone_is_noticed_before_anything_is_copied(engines: Emulation, tmp_path: Path) -> None:
    attached = SharedAttachment.open(describe(engines), folder=tmp_path)
    ticket = prepared(engines)
    bytes_of(engines).close()
    with pytest.raises(SegmentGone):
        attached.copy(ticket.ticket, moves_of(ticket.plan))
    attached.close()


@pytest.mark.parametrize("harm", ["truncated", "removed"])
def test_a_node_whose_segment_goes_carries_on_with_memory_of_its_own(
    engines: Emulation, tmp_path: Path, harm: str
) -> None:
    for _ in range(10):
        engines.advance()
    path = tmp_path / describe(engines).handle
    attached = SharedAttachment.open(describe(engines), folder=tmp_path)
    if harm == "truncated":
        os.truncate(path, 8192)
    else:
        path.unlink()
    engines.advance()
    assert describe(engines).handle == "", "nobody is to copy there any more"
    ticket = prepared(engines)
    with pytest.raises(SegmentGone):
        attached.copy(ticket.ticket, moves_of(ticket.plan), "a")
    attached.close()
    assert isinstance(engines.answer(W0, Copy(ticket.ticket)), Receipt), "the engine copies"
    done = engines.answer(W0, Commit(ticket.ticket))
    assert done.compacted_bytes == ticket.bytes
    assert [one.kind for one in done.moved] == ["move"], "its transfer is told of too"
    for _ in range(5):
        engines.advance()
    found = bytes_of(engines).figures()
    assert (found["wrong"], found["unshared"]) == (0, 1)


@pytest.mark.parametrize(
    "request_", [Prepare((), -1, 1 << 40), Evict((2**63,), 0, "e"), Prefetch((2**63,), "p"), Evict((), 2**63 - 1, "f")]
)
def test_numbers_that_nothing_can_have_are_answered(engines: Emulation, request_: object) -> None:
    engines.advance()
    said = engines.answer(W0, request_)  # type: ignore[arg-type]
    assert isinstance(said, Failure | Receipt)
    frame(Reply(1, 0, engines.answer(W0, Snapshot(idle_listed=9))))  # and what follows can still be sent


def test_a_block_that_stays_wrong_is_counted_once(engines: Emulation) -> None:
    for _ in range(10):
        engines.advance()
    arena = bytes_of(engines).workers[0].arena
    block = np.flatnonzero(arena.held >= 0)[:1]
    arena.arena.write(block, arena.arena.read(block) ^ np.uint8(1))
    for _ in range(3):
        bytes_of(engines).figures()
    assert bytes_of(engines).figures()["wrong"] == 1
