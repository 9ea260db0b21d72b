"""vLLM's sleep mode over HTTP, against a server that plays its endpoints and their faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from services.actuator.engines.vllm.sleeping import Sleeper, SleepSettings, sleep_state
from services.errors import DeviceError, EngineRefused, EngineUnreachable
from tests.services.actuator.engines.vllm.sleep_server import GB, KV, WEIGHTS, Server

SETTINGS = SleepSettings(order_timeout_s=0.2, ask_timeout_s=0.2, settle_s=0.05, look_s=0.01)


@pytest.fixture
async def server() -> Server:
    return Server()


@pytest.fixture
async def sleeper(server: Server) -> AsyncIterator[Sleeper]:
    runner = web.AppRunner(server.app(), shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}/"
        yield Sleeper("n0/0/w0", url, session, lambda: server.used_bytes, WEIGHTS, SETTINGS)
    await runner.cleanup()


async def test_weights_leave_and_come_back_and_the_device_is_what_is_believed(server, sleeper):
    slept = await sleeper.sleep()
    assert (slept.done, slept.on_card, slept.moved_bytes) == (True, False, WEIGHTS + KV)
    assert server.asked[-1] == "/sleep?level=1&mode=keep", "requests in flight are neither ended nor waited for"
    woke = await sleeper.wake()
    assert (woke.done, woke.on_card, woke.moved_bytes) == (True, True, WEIGHTS + KV)


async def test_a_200_that_freed_little_says_how_little_and_the_server_is_awake_again(server, sleeper):
    server.faults["/sleep"] = "frees_nothing"
    slept = await sleeper.sleep()
    assert not slept.done
    assert slept.on_card
    assert slept.detail == "answered 200, but freed 0.00 of 16.00 GB; woken again"
    assert not server.asleep, "else it would answer nobody for nothing"


@pytest.mark.parametrize("fault", ["hang", "die", 500])
async def test_a_sleep_that_fails_leaves_the_server_awake(server, sleeper, fault):
    server.faults["/sleep"] = fault
    slept = await sleeper.sleep()
    assert (slept.done, slept.on_card, slept.moved_bytes) == (False, True, 0)
    assert "/sleep: " in slept.detail
    assert slept.detail.endswith("; woken again")
    assert server.asked[-2] == "/wake_up"


async def test_a_sleeper_that_cannot_be_woken_again_is_told_as_such(server, sleeper):
    server.faults |= {"/sleep": "frees_nothing", "/wake_up": "die"}
    slept = await sleeper.sleep()
    assert not slept.done
    assert "waking it again failed: /wake_up: " in slept.detail


@pytest.mark.parametrize("fault", ["hang", "die", 500])
async def test_a_waking_that_fails_is_rolled_back(server, sleeper, fault):
    await sleeper.sleep()
    server.faults["/wake_up"] = fault
    woke = await sleeper.wake()
    assert (woke.done, woke.on_card) == (False, False)
    assert woke.detail.endswith("asleep again")
    assert server.asleep


async def test_what_a_failed_waking_left_on_the_device_is_told(server, sleeper):
    await sleeper.sleep()
    server.faults["/wake_up"] = 500
    server.stuck_bytes = 10 * GB
    woke = await sleeper.wake()
    assert not woke.done
    assert woke.moved_bytes == 10 * GB
    assert woke.detail.endswith("asleep again, 10.00 GB still on the device")


async def test_a_repeat_does_nothing(server, sleeper):
    assert (await sleeper.wake()).done
    await sleeper.sleep()
    assert (await sleeper.sleep()).detail == "it slept already"
    assert [path for path in server.asked if path != "/is_sleeping"] == ["/sleep?level=1&mode=keep"]


async def test_a_server_without_the_endpoints_is_refused_before_anything_is_ordered(server, sleeper):
    server.faults["/is_sleeping"] = 404
    with pytest.raises(EngineRefused, match="unsupported"):
        await sleeper.sleep()
    assert set(server.asked) == {"/is_sleeping"}


@pytest.mark.parametrize("fault", ["hang", "die"])
async def test_a_server_that_cannot_be_asked_is_unreachable_and_nothing_is_ordered(server, sleeper, fault):
    server.faults["/is_sleeping"] = fault
    with pytest.raises(EngineUnreachable):
        await sleeper.sleep()
    assert set(server.asked) == {"/is_sleeping"}


async def test_where_the_device_cannot_be_measured_nothing_is_ordered(server, sleeper):
    def blind() -> int:
        raise DeviceError("no_device", "there is none")

    sleeper._used = blind
    with pytest.raises(EngineRefused, match="unsupported"):
        await sleeper.sleep()
    assert server.asked == []


def test_the_state_in_a_metrics_page_is_read_and_silence_is_none():
    page = Path("../shared/samples/vllm-0.32-metrics.txt")
    if page.exists():
        assert sleep_state(page.read_text()) == "awake"
    line = 'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{}"}} {}\n'
    asleep = line.format("awake", "0.0") + line.format("weights_offloaded", "1.0") + line.format("discard_all", "0.0")
    assert sleep_state(asleep) == "weights_offloaded"
    assert sleep_state("") == ""
    assert sleep_state(line.format("awake", "1.0") + line.format("discard_all", "1.0")) == "", "it contradicts itself"
