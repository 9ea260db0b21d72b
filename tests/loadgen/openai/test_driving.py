"""Runs against a real HTTP server that plays the API: what is asked, measured and said about it."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from loadgen.openai import Options, RequestRecord, compare, drive
from loadgen.openai.report import Report
from schemas.classes import ServiceClass
from services.errors import EngineUnreachable, UserError
from tests.loadgen.openai.server import Server


@dataclasses.dataclass
class Ran:
    report: Report
    records: list[RequestRecord]


async def ran(server: Server, **more: Any) -> Ran:
    fields: dict[str, Any] = {"url": server.url, "prompt_tokens": "20", "turn_tokens": "10", "max_tokens": "4", **more}
    records: list[RequestRecord] = []
    return Ran(await drive(Options(**fields), sink=records.append), records)


async def test_a_closed_loop_keeps_its_sessions_and_grows_their_prompts(server: Server) -> None:
    server.gap_s = 0.005
    found = await ran(server, sessions=3, requests=12, turns="4", seed=5)
    assert (found.report.requests, found.report.succeeded, found.report.failures) == (12, 12, {})
    assert server.most_at_once == 3, "three sessions at a time, never more"
    by_session: dict[str, list[list[int]]] = {}
    for headers, body in zip(server.headers, server.bodies, strict=True):
        by_session.setdefault(headers["x-tidegate-session"], []).append(body["prompt"])
    assert len(by_session) == 3
    for prompts in by_session.values():
        assert [len(one) for one in prompts] == [20, 34, 48, 62]
        for earlier, later in itertools.pairwise(prompts):
            assert later[: len(earlier)] == earlier, "every prompt begins with the one before: a prefix cache hits"
    first = min(found.records, key=lambda one: one.key)
    second = next(body["prompt"] for body in server.bodies if len(body["prompt"]) == 34)
    answers = [tuple(one.token_ids or ()) for one in found.records if one.turn == 0]
    assert tuple(second[20:24]) in answers, "the server's own tokens are the history"
    assert first.output_tokens == 4
    assert first.finish == "length"
    assert {headers["x-tidegate-class"] for headers in server.headers} == {"chat"}


async def test_two_runs_of_one_seed_are_equal_token_by_token_and_another_seed_is_not(server: Server) -> None:
    one, two, other = [await ran(server, sessions=2, requests=8, seed=seed) for seed in (1, 1, 2)]
    found = compare(one.records, two.records)
    assert (found.is_same, found.same, found.tokens) == (True, 8, 32)
    assert not compare(one.records, other.records).is_same
    changed = [msgspec.structs.replace(record, token_ids=[1, 2]) for record in two.records[:1]] + two.records[1:]
    assert len(compare(one.records, changed).different) == 1
    assert compare(one.records, two.records[1:]).only_a == 1
    with pytest.raises(ValueError, match="twice"):
        compare(one.records, two.records * 2)
    assert not compare([], []).is_same, "no request compared is no proof"


async def test_latencies_are_those_of_the_server(server: Server) -> None:
    server.first_s, server.gap_s = 0.05, 0.01
    found = (await ran(server, sessions=1, requests=3, turns="1", max_tokens="6")).report
    assert found.ttft_s.count == 3
    assert found.gap_s.count == 15
    assert 0.05 <= found.ttft_s.p50 < 1.0
    assert 0.01 <= found.tpot_s.p50 < 0.5
    assert found.e2e_s.p50 >= found.ttft_s.p50 + 5 * 0.01
    assert found.output_tokens == 18
    assert found.good == 3
    assert found.goodput_tokens_per_s == pytest.approx(18 / found.duration_s)


async def test_an_open_loop_counts_from_when_a_request_was_due(server: Server) -> None:
    server.first_s = 0.05
    found = await ran(server, rate_per_s=200.0, requests=12, max_concurrency=1, max_tokens="1")
    assert server.most_at_once == 1
    assert found.report.held_back >= 10, "what the bound held back is counted"
    last = max(found.records, key=lambda one: one.intended_s)
    assert last.ttft_s > 0.4, "twelve answers of 50 ms one after the other: the last was due at once and came last"
    assert last.wait_s > 0.35, "most of it was spent before it could be sent"


async def test_an_open_loop_does_not_wait_for_slow_answers(server: Server) -> None:
    everybody = asyncio.Event()

    async def held(response: web.StreamResponse, body: dict[str, Any]) -> None:
        if server.at_once == 20:
            everybody.set()
        await everybody.wait()
        await server.answer(response, body)

    server.behave = lambda number: held
    found = await ran(server, rate_per_s=100.0, requests=20, max_tokens="1", timeout_s=30.0)
    assert found.report.succeeded == 20, "all twenty were under way before the first was answered"


async def test_turns_due_after_the_end_are_counted_and_not_sent(server: Server) -> None:
    found = await ran(server, sessions=1, duration_s=0.2, turns="5", think_s="30")
    assert found.report.requests == 1
    assert found.report.not_sent == {"turns due after the end": 4}


async def test_chat_sends_messages_and_reads_deltas(server: Server) -> None:
    found = await ran(server, sessions=1, requests=2, turns="2", is_chat=True, shared_prefix_tokens=3, is_plain=True)
    roles = [[one["role"] for one in body["messages"]] for body in server.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"]]
    assert server.bodies[1]["messages"][2]["content"] == found.records[0].text
    assert "return_token_ids" not in server.bodies[0]
    assert (found.records[0].counted_by, found.records[0].output_tokens) == ("usage", 4)


async def test_fields_are_sent_as_asked(server: Server) -> None:
    weights = {ServiceClass.COPILOT: 1.0}
    await ran(server, sessions=1, requests=1, service_class=weights, priority={ServiceClass.COPILOT: -3},
              is_ignoring_eos=True, temperature=0.5, api_key="secret")  # fmt: skip
    (body,), (headers,) = server.bodies, server.headers
    assert (body["priority"], body["ignore_eos"], body["temperature"], body["model"]) == (-3, True, 0.5, "played")
    assert body["stream_options"] == {"include_usage": True}
    assert (headers["x-tidegate-class"], headers["Authorization"]) == ("copilot", "Bearer secret")


async def test_without_token_ids_history_still_grows(server: Server) -> None:
    server.knows_ids = False
    await ran(server, sessions=1, requests=2, turns="2")
    assert [len(body["prompt"]) for body in server.bodies] == [20, 34]


async def test_a_trace_is_replayed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(
        "trace_id,t_s,prompt_tokens,output_tokens,think_time_s\n"
        "a,0,40,3,0\na,1,60,2,0.5\nb,0,30,5,0\nb,1,5000,5,0\n"
    )  # fmt: skip
    found = await ran(server, trace=tmp_path / "t.csv", speed=1000.0)
    assert sorted(len(body["prompt"]) for body in server.bodies) == [30, 40, 60]
    assert sorted(body["max_tokens"] for body in server.bodies) == [2, 3, 5]
    assert sum(found.report.left_out.values()) == 1
    assert any("--ignore-eos" in note for note in found.report.notes)
    assert found.report.loop == "trace"


async def test_a_run_that_is_stopped_tells_what_it_had(server: Server) -> None:
    server.gap_s = 30.0
    stop = asyncio.Event()
    records: list[RequestRecord] = []
    options = Options(url=server.url, sessions=2, requests=8, turns="4")

    def watch(progress: object) -> None:
        if server.at_once == 2:
            stop.set()

    report = await drive(options, sink=records.append, watch=watch, stop=stop)
    assert report.failures == {"interrupted": 2}
    assert [one.failure for one in records] == ["interrupted"] * 2
    assert report.not_sent == {"turns left when the run was stopped": 6}


async def test_a_server_that_falls_silent_does_not_keep_the_run_past_its_drain(server: Server) -> None:
    server.gap_s = 60.0
    found = await ran(server, sessions=2, duration_s=0.1, drain_s=0.2)
    assert found.report.failures == {"interrupted": 2}
    assert found.report.duration_s < 30
    assert found.report.notes[-1] == "stopped with requests under way"


async def test_what_a_sink_raises_comes_out(server: Server) -> None:
    def full(record: RequestRecord) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        await drive(Options(url=server.url, sessions=2, requests=2), sink=full)


async def test_a_context_that_nothing_fits_is_a_mistake(server: Server) -> None:
    server.max_model_len = 64
    with pytest.raises(UserError, match="fits into the context of 64"):
        await ran(server, sessions=1, requests=1, prompt_tokens="100")


async def test_a_server_that_is_not_there_is_said_at_the_start(unused_tcp_port: int) -> None:
    with pytest.raises(EngineUnreachable, match="is the server running"):
        await drive(Options(url=f"http://127.0.0.1:{unused_tcp_port}", sessions=1, requests=1))


async def test_a_model_that_is_not_served_is_a_mistake(server: Server) -> None:
    with pytest.raises(UserError, match="serves: played"):
        await ran(server, sessions=1, requests=1, model="other")
