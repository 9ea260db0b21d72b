"""The actuator and a live node with real bytes: compaction by the actuator in the node's arena, swap-out and return by
name, each told with what really moved, and every block verified."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import FleetConfig
from loadgen.load import tables_at
from loadgen.node import memory
from loadgen.node.emulation import Emulation
from loadgen.node.replay import Replay
from loadgen.workload import builtin
from schemas.actions import ALL_ACTIONS, Action, WorkerAction, action_batch, columns_of
from schemas.identity import STEP_NS, action_id
from schemas.outcomes import OutcomeKind, Status, WorkerOutcome, outcomes_of
from services.actuator.effects import EffectSettings
from services.actuator.engines import emulated
from services.actuator.steps import NodeSteps
from services.spans import NULL_SPAN

BOOT = 7
WORKERS = ("n0/0/w0", "n0/0/w1")


class Rig:
    """A node's sockets and the steps that command it, in lockstep."""

    def __init__(self, folder: Path) -> None:
        config = FleetConfig(workers_per_card=2)
        config = msgspec.structs.replace(config, mode=msgspec.structs.replace(config.mode, prefetch=False))
        workload = builtin("agent", duration_s=300.0, seed=3).within_context(131_072)
        fleet = Fleet(config, tables_at(workload, 0.5, 2, 300.0, 3))
        self.engines = Emulation(fleet, WORKERS, (0, 0), config.limits)
        self.engines.memory = self.memory = memory.create(
            fleet, str(folder), self.engines.base_receipt, self.engines.asker, budget_bytes=8 << 20
        )
        self.engines.asked_by(BOOT)
        self.replay = Replay(self.engines, duration_s=1000, step_timeout_s=30, speed=0)
        self.steps = NodeSteps("n0", lambda worker: emulated.connect(folder, worker, 60.0), EffectSettings())

    async def act(self, action: Action) -> list[WorkerOutcome]:
        """One step in which every worker does ``action``."""
        engines = self.engines
        rows = [
            WorkerAction(
                worker, action_id(worker, BOOT, engines.step), action, quota.rho, quota.max_running, quota.generation,
                engines.t_ns + STEP_NS, engines.t_ns + 3 * STEP_NS, "heuristic", 1.0, ALL_ACTIONS, (0,) * 5,
            )
            for worker, quota in zip(WORKERS, engines.quotas, strict=True)
        ]  # fmt: skip
        batch = action_batch("n0", BOOT, engines.step, engines.t_ns, rows)
        outcomes = outcomes_of(await self.steps.execute(batch, columns_of(batch), NULL_SPAN))
        assert engines.commanded
        engines.advance()
        return outcomes


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    try:
        await made.replay.open(tmp_path)
        yield made
        await made.steps.close()
        await made.replay.close()
    finally:
        made.memory.close()


@pytest.mark.timeout(300)  # the engine may have to be compiled
async def test_what_the_actuator_commands_moves_real_bytes_and_all_of_them_are_right(rig: Rig) -> None:
    told: list[WorkerOutcome] = []
    for step in range(140):
        told += await rig.act({4: Action.EVICT, 2: Action.COMPACT}.get(step % 6, Action.HOLD))
    found = rig.memory.figures()
    assert found["wrong"] == 0
    refused = Counter(one.detail for one in told if one.status == Status.REFUSED)
    assert not refused, refused
    done = [one for one in told if one.compacted_bytes]
    assert done, "nothing was compacted"
    for one in done:
        (moved,) = one.moved
        assert (moved.kind, moved.asked_by, moved.scale) == ("move", one.action_id, rig.memory.scale)
        assert moved.bytes * moved.scale >= one.compacted_bytes >= one.lower_bound_bytes > 0
    completed = [one for one in told if one.kind == OutcomeKind.COMPLETION]
    for name, kind in (("evicted_bytes", "out"), ("prefetched_bytes", "back")):
        some = [one for one in completed if getattr(one, name) and one.moved]
        assert some, f"no completion tells of a transfer {kind}"
        assert {moved.kind for one in some for moved in one.moved} == {kind}
        assert {moved.asked_by.removesuffix("/prefetch") for one in some for moved in one.moved} <= {
            one.action_id for one in some
        }
    ledger = rig.steps.ledger
    assert {kind for kind, _ in ledger.transfers} == {"move", "out", "back"}
    assert ledger.moved_bytes == sum(one.compacted_bytes for one in done)
    print(  # noqa: T201
        f"{found}; {ledger.moved_bytes / 1e9:.1f} GB of the model compacted against a bound of "
        f"{ledger.lower_bound_bytes / 1e9:.1f}, {ledger.groups_freed} groups freed, longest pause "
        f"{ledger.longest_pause_us:.0f} us"
    )
