"""The engines' verbs on a fleet of plain numbers."""

from __future__ import annotations

import pytest

from loadgen.node.emulation import Emulation
from schemas.classes import ServiceClass
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Evict,
    Failure,
    GrantPages,
    Prefetch,
    Prepare,
    Receipt,
    ReturnPages,
    Sample,
    SetQuota,
    Snapshot,
    SnapshotReply,
)
from schemas.identity import STEP_NS, action_id
from schemas.metrics import COLUMN
from schemas.telemetry import NodeSample, metrics_of

from .fake_fleet import BLOCK, GIB, FakeFleet

WORKERS = ("n0/0/w0", "n0/0/w1")


def emulation(*classes: int, **fleet: float) -> Emulation:
    return Emulation(FakeFleet(2, **fleet), WORKERS, classes or (0, 0))


def quota(engines: Emulation, worker: str, rho: float = 1.0, step: int | None = None, boot: int = 7) -> SetQuota:
    step = engines.step if step is None else step
    generation = engines.quotas[engines.index[worker]].generation
    return SetQuota(
        boot, step, action_id(worker, boot, step), rho, int(rho * 20 * GIB), 26 * GIB, 256, generation,
        engines.t_ns + 3 * STEP_NS, engines.t_ns + STEP_NS,
    )  # fmt: skip


def test_every_verb_has_an_answer():
    engines = emulation()
    answers = {
        type(body).__name__: type(engines.answer(WORKERS[0], body))
        for body in (
            Describe(), Snapshot(), quota(engines, WORKERS[0]), GrantPages(2 * GIB, 99), ReturnPages(GIB),
            Evict((), GIB, "a"), Prefetch((), "b"), AskReceipt("a"), Prepare((), GIB, STEP_NS, "c"), Copy(1),
            Commit(1), Abort(99), Sample(0, 0, 0.0),
        )
    }  # fmt: skip
    assert answers == {
        "Describe": Description, "Snapshot": SnapshotReply, "SetQuota": Receipt, "GrantPages": Receipt,
        "ReturnPages": Receipt, "Evict": Receipt, "Prefetch": Receipt, "AskReceipt": Receipt, "Prepare": Failure,
        "Copy": Failure, "Commit": Failure, "Abort": Failure, "Sample": Failure,
    }  # fmt: skip


def test_time_goes_on_when_every_worker_was_commanded_in_this_boot():
    engines = emulation()
    engines.asked_by(7)
    engines.answer(WORKERS[0], quota(engines, WORKERS[0]))
    assert not engines.commanded
    engines.answer(WORKERS[1], quota(engines, WORKERS[1], boot=6))
    assert not engines.commanded, "a command of an older boot belongs to a telemetry that is gone"
    engines.answer(WORKERS[1], quota(engines, WORKERS[1], rho=9.0))
    assert engines.commanded, "a refused command is an answer as well"
    engines.advance()
    assert not engines.commanded


def test_an_eviction_is_done_when_the_fleet_moved_the_bytes():
    engines = emulation()
    first = engines.answer(WORKERS[0], Evict((), 3 * GIB, "a"))
    assert isinstance(first, Receipt)
    assert not first.done
    assert engines.answer(WORKERS[0], Evict((), 3 * GIB, "a")) == first, "a repeat starts nothing"
    engines.advance()
    under_way = engines.answer(WORKERS[0], AskReceipt("a"))
    assert (under_way.done, under_way.evicted_bytes) == (False, 2 * GIB)
    snapshot = engines.answer(WORKERS[0], Snapshot())
    assert (snapshot.leaving_bytes, snapshot.idle_bytes) == (GIB, 4 * GIB)
    engines.advance()
    done = engines.answer(WORKERS[0], AskReceipt("a"))
    assert (done.done, done.evicted_bytes) == (True, 3 * GIB)


def test_an_eviction_that_finds_nothing_more_is_done_with_what_it_moved():
    engines = emulation()
    engines.answer(WORKERS[0], Evict((), 30 * GIB, "a"))
    for _ in range(3):
        engines.advance()
    done = engines.answer(WORKERS[0], AskReceipt("a"))
    assert (done.done, done.evicted_bytes) == (True, 6 * GIB), "all that was idle"


def test_an_eviction_that_was_called_off_ends_with_what_had_left():
    engines = emulation()
    engines.answer(WORKERS[0], Evict((), 5 * GIB, "a"))
    engines.advance()
    engines.fleet.evict_per_step = 0
    answers = []
    for _ in range(3):
        engines.advance()
        answers.append(engines.answer(WORKERS[0], AskReceipt("a")))
    assert [one.done for one in answers] == [False, False, True]
    assert answers[-1].evicted_bytes == 2 * GIB


@pytest.mark.parametrize("forbidding", [ServiceClass.COPILOT, ServiceClass.TRAINING])
def test_an_engine_whose_class_forbids_swap_never_evicts(forbidding):
    engines = emulation(forbidding, 0)
    answer = engines.answer(WORKERS[0], Evict((), GIB, "a"))
    assert isinstance(answer, Failure)
    assert answer.reason == "class_forbids"
    engines.advance()
    assert engines.fleet.told[-1]["evict_bytes"][0] == 0


def test_a_full_host_tier_is_an_ordinary_answer():
    engines = emulation()
    engines.fleet.column("host_used_bytes")[:] = 80 * GIB
    engines.advance()
    assert engines.answer(WORKERS[0], Evict((), GIB, "a")).reason == "tier_full"


def test_a_named_session_leaves_and_an_unknown_one_is_an_ordinary_answer():
    engines = emulation()
    begun = engines.answer(WORKERS[0], Evict((5, 6), 0, "a"))
    assert (begun.done, begun.evicted_bytes) == (False, 0)
    engines.advance()
    done = engines.answer(WORKERS[0], AskReceipt("a"))
    assert (done.done, done.evicted_bytes) == (True, 3 * BLOCK)
    nothing = engines.answer(WORKERS[0], Evict((6,), 0, "b"))
    assert (nothing.done, nothing.evicted_bytes) == (True, 0), "nobody went, so nothing is waited for"


def test_sessions_are_listed_only_when_asked_for():
    engines = emulation()
    assert engines.answer(WORKERS[0], Snapshot()).idle == ()
    (idle,) = engines.answer(WORKERS[0], Snapshot(idle_listed=10)).idle
    assert (idle.session, idle.bytes, idle.tokens, idle.expected_return_s) == (5, 3 * BLOCK, 48, 9.0)


def test_without_bytes_behind_the_blocks_nothing_is_compacted():
    engines = emulation()
    assert "compact" not in engines.answer(WORKERS[0], Describe()).capabilities
    assert engines.answer(WORKERS[0], Prepare((), GIB, 3 * STEP_NS, "a")).reason == "unsupported"


def test_a_lease_that_runs_out_lowers_the_fleet():
    engines = emulation()
    engines.answer(WORKERS[0], quota(engines, WORKERS[0], 1.5))
    engines.answer(WORKERS[1], quota(engines, WORKERS[1], 1.5))
    for _ in range(2):
        engines.advance()
    engines.answer(WORKERS[1], quota(engines, WORKERS[1], 1.5))
    engines.advance()
    assert [one.rho for one in engines.quotas] == [1.0, 1.5], "only the renewed one keeps its quota"
    engines.advance()
    assert list(engines.fleet.told[-1]["rho"]) == [1.0, 1.5]
    sample = engines.sample(False)
    rows = metrics_of(
        NodeSample("n0", 7, sample.step, 1, 0, sample.workers, sample.cards, sample.classes, sample.metrics)
    )
    assert rows[0, COLUMN["rho"]] == 1.0
    assert rows[0, COLUMN["generation"]] == 2
