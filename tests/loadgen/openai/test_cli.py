"""`tidegate loadgen` as a user meets it, against a played server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from aiohttp import web

from loadgen import __main__ as alone
from loadgen.openai.records import NAN, RecordFile, RequestRecord, read_records
from services import cli
from services.errors import UserError
from tests.loadgen.openai.server import Server

SHORT = ["--sessions", "2", "--requests", "6", "--prompt-tokens", "20", "--max-tokens", "3"]


async def ran(server: Server, *arguments: str) -> int:
    """In a thread: the server needs this loop, the command brings its own."""
    return await asyncio.to_thread(cli.main, ["loadgen", "openai", "--url", server.url, *arguments])


async def test_a_run_prints_a_table_and_writes_whole_files(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, report = tmp_path / "a", tmp_path / "b", tmp_path / "r.json"
    assert await ran(server, *SHORT, "--record", str(a), "--json", str(report)) == 0
    assert await ran(server, *SHORT, "--record", str(b)) == 0
    out = capsys.readouterr().out
    assert "6 answered, 0 failed" in out
    assert "TTFT" in out
    assert json.loads(report.read_text())["requests"] == 6
    assert len(read_records(a)) == 6
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "r.json"], "no half-written file stays"
    assert cli.main(["loadgen", "compare", str(a), str(b)]) == 0
    assert "same answer   6 requests, 18 tokens" in capsys.readouterr().out


async def test_failures_make_exit_code_1_when_asked(server: Server) -> None:
    server.behave = lambda number: web.Response(status=500) if number == 0 else None
    options = ["--rate", "500", "--requests", "4", "--max-tokens", "2"]
    assert await ran(server, *options) == 0
    server.bodies.clear()
    assert await ran(server, *options, "--fail-on-error") == 1


async def test_ctrl_c_tells_what_was_measured_and_is_130(server: Server, tmp_path: Path) -> None:
    begun = asyncio.Event()
    answer = server.answer

    async def slow(response: web.StreamResponse, body: dict[str, object]) -> None:
        if len(server.bodies) > 2:
            begun.set()
            await asyncio.sleep(60)
        await answer(response, body)

    server.behave = lambda number: slow
    record = tmp_path / "r"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "loadgen", "openai", "--url", server.url, "--sessions", "1", "--requests", "6",
        "--turns", "6", "--record", str(record), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    await asyncio.wait_for(begun.wait(), 60)
    process.send_signal(signal.SIGINT)
    out, _ = await process.communicate()
    assert process.returncode == 130
    assert "2 answered, 1 failed" in out.decode()
    assert "interrupted" in out.decode()
    assert [one.failure for one in read_records(record)] == ["", "", "interrupted"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--sessions", "1"], "--duration, --requests"),
        ([*SHORT, "--token-ids", "5"], "--token-ids"),
        ([*SHORT, "--class", "nobody"], "--class"),
        ([*SHORT, "--class", "chat=-1"], "--class"),
        ([*SHORT, "--priority", "x"], "--priority"),
        ([*SHORT, "--api-key-env", "NO_SUCH_VARIABLE_HERE"], "NO_SUCH_VARIABLE_HERE"),
        ([*SHORT, "--json", "/no/such/folder/x"], "--json: folder"),
        ([*SHORT, "--record", "/no/such/folder/x"], "--record: folder"),
        ([*SHORT, "--json", "same", "--record", "same"], "for both"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["loadgen", "openai", "--url", "http://127.0.0.1:1", *arguments]) == 2
    assert told in capsys.readouterr().err
    assert alone.main(["openai", "--url", "http://127.0.0.1:1", *arguments]) == 2, "alone as in tidegate"


def test_a_server_that_is_not_there_is_exit_code_1(unused_tcp_port: int, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    assert cli.main(["loadgen", "openai", "--url", url, *SHORT]) == 1
    assert alone.main(["openai", "--url", url, *SHORT]) == 1
    assert "is the server running?" in capsys.readouterr().err


def test_records_survive_their_file_with_nan(tmp_path: Path) -> None:
    one = RequestRecord(session=1, turn=2, service_class="chat", intended_s=0.5, sent_s=NAN, end_s=1.0, text="ä")
    with RecordFile(tmp_path / "r") as file:
        file.write(one)
        file.commit()
    (back,) = read_records(tmp_path / "r")
    assert repr(back) == repr(one)


def test_a_record_file_that_was_not_finished_is_not_there(tmp_path: Path) -> None:
    with RecordFile(tmp_path / "r") as file:
        file.write(RequestRecord(session=1, turn=2, service_class="chat", intended_s=0.5, sent_s=0.5, end_s=1.0))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{}\n", "x\n", '{"session": "a"}\n'])
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "r").write_text(text)
    with pytest.raises(UserError, match="line 1"):
        read_records(tmp_path / "r")
    assert cli.main(["loadgen", "compare", str(tmp_path / "r"), str(tmp_path / "none")]) == 2
