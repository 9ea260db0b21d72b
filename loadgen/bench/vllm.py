"""What Tidegate inside a vLLM costs: output tokens a second of the same requests, with and without it, turn about.

Both servers are somebody else's and already run; they should differ in Tidegate alone. Where the engine's socket is
named it is commanded every step as an actuator would, so that the cost of commands counts too. A real actuator's
commands are older than these from then on, until its telemetry starts anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from schemas.engine import SetQuota, Snapshot
from schemas.identity import STEP_NS, STEP_S
from services.actuator.engines.protocol import EngineClient, SocketEngine
from services.errors import TidegateError

LISTED: Final = 100
"""Idle sessions asked for with each snapshot, as before an eviction."""


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens a second of each round, and what is left of them with Tidegate inside."""

    off_tokens_per_s: tuple[float, ...]
    on_tokens_per_s: tuple[float, ...]
    ratios: tuple[float, ...]
    """On over off, each round's own."""
    ratio: float
    """Their median."""
    commands: int
    """Steps in which the engine was commanded."""


async def bench_vllm(
    off: str, on: str, *, socket: Path | None = None, rounds: int = 4, sessions: int = 16, requests: int = 96
) -> Cost:
    """Drive the server at ``off``, then the one at ``on``, ``rounds`` times, the order reversed each time.

    Every request of a round is the same on both sides; prompts differ between rounds, so that no cache helps. A failed
    request is a TidegateError: a rate without it would flatter.
    """
    rates: dict[str, list[float]] = {off: [], on: []}
    commands = 0
    for number in range(-1, rounds):  # round -1 warms both up and does not count
        for url in (off, on) if number % 2 else (on, off):
            options = Options(
                url=url, sessions=sessions, requests=requests, seed=1000 + number, turns="3", prompt_tokens="100:300",
                turn_tokens="20:60", max_tokens="40:80", is_ignoring_eos=True, timeout_s=300,
            )  # fmt: skip
            async with commanded(socket if url == on else None) as count:
                report = await drive(options)
            if report.failures:
                raise TidegateError(f"{url}: requests failed: {report.failures}")
            if number >= 0:
                rates[url].append(report.output_tokens / report.duration_s)
                commands += count[0]
    ratios = tuple(with_ / without for with_, without in zip(rates[on], rates[off], strict=True))
    return Cost(
        off_tokens_per_s=tuple(rates[off]),
        on_tokens_per_s=tuple(rates[on]),
        ratios=ratios,
        ratio=statistics.median(ratios),
        commands=commands,
    )


@contextlib.asynccontextmanager
async def commanded(path: Path | None) -> AsyncIterator[list[int]]:
    """Look at the engine and renew its quota every step meanwhile; the list holds how often."""
    count = [0]
    if path is None:
        yield count
        return
    engine = SocketEngine(EngineClient("bench", path, 10.0))
    boot_id = time.time_ns()  # newer than any telemetry's so far

    async def command() -> None:
        while True:
            said = await engine.snapshot(Snapshot(LISTED, 2 * STEP_S))
            now_ns = engine.t_ns
            await engine.set_quota(
                SetQuota(
                    boot_id, count[0], f"bench@{boot_id}.{count[0]}", said.rho, said.quota_soft_bytes,
                    said.quota_hard_bytes, said.max_running, said.generation, now_ns + 3 * STEP_NS, now_ns + STEP_NS,
                )
            )  # fmt: skip
            count[0] += 1
            await asyncio.sleep(STEP_S)

    task = asyncio.create_task(command())
    try:
        yield count
    finally:
        failure = task.exception() if task.done() else None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, TidegateError):
            await task
        await engine.close()
        if failure is not None:
            raise failure


def render(cost: Cost) -> list[str]:
    """Lines for a screen."""
    sides = (("without", cost.off_tokens_per_s), ("with", cost.on_tokens_per_s))
    lines = [f"{name:8} {'  '.join(f'{rate:8.1f}' for rate in rates)}  tokens/s" for name, rates in sides]
    lines.append(f"{'ratio':8} {'  '.join(f'{one:8.3f}' for one in cost.ratios)}  median {cost.ratio:.3f}")
    return lines
