"""The screen says what acts now."""

from __future__ import annotations

import msgspec

from loadgen.demo.view import LiveView
from schemas.actions import ACTION_BATCH, WorkerAction, action_batch
from schemas.subjects import subject
from services.bus.memory import MemoryBus, MemoryNetwork
from tests.services.bus.collect import eventually


async def test_after_a_rollback_the_policy_before_is_shown_as_acting() -> None:
    bus, view = MemoryBus(MemoryNetwork()), LiveView()
    await view.attach(bus)
    assert view.acting == "none yet"
    row = WorkerAction("n0/0/w0", "", 0, 1.0, 64, 0, 9, 9, "any", 1.0, 31, (0,) * 5)
    versions = ("heuristic", "fixed:1.3", "heuristic")
    for step, version in enumerate(versions):
        sent = msgspec.structs.replace(action_batch("n0", 1, step, 0, [row]), policy_version=version)
        await bus.publish(subject("action", "n0"), ACTION_BATCH.encode(sent))
    await eventually(lambda: view.actions.total() == len(versions))
    assert view.acting == "heuristic"
    assert view.policy_versions == ["heuristic", "fixed:1.3"], "all that ever acted"
