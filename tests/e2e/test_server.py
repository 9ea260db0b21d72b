"""The NATS server is killed and started again in the middle of a run."""

from __future__ import annotations

import time

import pytest

from schemas.policies import KEY_CHAMPION, PolicyPointer
from tests.e2e.loop import RunningLoop

pytestmark = pytest.mark.asyncio(loop_scope="package")

SEEN_LIMIT_S = 3.0


async def test_all_come_back_after_the_server_was_killed(loop: RunningLoop) -> None:
    await loop.server.kill()
    await loop.until_stepped(2, "the node's time goes on without a bus")
    await loop.until_rho(lambda rho: rho == 1.0, "and what nobody commands is not raised")
    assert all(child.alive for child in loop.processes.children.values()), "nobody gives up"

    await loop.server.start()
    returned_s = time.monotonic()
    await loop.until(lambda: loop.bus.connected, "the witness is back")
    await loop.point(KEY_CHAMPION, PolicyPointer(version="fixed:1.2", kind="fixed"))
    await loop.until(
        lambda: loop.witness.actions[-1].policy_version == "fixed:1.2",
        "a pointer moved after the server's return is taken up",
        SEEN_LIMIT_S - (time.monotonic() - returned_s),
    )
    await loop.until_in_control(policy="fixed:1.2")
    before = (await loop.metrics("learner"))["stream_sequence"]
    deadline_s = time.monotonic() + 15.0
    while (await loop.metrics("learner"))["stream_sequence"] <= before:
        assert time.monotonic() < deadline_s, "the learner's pull consumer is bound again"
    for service in loop.processes.children:
        if service != "node":
            assert (await loop.metrics(service))["bus_reconnects_total"] >= 1, service
