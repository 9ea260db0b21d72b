"""kill -9 of the real process: what it had acknowledged is learned from once, as by a learner that was never killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np

from loadgen.demo.processes import Processes
from loadgen.demo.ready import until_ready
from schemas.subjects import STREAM_SUBJECTS, STREAM_TRANSITIONS
from schemas.transitions import TRANSITION_BATCH
from services.bus import nats
from services.bus.embedded import EmbeddedServer
from services.learner import checkpoint
from services.learner.checkpoint import Checkpoint
from tests.services.learner.batches import batch, deliver

BOOT = time.time_ns()
SETTINGS = {
    "hidden": "16", "warmup_rows": "8", "batch": "8", "publish_updates": "1000000", "capacity_rows": "4096",
    "fetch_timeout_s": "0.05", "updates_per_transition": "0.5", "checkpoint_every_s": "0.5",
    "checkpoint_replay": "true",
}  # fmt: skip


async def test_killed_in_the_middle_it_ends_up_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    processes = Processes(tmp_path)
    bus = await nats.connect(server.url, user=server.user, password=server.password)

    async def launch(name: str) -> None:
        settings = SETTINGS | {"durable": name, "checkpoint_dir": str(tmp_path / f"state-{name}")}
        await until_ready(processes, [await processes.start_service("learner", name, server, settings, {})])

    async def send(first: int, last: int) -> None:
        for step in range(first, last):
            sent = batch(step, rows=4, boot=BOOT)
            await bus.publish_stream(deliver(sent)[0].subject, TRANSITION_BATCH.encode(sent), message_id=f"m{step}")
        await bus.flush_stream(10.0)

    def newest(name: str) -> Checkpoint | None:
        usable = checkpoint.load(tmp_path / f"state-{name}").usable
        return usable[0] if usable else None

    async def until_sequence(name: str, sequence: int) -> Checkpoint:
        async with asyncio.timeout(30):
            while (found := newest(name)) is None or found.meta.sequence < sequence:  # noqa: ASYNC110 - a file
                await asyncio.sleep(0.05)
        return found

    try:
        await bus.ensure_stream(
            STREAM_TRANSITIONS, STREAM_SUBJECTS[STREAM_TRANSITIONS], max_age_s=3600, max_bytes=1 << 28
        )
        await asyncio.gather(launch("killed"), launch("steady"))
        await send(0, 100)
        saved = await until_sequence("killed", 100)
        await send(100, 200)
        await until_sequence("steady", 200)  # so the other has acknowledged most of them as well
        processes.kill("killed")
        await processes.children["killed"].process.wait()
        await send(200, 250)
        await launch("killed")
        both = [await until_sequence(name, 250) for name in ("killed", "steady")]
    finally:
        await bus.drain(1.0)
        await processes.stop()
        await server.stop()
    killed, steady = both
    assert saved.meta.transitions == 400
    assert killed.meta.transitions == steady.meta.transitions == 1000, "each row once"
    for name in ("replay.states", "replay.rewards", "replay.sequences", "replay.followers"):
        assert np.array_equal(killed.arrays[name], steady.arrays[name], equal_nan=True), name
    assert abs(killed.meta.updates + killed.meta.owed - steady.meta.updates - steady.meta.owed) < 1e-6
