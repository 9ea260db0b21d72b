"""A server that nobody can command: shadow's commands change nothing there, all others are refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from schemas.actions import ACTION_BATCH, Action, WorkerAction, action_batch
from schemas.engine import Evict, GrantPages, Prefetch, Prepare, ReturnPages, SetQuota, SetWeights
from schemas.outcomes import OUTCOME_BATCH, Refusal, Status, WorkerOutcome, outcomes_of
from schemas.subjects import subject
from services.actuator.engines.observed import ObservedEngine
from services.actuator.service import ActuatorService, Settings
from services.bus import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.errors import EngineRefused, SettingsError
from services.observe import Observe
from services.shell import Shell

W = "n0/0/w0"


def quota(rho: float = 1.0, max_running: int = 256) -> SetQuota:
    return SetQuota(1, 1, f"{W}@1.1", rho, 1, 1, max_running, 0, 6, 2)


async def test_the_baseline_is_nothing_to_change() -> None:
    receipt = await ObservedEngine(W, lambda: 5).set_quota(quota())
    assert (receipt.done, receipt.rho, receipt.generation) == (True, 1.0, 0)
    assert (receipt.quota_soft_bytes, receipt.quota_hard_bytes) == (0, 0), "nothing bounds it, so no bound is told"


@pytest.mark.parametrize("order", [quota(rho=1.1), quota(max_running=204)])
async def test_a_quota_that_would_bind_is_refused(order: SetQuota) -> None:
    with pytest.raises(EngineRefused, match="unsupported"):
        await ObservedEngine(W, lambda: 5).set_quota(order)


async def test_every_verb_that_moves_memory_is_refused() -> None:
    engine = ObservedEngine(W, lambda: 5)
    assert (await engine.describe()).capabilities == ()
    for call in (
        engine.grant_pages(GrantPages(1, 0)), engine.return_pages(ReturnPages(1)), engine.prepare(Prepare((), 1, 1)),
        engine.copy(1), engine.commit(1), engine.abort(1), engine.evict(Evict((), 1, "a")),
        engine.prefetch(Prefetch((), "a")), engine.set_weights(SetWeights(False, "a")),
    ):  # fmt: skip
        with pytest.raises(EngineRefused, match="unsupported"):
            await call


async def outcomes_of_commands(settings: Settings, *commands: tuple[Action, float]) -> list[WorkerOutcome]:
    """What a real actuator with these settings says to commands for a worker that has no socket."""
    network, clock = MemoryNetwork(), ManualClock()
    bus = MemoryBus(network)
    told: list[WorkerOutcome] = []
    done = asyncio.Event()

    async def on_batch(messages: list[Message]) -> None:
        told.extend(outcomes_of(OUTCOME_BATCH.decode(one.data))[0] for one in messages)
        done.set()

    await bus.subscribe(subject("outcome", "n0"), on_batch)
    service = ActuatorService(settings)
    shell = Shell("actuator", "a0", bus=MemoryBus(network), observe=Observe("actuator"), clock=clock)
    await service.start(shell)
    for step, (action, rho) in enumerate(commands):
        done.clear()
        row = WorkerAction(W, "", action, rho, 256, 0, clock.now_ns() + 10**9, clock.now_ns() + 3 * 10**9, "heuristic",
                           1.0, 31, (0,) * 5)  # fmt: skip
        await bus.publish(subject("action", "n0"), ACTION_BATCH.encode(action_batch("n0", 1, step, 0, [row])))
        await asyncio.wait_for(done.wait(), 5)
    await service.stop()
    await shell.cancel_tasks()
    await bus.drain()
    assert shell.failed is None
    return told


@pytest.mark.parametrize("settings", [{"engine": "observed"}, {"observe": True}])
async def test_shadow_goes_round_with_outcomes_and_without_errors(settings: dict[str, object], tmp_path: Path) -> None:
    both = Settings(node="n0", sockets=str(tmp_path), **settings)  # type: ignore[arg-type]
    held, again, widened = await outcomes_of_commands(both, (Action.HOLD, 1.0), (Action.HOLD, 1.0), (Action.WIDEN, 1.1))
    assert (held.status, held.effective_rho) == (Status.ACCEPTED, 1.0)
    assert again.status == Status.ACCEPTED, "a repeated step as well"
    assert (widened.status, widened.refusal) == (Status.REFUSED, Refusal.ENGINE_REFUSED)
    assert (widened.executed_action, widened.effective_rho) == (Action.HOLD, 1.0)
    assert "unsupported" in widened.detail


async def test_without_a_word_a_worker_that_has_no_socket_is_unknown(tmp_path: Path) -> None:
    (held,) = await outcomes_of_commands(Settings(node="n0", sockets=str(tmp_path)), (Action.HOLD, 1.0))
    assert held.refusal == Refusal.UNKNOWN_WORKER


def test_watching_needs_a_node() -> None:
    with pytest.raises(SettingsError, match="node"):
        ActuatorService(Settings(engine="observed"))
