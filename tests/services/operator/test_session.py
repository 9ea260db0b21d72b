"""The commands as a process runs them: a server, the usual settings, exit codes; and times as people write them."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services import cli
from services.bus.embedded import EmbeddedServer
from services.errors import UserError
from services.operator import session


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("15m", 900), ("1h", 3600), ("1.5h", 5400), ("2d", 172_800)]
)
def test_durations(text: str, seconds: float) -> None:
    assert session.duration_s(text) == seconds
    assert session.expiry_ns(text, 10) == 10 + seconds * 1e9
    assert abs(session.moment_ns(text) - (time.time_ns() - seconds * 1e9)) < 10e9


@pytest.mark.parametrize("text", ["", "0", "-1h", "1 h", "1y", "inf", "999999d"])
def test_what_is_no_duration_is_a_mistake(text: str) -> None:
    with pytest.raises(UserError, match="such as 90s"):
        session.duration_s(text)


def test_moments() -> None:
    assert session.moment_ns("2026-01-02T03:04:05") == session.moment_ns("2026-01-02T04:04:05+01:00")
    assert session.shown_time(session.moment_ns("2026-01-02T03:04:05Z")) == "2026-01-02T03:04:05Z"
    assert session.shown_time(0) == session.shown_time(10**15) == "-"


async def test_a_change_on_a_real_server_is_there_for_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = EmbeddedServer(tmp_path / "nats")
    await server.start()
    monkeypatch.setenv("TIDEGATE_COMMON_NATS_USER", server.user)
    monkeypatch.setenv("TIDEGATE_COMMON_NATS_PASSWORD", server.password)
    monkeypatch.setenv("USER", "ann")

    async def typed(*words: str) -> tuple[int, str, str]:
        code = await asyncio.to_thread(cli.main, [*words, "--url", server.url])
        return code, *capsys.readouterr()

    try:
        code, out, _ = await typed("mode", "shadow", "--why", "first look")
        assert (code, "mode: shadow, by ann" in out) == (0, True)
        code, out, err = await typed("mode", "enforce", "--why", "seen it", "--revision", "0")
        assert (code, out) == (1, "")
        assert "revision 0 was expected, found revision 1: shadow, by ann" in err
        assert err.count("\n") == 1
        code, out, _ = await typed("audit")
        assert (code, "tg_config/mode revision 1: shadow, by ann" in out) == (0, True)
        code, out, _ = await typed("status", "--wait", "0.05")
        assert (code, "mode: shadow, by ann" in out) == (1, True)
        code, _, err = await typed("explain", "n0/0/w0", "--wait", "0.05")
        assert (code, "there is no audit stream" in err) == (1, True)
        code, out, _ = await typed("policy", "list")
        assert (code, "the heuristic acts" in out) == (0, True)
        code, _, err = await typed("mode", "off", "--why", "x", "--share", "0.5")
        assert (code, "only canary" in err) == (2, True)
        code, _, err = await typed("mode", "off", "--why", "x", "--worker", "w0")
        assert (code, err.count("\n")) == (2, 1)
        code, _, err = await typed("mode", "off", "--why", "x", "--worker", "n0/0/w7")
        assert (code, "nothing was heard of node n0: the order stands when it comes" in err) == (0, True)
    finally:
        await server.stop()


def test_a_server_that_nobody_reaches_is_no_mistake_in_what_was_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TIDEGATE_COMMON_CONNECT_TIMEOUT_S", "0.2")
    assert cli.main(["status", "--url", "nats://127.0.0.1:1"]) == 1
    assert "nats_url nats://127.0.0.1:1: found no NATS server" in capsys.readouterr().err
    assert cli.main(["status", "--url", "http://127.0.0.1:1"]) == 2
    assert "found scheme 'http', expected one of nats" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["mode", "off", "--worker", "", "--why", "x"],
        ["mode", "off", "--class", "", "--why", "x"],
        ["mode", "off", "--who", "", "--why", "x"],
        ["mode", "off", "--revision", "-1", "--why", "x"],
        ["status", "--url", ""],
        ["status", "--wait", "nan"],
        ["status", "--wait", "0"],
        ["status", "--wait", "inf"],
        ["audit", "--worker", ""],
        ["policy", "pin", "", "--why", "x"],
    ],
)
def test_an_empty_or_impossible_word_is_a_mistake_and_never_means_everybody(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "found" in capsys.readouterr().err


def test_what_others_wrote_stays_on_its_line() -> None:
    assert session.one_line("a\nb\x1b[2Jc") == "a b [2Jc"
