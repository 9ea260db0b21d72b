"""The engine protocol on a real vLLM: quotas in force at once, floor and lease kept by the engine itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest

from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from schemas.classes import ServiceClass
from schemas.engine import SetQuota, Snapshot, SnapshotReply
from schemas.identity import STEP_NS, STEP_S
from services.actuator.engines.protocol import SocketEngine
from services.actuator.engines.quota import LEASE_LIMIT_NS
from services.errors import EngineRefused
from tests.vllm.servers import BLOCK_BYTES, BLOCK_TOKENS, CONTEXT_TOKENS, POOL_BLOCKS, VllmServer

FLOOR_BLOCKS = CONTEXT_TOKENS // BLOCK_TOKENS + 1


class Commands:
    """Absolute commands as the actuator sends them, each step's newer than all before."""

    def __init__(self, engine: SocketEngine) -> None:
        self.engine = engine
        self._boot_id = time.time_ns()
        self._step = 0

    async def quota(self, *, rho: float = 1.0, hard_blocks: int = 0, generation: int = 0, lease_ns: int = 0) -> None:
        """Put it in force; EngineRefused when the engine says no. 0: as it is, or as is usual."""
        said = await self.engine.snapshot()
        described = await self.engine.describe()
        self._step += 1
        now_ns = self.engine.t_ns
        lease_ns = now_ns + (lease_ns or LEASE_LIMIT_NS)
        await self.engine.set_quota(
            SetQuota(
                self._boot_id, self._step, f"test@{self._boot_id}.{self._step}", rho, int(rho * described.q0_bytes),
                hard_blocks * BLOCK_BYTES or said.quota_hard_bytes, 64, generation or said.generation,
                lease_ns, lease_ns,  # no deadline of its own: a step on a busy machine may take long
            )
        )  # fmt: skip


@contextlib.asynccontextmanager
async def busy(server: VllmServer, sessions: int = 16) -> AsyncIterator[None]:
    """More requests than the pool serves at once."""
    stop = asyncio.Event()
    options = Options(
        url=server.url, sessions=sessions, duration_s=600, seed=9, turns="3", prompt_tokens="200:400",
        turn_tokens="20:60", max_tokens="80:160", is_ignoring_eos=True, timeout_s=120,
    )  # fmt: skip
    task = asyncio.create_task(drive(options, stop=stop))
    try:
        yield
    finally:
        stop.set()
        report = await task
        assert not {kind: n for kind, n in report.failures.items() if kind != "interrupted"}, report.failures


async def until(engine: SocketEngine, what: str, holds: Callable[[SnapshotReply], bool], within_s: float) -> None:
    """Look every 50 ms until it holds; an AssertionError afterwards."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not holds(said := await engine.snapshot(Snapshot())):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s:g} s: {what}: {said}"
        await asyncio.sleep(0.05)


@pytest.fixture
async def commands(steered: VllmServer) -> AsyncIterator[Commands]:
    engine = steered.engine()
    try:
        yield (made := Commands(engine))
        await made.quota(hard_blocks=POOL_BLOCKS // 3)
    finally:
        await engine.close()


async def test_what_the_engine_describes_is_what_it_was_started_with(commands: Commands) -> None:
    said = await commands.engine.describe()
    assert (said.engine, said.block_bytes, said.kv_bytes_per_token) == (
        "vllm",
        BLOCK_BYTES,
        BLOCK_BYTES // BLOCK_TOKENS,
    )
    assert said.floor_bytes == FLOOR_BLOCKS * BLOCK_BYTES, "ceil(max_model_len / block_size) + 1"
    assert {"set_quota", "compact", "evict", "sessions", "prefetch"} <= set(said.capabilities)


async def test_raising_and_lowering_the_hard_quota_takes_effect_within_two_steps(
    steered: VllmServer, commands: Commands, tell: Callable[[str], None]
) -> None:
    low, high = 60, 200
    over = 0
    async with busy(steered):
        for _ in range(3):
            await commands.quota(hard_blocks=high)
            await until(
                commands.engine, f"more than {low} blocks used", lambda one: one.mapped_bytes > low * BLOCK_BYTES, 20
            )
            await commands.quota(hard_blocks=low)
            await until(
                commands.engine,
                f"at most {low} blocks used",
                lambda one: one.mapped_bytes <= low * BLOCK_BYTES,
                2 * STEP_S,
            )
            for _ in range(10):
                said = await commands.engine.snapshot()
                over += said.mapped_bytes > low * BLOCK_BYTES
                await asyncio.sleep(0.05)
    tell(f"hard quota: three times from {high} to {low} blocks and back under load, {over} looks beyond it afterwards")
    assert over == 0, "the engine held more than its hard quota"


async def test_below_the_floor_is_refused_and_nothing_changes(commands: Commands) -> None:
    before = await commands.engine.snapshot()
    with pytest.raises(EngineRefused) as caught:
        await commands.quota(hard_blocks=FLOOR_BLOCKS - 1)
    after = await commands.engine.snapshot()
    assert caught.value.reason == "below_floor"
    assert (after.quota_hard_bytes, after.generation) == (before.quota_hard_bytes, before.generation)


async def test_at_the_floor_the_longest_request_still_ends(steered: VllmServer, commands: Commands) -> None:
    await commands.quota(hard_blocks=FLOOR_BLOCKS)
    longest = Options(
        url=steered.url, sessions=2, requests=2, seed=1, turns="1", prompt_tokens=str(CONTEXT_TOKENS - 100),
        max_tokens="99", is_ignoring_eos=True, timeout_s=110,
    )  # fmt: skip
    report = await drive(longest)
    assert (report.succeeded, report.failures) == (2, {})


async def test_a_command_on_an_older_generation_is_refused(commands: Commands) -> None:
    await commands.quota(rho=1.2, hard_blocks=100)
    await commands.quota(rho=1.1, hard_blocks=101)
    now = (await commands.engine.snapshot()).generation
    with pytest.raises(EngineRefused) as caught:
        await commands.quota(rho=1.3, generation=now - 1)
    assert caught.value.reason == "stale_generation"


async def test_a_quota_that_nobody_renews_is_let_go(commands: Commands) -> None:
    """No actuator, no bus: the engine itself returns to rho 1.0, and to the pool that is its own anyway."""
    await commands.quota(rho=1.4, hard_blocks=50, lease_ns=STEP_NS)
    said = await commands.engine.snapshot()
    assert (said.rho, said.quota_hard_bytes) == (1.4, 50 * BLOCK_BYTES)
    await until(commands.engine, "rho 1.0", lambda one: one.rho == 1.0, 2 * STEP_S)
    assert (await commands.engine.snapshot()).quota_hard_bytes > 50 * BLOCK_BYTES


async def test_nonsense_on_the_socket_ends_that_connection_and_no_other(
    steered: VllmServer, commands: Commands
) -> None:
    for data in (b"\xff" * 64, b"\x00\x00\x00\x05hello", os.urandom(200), b""):
        _, writer = await asyncio.open_unix_connection(str(steered.sockets / f"0-{steered.name}.sock"))
        writer.write(data)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    assert (await commands.engine.snapshot()).quota_soft_bytes > 0
    assert steered.healthy()


class Waited(msgspec.Struct):
    """First tokens of two kinds of caller on a full engine, seconds."""

    urgent_s: list[float] = []
    patient_s: list[float] = []


async def test_requests_of_an_urgent_class_do_not_wait_behind_a_patient_ones(
    steered: VllmServer, commands: Commands, tell: Callable[[str], None]
) -> None:
    """Under priority scheduling, the class's deadline orders the queue; first come first served would mix them."""
    await commands.quota(hard_blocks=60)
    waited = Waited()

    async def run(kind: ServiceClass, into: list[float], seed: int) -> None:
        options = Options(
            url=steered.url, sessions=8, requests=24, seed=seed, turns="1", prompt_tokens="200:300",
            max_tokens="60:90", is_ignoring_eos=True, timeout_s=120, service_class={kind: 1.0},
        )  # fmt: skip
        report = await drive(options, sink=lambda one: into.append(one.ttft_s))
        assert not report.failures, report.failures

    async def renew() -> None:
        while True:
            await commands.quota(hard_blocks=60)
            await asyncio.sleep(STEP_S)

    renewing = asyncio.create_task(renew())
    await asyncio.gather(run(ServiceClass.COPILOT, waited.urgent_s, 1), run(ServiceClass.BATCH, waited.patient_s, 2))
    renewing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await renewing
    urgent_s, patient_s = (sorted(one)[len(one) // 2] for one in (waited.urgent_s, waited.patient_s))
    tell(f"deadline order: first token p50 {urgent_s:.2f} s for copilot, {patient_s:.2f} s for batch beside it")
    assert urgent_s < patient_s
