"""Any service may stop or be killed while the loop runs: the others go on, and it takes up again."""

from __future__ import annotations

import signal
import time

import pytest

from schemas.actions import Hold
from schemas.policies import KEY_CHAMPION, PolicyPointer
from schemas.subjects import STREAM_TRANSITIONS
from services.bus import Delivery
from services.learner import checkpoint
from services.learner.intake import Intake
from services.learner.settings import Settings as LearnerSettings
from tests.e2e.loop import LIMIT_S, WINDOW_STEPS, RunningLoop

pytestmark = pytest.mark.asyncio(loop_scope="package")

DRAIN_LIMIT_S = 5.0
RAISED = PolicyPointer(version="fixed:1.6", kind="fixed")


def others_live(loop: RunningLoop, ended: str) -> bool:
    return all(child.alive for name, child in loop.processes.children.items() if name != ended)


async def drained(loop: RunningLoop, service: str) -> None:
    """SIGTERM ends this service in time and only this one; the node goes on."""
    code, took_s = await loop.end(service, signal.SIGTERM)
    assert code == 0, loop.processes.children[service].tail()
    assert took_s < DRAIN_LIMIT_S, "a supervisor waits no longer"
    await loop.until_stepped(2, f"the node goes on without {service}")
    assert others_live(loop, service)


@pytest.mark.parametrize("service", ["telemetry", "decision", "actuator"])
async def test_sigterm_drains_and_the_others_go_on(loop: RunningLoop, service: str) -> None:
    await drained(loop, service)
    await loop.bring_back(service)
    await loop.until_in_control()
    assert others_live(loop, "")


async def test_featurizer_drains_and_holds_its_workers_until_windows_are_full_again(loop: RunningLoop) -> None:
    await drained(loop, "featurizer")
    loop.witness.states.clear()
    loop.witness.actions.clear()
    await loop.bring_back("featurizer")
    await loop.until_in_control()
    assert others_live(loop, "")
    first = [tuple(batch.holds) for batch in list(loop.witness.states)[: WINDOW_STEPS - 1]]
    assert first == [(Hold.WINDOW_FILLING,) * 2] * (WINDOW_STEPS - 1), "nobody acts on a window that is not full"
    held = [batch for batch in loop.witness.actions if Hold.WINDOW_FILLING in batch.holds]
    assert held
    assert all(not any(batch.actions) and batch.lease_ns > batch.t_ns for batch in held), (
        "held is a command that renews the lease"
    )


@pytest.mark.parametrize("service", ["telemetry", "featurizer", "decision", "actuator"])
async def test_no_quota_stays_raised_when_a_service_is_killed(loop: RunningLoop, service: str) -> None:
    await loop.point(KEY_CHAMPION, RAISED)
    await loop.until_rho(lambda rho: rho > 1.0, "both workers overcommit")
    await loop.end(service, signal.SIGKILL)
    await loop.until_rho(lambda rho: rho == 1.0, f"leases run out without {service}")
    await loop.until_stepped(1, "the node's time goes on by its wall limit")
    assert others_live(loop, service)

    await loop.bring_back(service)
    await loop.until_in_control(policy=RAISED.version)
    await loop.until_rho(lambda rho: rho > 1.0, "the loop overcommits again")


async def test_a_learner_does_not_load_torchs_compiler(loop: RunningLoop) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not (await loop.metrics("learner"))["updates_total"]:
        assert time.monotonic() < deadline_s, "it takes gradient steps"
    log = loop.processes.children["learner"].log.read_text()
    loaded = {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}
    assert "torch.optim.adam" in loaded, "the log tells what it loaded"
    assert "torch._dynamo" not in loaded, "it costs seconds of every start"


async def test_learner_counts_every_transition_once_across_a_kill(loop: RunningLoop) -> None:
    def newest() -> checkpoint.Checkpoint | None:
        return next(iter(checkpoint.load(loop.folder / "learner").usable), None)

    await loop.until(newest, "a checkpoint is written")
    await loop.end("learner", signal.SIGKILL)
    at_kill = newest()
    assert at_kill is not None
    await loop.until_in_control(steps=5)  # goes on without a learner
    await loop.bring_back("learner")
    log = loop.processes.children["learner"].log.read_text().replace('"', "")
    assert f"learning from the stream sequence={at_kill.meta.replay_from}" in log.rpartition("msg=connecting")[2], (
        "the consumer begins where the checkpoint says"
    )
    await loop.until(lambda: (found := newest()) and found.meta.sequence > at_kill.meta.sequence, "it learns on")
    code, took_s = await loop.end("learner", signal.SIGTERM)
    assert code == 0, loop.processes.children["learner"].tail()
    assert took_s < DRAIN_LIMIT_S, "the learner too: it finishes the gradient step in hand, no more"
    assert others_live(loop, "learner")
    final = newest()
    assert final is not None
    assert final.meta.transitions == await fresh_rows(loop, final.meta.sequence), "nothing lost, nothing twice"


async def fresh_rows(loop: RunningLoop, until_sequence: int) -> int:
    """Transitions that one learner which was never killed would have learned from, counted from the stream."""
    consumer = await loop.bus.pull_consumer(STREAM_TRANSITIONS, "counting")
    intake, fresh, last = Intake(LearnerSettings()), 0, 0
    while last < until_sequence:
        fetched: list[Delivery] = [d for d in await consumer.fetch(200, 2.0) if d.stream_sequence <= until_sequence]
        assert fetched, f"the stream ends at {last}, the checkpoint says {until_sequence}"
        await consumer.ack(fetched)
        fresh += intake.ingest(fetched).fresh
        last = fetched[-1].stream_sequence
    await consumer.stop()
    return fresh
