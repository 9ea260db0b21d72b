"""Every way in which a request can fail has a name, is counted, and the run goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from loadgen.openai import Options, RequestRecord, drive
from loadgen.openai.client import Outcome, ask, http_session
from loadgen.openai.models import served
from services.errors import EngineUnreachable
from tests.loadgen.openai.server import Behaviour, Server, event

GOOD = event({"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}]})


def writing(*pieces: bytes, then: Callable[[web.StreamResponse], Any] | None = None) -> Behaviour:
    async def behave(response: web.StreamResponse, body: dict[str, Any]) -> None:
        for piece in pieces:
            await response.write(piece)
        if then is not None:
            await then(response)

    return behave


async def die(response: web.StreamResponse) -> None:
    assert response._req is not None
    transport = response._req.transport
    assert transport is not None
    transport.abort()


async def hang(response: web.StreamResponse) -> None:
    await asyncio.sleep(60)


CASES: dict[str, tuple[str, str, Callable[[], Behaviour | web.Response]]] = {
    "500": ("http_5xx", "boom", lambda: web.json_response({"error": "boom"}, status=500)),
    "400": ("http_4xx", "too long", lambda: web.json_response({"error": {"message": "too long"}}, status=400)),
    "204": ("http_other", "204", lambda: web.Response(status=204)),
    "dies mid-stream": ("cut", "", lambda: writing(GOOD, then=die)),
    "ends without a finish reason": ("cut", "after 1 tokens", lambda: writing(GOOD)),
    "DONE without a finish reason": ("cut", "", lambda: writing(GOOD, b"data: [DONE]\n\n")),
    "ends without an event": ("cut", "after 0 tokens", lambda: writing()),
    "half an event": ("cut", "", lambda: writing(GOOD, b"data: {\"choi")),
    "an error in the stream": (
        "stream_error", "no memory", lambda: writing(GOOD, event({"error": {"message": "no memory"}}), GOOD)
    ),
    "wrong JSON": ("malformed", "{oops", lambda: writing(b"data: {oops\n\n")),
    "a web page": ("malformed", "<html>", lambda: web.Response(text="<html>hello</html>", content_type="text/html")),
    "not streamed": ("malformed", "application/json", lambda: web.json_response({"choices": [{"text": "a"}]})),
    "hangs before the stream": ("timeout", "no first token", lambda: writing(then=hang)),
    "hangs in the stream": ("timeout", "not finished", lambda: writing(GOOD, then=hang)),
    "aborted": (
        "aborted", "abort", lambda: writing(event({"choices": [{"text": "", "finish_reason": "abort"}]}))
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_failure_is_named_counted_and_ends_only_its_session(server: Server, case: str) -> None:
    kind, told, how = CASES[case]
    timeout_s = 1.0 if kind == "timeout" else 30.0
    server.behave = lambda number: how() if number == 0 else None
    records: list[RequestRecord] = []
    options = Options(url=server.url, rate_per_s=500.0, requests=6, turns="3", max_tokens="2", timeout_s=timeout_s)
    report = await drive(options, sink=records.append)
    assert report.failures == {kind: 1}
    assert told in report.examples[kind], "in the server's own words"
    assert (report.requests, report.succeeded) == (4, 3), "the other session went on"
    assert report.not_sent == {"turns of sessions that had failed": 2}
    (failed,) = [one for one in records if one.failure]
    assert failed.failure == kind
    assert report.e2e_s.count == 3, "latencies are of answers that came"


async def test_a_server_that_goes_away_is_refused_and_not_hammered(server: Server) -> None:
    async def gone(response: web.StreamResponse, body: dict[str, Any]) -> None:
        await die(response)

    server.behave = lambda number: gone
    report = await drive(Options(url=server.url, sessions=2, duration_s=0.5))
    assert sum(report.failures.values()) == report.requests == 2, "a slot pauses after a failure"


async def test_nobody_listening_is_refused(server: Server, unused_tcp_port: int) -> None:
    found: list[Outcome] = []
    async with http_session() as http:
        await ask(http, f"http://127.0.0.1:{unused_tcp_port}/v1/completions", {}, {}, timeout_s=5, patience_s=5,
                  ended=found.append)  # fmt: skip
    assert found[0].failure == "refused"


async def test_a_client_that_gives_up_does_so_before_its_timeout(server: Server) -> None:
    server.behave = lambda number: writing(then=hang)
    found: list[Outcome] = []
    async with http_session() as http:
        await ask(http, f"{server.url}/v1/completions", {}, {}, timeout_s=30, patience_s=0.1, ended=found.append)
    assert found[0].failure == "gave_up"


async def test_patience_ends_with_the_first_token(server: Server) -> None:
    server.gap_s = 0.4
    body = {"prompt": [1], "max_tokens": 3}
    found: list[Outcome] = []
    async with http_session() as http:
        await ask(http, f"{server.url}/v1/completions", {}, body, timeout_s=30, patience_s=0.6, ended=found.append)
    assert found[0].failure == "", "the answer took longer than the patience, its first token did not"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (web.Response(status=503, text="starting"), "503: starting"),
        (web.Response(text="<html>"), "expected a list of models"),
        (web.json_response({"data": []}), "serves no model"),
        (web.json_response({"data": [{"name": 1}]}), "expected a list of models"),
    ],
)
async def test_a_server_that_names_no_model_is_said_at_the_start(
    server: Server, answer: web.Response, told: str
) -> None:
    server.models = answer
    async with http_session() as http:
        with pytest.raises(EngineUnreachable, match=told):
            await served(http, server.url, "", "")
