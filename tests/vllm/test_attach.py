"""The zero-risk way in, and what the adapter costs, on real servers."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from loadgen.bench.vllm import bench_vllm, render
from loadgen.openai.driving import drive
from loadgen.openai.options import Options
from services.actuator.engines.vllm.flags import START_FLAGS
from tests.vllm.servers import ROOT, VllmServer

ATTACHED_S = 30


async def tidegate(*arguments: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.cli", *arguments, cwd=ROOT,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


async def test_attach_in_shadow_needs_a_stock_server_and_nothing_else(
    stock: VllmServer, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    stop = asyncio.Event()
    options = Options(
        url=stock.url, sessions=6, duration_s=600, turns="3", prompt_tokens="100:300", max_tokens="40:80",
        is_ignoring_eos=True, think_s="0.5", timeout_s=60,
    )  # fmt: skip
    driving = asyncio.create_task(drive(options, stop=stop))
    code, output = await tidegate(
        "attach", "vllm", "--url", stock.url, "--class", "agent", "--duration", f"{ATTACHED_S}s",
        "--folder", str(tmp_path / "a"),
    )  # fmt: skip
    stop.set()
    report = await driving
    tell("attach, shadow, on a stock server:\n" + "\n".join(f"    {line}" for line in output.splitlines()))
    assert code == 0, output
    assert "shadow" in output
    assert set(report.failures) <= {"interrupted"}, report.failures
    assert stock.alive


async def test_enforce_on_a_stock_server_says_how_to_start_it(stock: VllmServer, tmp_path: Path) -> None:
    code, output = await tidegate(
        "attach", "vllm", "--url", stock.url, "--mode", "enforce", "--folder", str(tmp_path / "e")
    )
    assert code == 2, output
    assert all(flag in output for flag in START_FLAGS), output


async def test_shadow_changes_nothing_in_a_server_with_tidegate_inside(bare: VllmServer, tmp_path: Path) -> None:
    engine = bare.engine()
    before = await engine.snapshot()
    code, output = await tidegate(
        "attach", "vllm", "--url", bare.url, "--duration", "15s", "--folder", str(tmp_path / "s"),
        "--socket", str(bare.sockets / f"0-{bare.name}.sock"),
    )  # fmt: skip
    after = await engine.snapshot()
    await engine.close()
    assert code == 0, output
    assert (after.generation, after.rho, after.quota_hard_bytes, after.lease_until_ns) == (
        before.generation, before.rho, before.quota_hard_bytes, before.lease_until_ns,
    )  # fmt: skip


async def test_doctor_knows_the_server(stock: VllmServer) -> None:
    _, output = await tidegate("doctor", "--url", stock.url)
    assert "0.32" in output, output


async def test_what_the_adapter_costs_is_measured(
    stock: VllmServer, bare: VllmServer, tell: Callable[[str], None]
) -> None:
    """No bound on a shared machine: the figure is for the closing of a release."""
    socket = bare.sockets / f"0-{bare.name}.sock"
    cost = await bench_vllm(stock.url, bare.url, socket=socket, rounds=4)
    tell("adapter off and on, no host tier on either side:\n" + "\n".join(f"    {line}" for line in render(cost)))
    assert cost.commands > 0
    assert 0.2 < cost.ratio < 5.0
