"""Run by vLLM's own interpreter: tickets in an engine of two workers, one of which may fail."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from schemas.engine import Failure, Move, Prepare, Receipt, Ticket
from services.actuator.engines.vllm.compaction import Compaction
from services.actuator.engines.vllm.receipts import Receipts
from services.actuator.memory.geometry import Geometry
from tests.vllm.inside.test_worker import filled, worker_of
from tests.vllm.inside.worlds import scheduler_of

BLOCKS = 32
HOUR_NS = 3_600_000_000_000


class Engine:
    """Request ``a`` holds blocks 1, 2 and 3 in the scheduler and in both workers."""

    def __init__(self) -> None:
        self.table: dict[str, list[Any]] = {}
        self.scheduler = scheduler_of(BLOCKS, self.table)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.table["a"] = self.pool.get_new_blocks(3)
        self.layers = [filled(BLOCKS, 4), filled(BLOCKS, 4)]
        self.workers = [worker_of(layer) for layer in self.layers]
        self.core = SimpleNamespace(model_executor=self, batch_queue=None)
        self.geometry = Geometry(16, 4, 8)
        self.block_bytes = 16
        self.mapped_bytes = 0
        self.receipts = Receipts()
        self.settings = SimpleNamespace(pause_ms=1000.0)
        self.calls: list[str] = []

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        self.calls.append(name)
        return [getattr(worker, name)(*args) for worker in self.workers]

    def receipt(self, action_id: str) -> Receipt:
        return Receipt(action_id, True, 0, 1.0, 0, 0, 0, 0)

    def rows(self) -> list[list[int]]:
        return [one.model_runner.input_batch.block_table[0].block_table.np[0, :3].tolist() for one in self.workers]


@pytest.fixture
def engine() -> Engine:
    return Engine()


def prepared(compaction: Compaction, *moves: tuple[int, int], lease_ns: int = HOUR_NS) -> Ticket:
    ticket = compaction.prepare(Prepare(tuple(Move(*one) for one in moves), 0, lease_ns, "c"), 0)
    assert isinstance(ticket, Ticket), ticket
    return ticket


def test_bytes_and_tables_of_all_change_in_the_commit_and_not_before(engine: Engine) -> None:
    compaction = Compaction(engine)
    ticket = prepared(compaction, (1, 20), (3, 21))
    compaction.copy(ticket.ticket)
    assert engine.rows() == [[1, 2, 3]] * 2
    said = compaction.commit(ticket.ticket, 0)
    assert isinstance(said, Receipt)
    assert engine.rows() == [[20, 2, 21]] * 2
    assert [block.block_id for block in engine.table["a"]] == [20, 2, 21]
    assert all(torch.equal(layer[20], filled(BLOCKS, 4)[1]) for layer in engine.layers)
    assert (said.compacted_bytes, said.dropped_moves) == (32, 0)
    assert engine.receipts.of("c") == said


def test_what_changed_since_it_was_planned_is_left_out(engine: Engine) -> None:
    compaction = Compaction(engine)
    ticket = prepared(compaction, (1, 20), (3, 21))
    engine.pool.free_blocks(reversed(engine.table.pop("a")))
    said = compaction.commit(ticket.ticket, 0)
    assert (said.compacted_bytes, said.dropped_moves) == (0, 2)
    assert engine.rows() == [[1, 2, 3]] * 2


def test_a_large_ticket_takes_several_calls(engine: Engine) -> None:
    compaction = Compaction(engine)
    compaction._per_call = 1
    engine.settings.pause_ms = 1e-6
    ticket = prepared(compaction, (1, 20), (2, 21), (3, 22))
    assert compaction.commit(ticket.ticket, 0) is None
    assert [block.block_id for block in engine.table["a"]] == [20, 2, 3]
    assert compaction.commit(ticket.ticket, 0) is None
    assert compaction.commit(ticket.ticket, 0).compacted_bytes == 48


def test_a_lease_that_ran_out_moves_nothing_more(engine: Engine) -> None:
    compaction = Compaction(engine)
    ticket = prepared(compaction, (1, 20), lease_ns=5)
    assert compaction.commit(ticket.ticket, 5).dropped_moves == 1
    assert engine.rows() == [[1, 2, 3]] * 2


def test_a_worker_that_fails_leaves_all_where_they_were_and_is_not_asked_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first worker has re-pointed its tables by then: were that to stay, it would read what others write."""
    compaction = Compaction(engine)
    ticket = prepared(compaction, (1, 20), (3, 21))

    def fails(plan: Any) -> None:
        raise RuntimeError("no memory for the copy")

    monkeypatch.setattr(engine.workers[1], "_tidegate_copy", fails)
    said = compaction.commit(ticket.ticket, 0)
    assert isinstance(said, Failure)
    assert "no memory for the copy" in said.detail
    assert engine.rows() == [[1, 2, 3]] * 2
    assert [block.block_id for block in engine.table["a"]] == [1, 2, 3]
    asked = len(engine.calls)
    assert compaction.prepare(Prepare((), 0, HOUR_NS, "d"), 0).reason == "unsupported"
    assert compaction.capabilities() == ()
    assert len(engine.calls) == asked
