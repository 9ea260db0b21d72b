"""A page over HTTP: whatever is not a whole, readable one is a failed scrape with its reason."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from services.errors import ScrapeFailed
from services.telemetry.sources.fetch import base_url, fetch_page, metrics_url
from tests.services.telemetry.sources.pages import vllm_page
from tests.services.telemetry.sources.servers import served


async def test_a_good_page_is_read() -> None:
    async with served(vllm_page(running=3)) as engine, aiohttp.ClientSession() as session:
        page = await fetch_page(session, f"{engine.url}/metrics", 5.0)
    assert page.value(["vllm:num_requests_running"]) == 3


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("empty", "an empty answer"),
        ("html", r"content type text/html.*\(another service\?\)"),
        ("500", "status 500, expected 200"),
        ("401", r"status 401, expected 200 \(credentials\?\)"),
        ("moved", "status 302, expected 200"),
        ("not utf-8", "not UTF-8"),
        ("half", "the answer ended half-way"),
        ("hang", "no whole answer within 0.2 s"),
        ("drip", "no whole answer within 0.2 s"),
    ],
)
async def test_every_fault_has_its_reason(fault: str, reason: str) -> None:
    async with served(vllm_page()) as engine, aiohttp.ClientSession() as session:
        engine.fault = fault
        timeout_s = 0.2 if fault in ("hang", "drip") else 5.0
        with pytest.raises(ScrapeFailed, match=reason):
            await fetch_page(session, f"{engine.url}/metrics", timeout_s)


@pytest.mark.parametrize(
    ("said", "reason"), [(b"SSH-2.0-OpenSSH_9.6\r\n", "no HTTP answer"), (b"", "closed without an answer")]
)
async def test_what_does_not_speak_http_is_told_as_that(said: bytes, reason: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as session:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ScrapeFailed, match=reason):
            await fetch_page(session, f"http://127.0.0.1:{port}/metrics", 5.0)


async def test_a_page_without_end_is_cut_off() -> None:
    async with served(vllm_page() * 100) as engine, aiohttp.ClientSession() as session:
        with pytest.raises(ScrapeFailed, match="more than 10000 bytes"):
            await fetch_page(session, f"{engine.url}/metrics", 5.0, max_bytes=10_000)


async def test_nobody_there_is_a_failed_scrape() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            with pytest.raises(ScrapeFailed, match="no connection: "):
                await fetch_page(session, f"http://127.0.0.1:{port}/metrics", 5.0)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/", "http://[/", "http://no host/"])
async def test_an_address_that_cannot_be_is_a_failed_scrape(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        with pytest.raises(ScrapeFailed):
            await fetch_page(session, url, 5.0)


def test_addresses() -> None:
    assert metrics_url("http://h:8000") == metrics_url("http://h:8000/") == "http://h:8000/metrics"
    assert metrics_url("http://h:8002/stats") == "http://h:8002/stats"
    assert base_url("http://h:8002/stats") == "http://h:8002"
