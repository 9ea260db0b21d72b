"""The service's wiring on an in-memory bus with engines inside the process."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from schemas.actions import ACTION_BATCH, ALL_ACTIONS, Action, WorkerAction, action_batch
from schemas.identity import action_id
from schemas.outcomes import OUTCOME_BATCH, OutcomeBatch, Status, outcome_batch, outcomes_of
from schemas.subjects import subject
from services.actuator.audit import AuditTrail
from services.actuator.service import ActuatorService, Settings
from services.bus.api import Message
from services.bus.memory import MemoryBus, MemoryNetwork
from services.clock import ManualClock
from services.errors import SettingsError
from services.observe import Observe
from services.settings import CommonSettings
from services.shell import Shell

BOOT = 7


def batch(node: str, step: int, rho: float = 1.1, workers: int = 8) -> bytes:
    actions = [
        WorkerAction(
            f"{node}/{gpu}/w0", action_id(f"{node}/{gpu}/w0", BOOT, step), Action.WIDEN, rho, 256, 100, 10**15,
            10**15, "heuristic", 1.0, ALL_ACTIONS, (0,) * 5,
        )
        for gpu in range(workers)
    ]  # fmt: skip
    return ACTION_BATCH.encode(action_batch(node, BOOT, step, 0, actions))


class Rig:
    """A running loopback actuator and what it says."""

    def __init__(self, **settings: object) -> None:
        self.network = MemoryNetwork()
        self.bus = MemoryBus(self.network)
        self.observe = Observe("actuator")
        self.service = ActuatorService(Settings(engine="loopback", **settings))
        self.shell = Shell("actuator", "t", bus=self.bus, observe=self.observe, clock=ManualClock(2_000_000))
        self.heard: list[Message] = []
        self.news = asyncio.Event()

    async def __aenter__(self) -> Rig:
        async def hear(messages: list[Message]) -> None:
            self.heard += messages
            self.news.set()

        await self.bus.subscribe("tg.v1.outcome.*", hear)
        await self.service.start(self.shell)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop()
        await self.shell.cancel_tasks()
        await self.bus.drain()
        assert self.shell.failed is None

    async def send(self, node: str, data: bytes, headers: Mapping[str, str] | None = None) -> None:
        await self.bus.publish(subject("action", node), data, headers)

    async def answered(self, count: int) -> None:
        """Wait until so many outcomes came."""
        async with asyncio.timeout(10):
            while len(self.heard) < count:
                self.news.clear()
                await self.news.wait()

    def outcomes(self) -> list[OutcomeBatch]:
        return [OUTCOME_BATCH.decode(message.data) for message in self.heard]


async def test_every_node_is_served_and_answered_on_its_own_subject():
    async with Rig() as rig:
        for node in ("n0", "host.example"):
            await rig.send(node, batch(node, 1))
        await rig.answered(2)
    assert [message.subject for message in rig.heard] == ["tg.v1.outcome.n0", "tg.v1.outcome.host_2eexample"]
    for outcome in rig.outcomes():
        assert {one.status for one in outcomes_of(outcome)} == {Status.ACCEPTED}
        assert {one.executed_action for one in outcomes_of(outcome)} == {Action.WIDEN}
        assert {one.effective_rho for one in outcomes_of(outcome)} == {1.1}
    assert rig.service.counts.accepted == 16


async def test_what_the_actuator_counts_is_on_its_metrics_page():
    async with Rig() as rig:
        await rig.send("n0", b"garbage")
        await rig.send("n0", batch("n0", 1))
        await rig.send("n0", batch("n0", 1))
        await rig.answered(1)
    page = rig.observe.render().decode()
    for line in ("decode_errors_total 1.0", "duplicates_total 1.0", "batches_total 1.0", "audit_stored_total 1.0"):
        assert f"tidegate_actuator_events_{line}" in page


async def test_latencies_are_left_in_a_file_for_the_benchmark(tmp_path):
    path = tmp_path / "latencies.npy"
    async with Rig(latency_file=str(path)) as rig:
        await rig.send("n0", batch("n0", 1))
        await rig.answered(1)
    np.testing.assert_allclose(np.load(path), [2.0])
    assert "tidegate_actuator_telemetry_to_action_seconds_count 1.0" in rig.observe.render().decode()


async def test_an_actuate_span_has_a_child_per_quota_and_travels_on(tmp_path: Path):
    rig = Rig()
    common = CommonSettings(trace_file=str(tmp_path / "spans.jsonl"), trace_ratio=1.0)
    rig.observe.start(common, {}, instance="t", rng=random.Random(1))
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with rig:
        await rig.send("n0", batch("n0", 1, workers=2), {"traceparent": parent})
        await rig.answered(1)
    rig.observe.stop(5.0)
    lines = [json.loads(line) for line in (tmp_path / "spans.jsonl").read_text().splitlines()]
    spans = [
        span
        for line in lines
        for resource in line["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]
    (actuate,) = [span for span in spans if span["name"].startswith("actuate")]
    quotas = [span for span in spans if span["name"] == "quota"]
    assert actuate["parentSpanId"] == "b7ad6b7169203331"
    assert [span["parentSpanId"] for span in quotas] == [actuate["spanId"]] * 2
    assert rig.heard[0].headers["traceparent"].split("-")[1:3] == [parent.split("-")[1], actuate["spanId"]]


def test_real_engines_need_a_node_to_command():
    with pytest.raises(SettingsError, match="node"):
        ActuatorService(Settings())
    assert Settings(node="a", nodes=("b", "a")).all_nodes() == ("a", "b")


async def test_audit_records_that_do_not_fit_are_gaps_and_never_hold_up_a_step():
    network = MemoryNetwork()
    trail = AuditTrail(MemoryBus(network), backlog=2, max_age_s=60.0, max_bytes=1_000_000)
    outcomes = outcome_batch("n0", BOOT, 1, 0, [])
    for _ in range(5):
        trail.add(outcomes, b"", b"")
    assert (trail.backlog, trail.gaps) == (2, 3)
    await trail.flush(1.0)
    assert trail.backlog == 0
