"""The closed loop on real engines: the five services steer two vLLM servers, processes die, and no request fails."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from loadgen.openai.report import Report
from schemas.classes import ServiceClass
from tests.vllm.loop import Loop
from tests.vllm.servers import VllmServer

DURATION_S = float(os.environ.get("TIDEGATE_VLLM_LOOP_S", "600"))
"""Ten minutes unless somebody is in a hurry."""


def agents(server: VllmServer, duration_s: float) -> Options:
    """Conversations with pauses: idle KV that may leave."""
    return Options(
        url=server.url, sessions=10, duration_s=duration_s, seed=3, turns="3:6", prompt_tokens="100:250",
        turn_tokens="20:60", max_tokens="20:60", think_s="1:6", is_ignoring_eos=True, timeout_s=120,
        service_class={ServiceClass.AGENT: 1.0},
    )  # fmt: skip


def callers(server: VllmServer, duration_s: float) -> Options:
    """Single calls in bursts, of two classes."""
    return Options(
        url=server.url, rate_per_s=1.0, burstiness=3.0, duration_s=duration_s, seed=4, prompt_tokens="60:500",
        max_tokens="10:120", is_ignoring_eos=True, timeout_s=120,
        service_class={ServiceClass.CHAT: 2.0, ServiceClass.BATCH: 1.0},
    )  # fmt: skip


async def test_five_services_steer_two_servers_and_no_request_fails(
    steered: VllmServer, neighbour: VllmServer, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    steered.reset_cache()
    neighbour.reset_cache()
    loop = Loop(tmp_path, (steered, neighbour))
    await loop.start()
    started = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(drive(agents(steered, DURATION_S)))
            second = group.create_task(drive(callers(neighbour, DURATION_S)))
            # While requests run, and so likely in the middle of an action.
            await asyncio.sleep(0.3 * DURATION_S)
            await loop.kill("actuator")
            await asyncio.sleep(0.1 * DURATION_S)
            await loop.kill("telemetry")
            await asyncio.sleep(0.1 * DURATION_S)
            await loop.kill_nats(away_s=3.0)
        took_s = time.monotonic() - started
    finally:
        await loop.stop()
    reports = {steered.worker: first.result(), neighbour.worker: second.result()}
    for worker, report in reports.items():
        tell(f"loop, {took_s:.0f} s, {worker}: {told(report)}")
    tell(
        f"loop: {loop.samples} samples, actions executed {dict(loop.executed)}, refused {dict(loop.refused)}, "
        f"rho in force { ({worker: sorted(seen) for worker, seen in loop.rho.items()}) }"
    )
    for worker, report in reports.items():
        assert not report.failures, f"{worker}: {report.failures}"
        assert report.succeeded > 0.5 * DURATION_S / 10, f"{worker} was hardly used"
    assert steered.alive
    assert neighbour.alive
    assert loop.samples > 0.3 * DURATION_S / 2, "telemetry was silent for most of the time"
    assert set(loop.rho) == {steered.worker, neighbour.worker}, "an engine was never commanded"
    assert loop.executed, "no action but hold was ever executed"
    # A scrape that came too late holds its worker for that step, as it should; it must stay the exception.
    assert max(loop.missing.values()) <= 0.05 * loop.samples, f"telemetry lacked what decisions need: {loop.missing}"


def told(report: Report) -> str:
    return f"{report.succeeded} requests answered, {sum(report.failures.values())} failed"
