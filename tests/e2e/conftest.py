"""One loop for all tests of this folder: it takes seconds to start, and each test leaves it as it should be."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.e2e.loop import RunningLoop
from tests.services.otlp_receiver import GrpcReceiver


@pytest.fixture(scope="package")
def receiver() -> Iterator[GrpcReceiver]:
    """Gets the spans of all five services."""
    with GrpcReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def running(receiver: GrpcReceiver) -> AsyncIterator[RunningLoop]:
    # A Unix socket's path holds 107 bytes, pytest's folders have long names.
    folder = Path(tempfile.mkdtemp(prefix="tg-"))
    loop = RunningLoop(
        folder,
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            "OTEL_BSP_SCHEDULE_DELAY": "200",
        },
    )
    try:
        await loop.start()
        yield loop
    finally:
        late = await loop.stop()
        shutil.rmtree(folder)
        assert not late, f"had to be killed at the end: {late}"


@pytest_asyncio.fixture(loop_scope="package")
async def loop(running: RunningLoop) -> RunningLoop:
    """The loop in control under the heuristic, whatever the test before did to it."""
    await running.heal()
    return running
