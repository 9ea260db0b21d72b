"""Probes answer the truth, on an address that nobody else has, and the log says things on one line."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from services import logs
from services.errors import UserError
from services.health import DRAINING, READY, Health, HealthServer, write_port_file
from services.settings import CommonSettings
from services.spans import current_trace_id


async def status(port: int, path: str = "/ready") -> int:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status


async def test_ready_means_wired_and_connected_and_not_draining(tmp_path: Path) -> None:
    health = Health("decision", "n0-1")
    server = HealthServer(health, lambda: b"a_total 1\n")
    await server.start(CommonSettings(http_port_file=str(tmp_path / "port")))
    try:
        assert (tmp_path / "port").read_text() == f"{server.port}\n"
        assert await status(server.port) == 503, "not wired"
        health.state = READY
        assert await status(server.port) == 503, "wired, but not connected"
        health.connected = lambda: True
        assert await status(server.port) == 200
        health.state = DRAINING
        assert await status(server.port) == 503, "draining"
        assert await status(server.port, "/live") == 200, "still alive"
        assert await status(server.port, "/metrics") == 200
        assert await status(server.port, "/other") == 404
    finally:
        await server.stop()


async def test_without_a_port_nothing_listens() -> None:
    server = HealthServer(Health("decision", "n0-1"), bytes)
    await server.start(CommonSettings(http_port=-1))
    assert server.port == -1
    await server.stop()


async def test_a_port_that_is_taken_is_the_callers_mistake() -> None:
    first = HealthServer(Health("decision", "n0-1"), bytes)
    await first.start(CommonSettings())
    second = HealthServer(Health("decision", "n0-2"), bytes)
    try:
        with pytest.raises(UserError, match=f"127.0.0.1:{first.port}"):
            await second.start(CommonSettings(http_port=first.port))
    finally:
        await first.stop()


def test_a_port_file_that_cannot_be_written_is_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http_port_file .*No such file"):
        write_port_file(tmp_path / "nowhere" / "port", 8080)


@pytest.fixture
def root_log() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def tell(form: str) -> str:
    stream = io.StringIO()
    logs.configure("decision", "n0-1", "info", "json" if form == "json" else "text", stream)
    log = logging.getLogger("services.decision")
    log.debug("not this")
    token = current_trace_id.set("ab" * 16)
    try:
        raise ValueError('two\nlines "quoted"')
    except ValueError:
        log.exception("policy refused", extra={"fields": {"version": 7, "share": 0.5, "msg": "not the message"}})
    finally:
        current_trace_id.reset(token)
    return stream.getvalue()


@pytest.mark.usefixtures("root_log")
def test_a_text_line_has_keys_and_the_trace_and_stays_one_line() -> None:
    told = tell("text")
    assert told.count("\n") == 1, "an exception's trace is escaped, not spread over lines"
    expected = f'msg="policy refused" trace={"ab" * 16} version=7 share=0.5 msg_="not the message" error="Traceback'
    assert expected in told
    assert "level=error service=decision instance=n0-1 logger=services.decision" in told


@pytest.mark.usefixtures("root_log")
def test_a_json_line_has_the_same() -> None:
    fields = json.loads(tell("json"))
    assert (fields["msg"], fields["msg_"]) == ("policy refused", "not the message")
    assert (fields["trace"], fields["version"], fields["share"]) == ("ab" * 16, 7, 0.5)
    assert fields["error"].endswith('ValueError: two\nlines "quoted"')
