"""The `tidegate` command as a process and in one: help, exit codes, one line for a mistake."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from services import cli
from services.errors import BusUnavailable, UserError

MINUTE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:{second:02d}.0000000,{100 + second},{10 + second}\n" for second in range(60)
)


@pytest.fixture
def own_log() -> Iterator[None]:
    """A service in this process sets the log up; what was there before comes back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err
    assert err.count("\n") == 1, f"one line, no trace: {err}"
    assert err.startswith("tidegate")
    return err


BENCHES = ("engine", "loop", "memory", "reclaim", "returns")


@pytest.mark.parametrize("arguments", [[], ["demo"], ["trace", "info"], *(["bench", name] for name in BENCHES)])
def test_help_answers(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*arguments, "--help"])
    assert ended.value.code == 0
    assert "usage: tidegate" in capsys.readouterr().out


def test_help_of_a_service_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "telemetry", "--help"])
    assert ended.value.code == 0
    assert "--node" in capsys.readouterr().out


def test_the_console_command_needs_no_heavy_module_for_help() -> None:
    code = "import sys; from services.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print([m for m in ('torch', 'numba', 'nats', 'opentelemetry.sdk') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", "help answers at once"


@pytest.mark.parametrize("arguments", [[], ["telemetri"], ["--node", "n0"]])
def test_an_unknown_service_names_the_known_ones(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", *arguments]) == 2
    err = said(capsys)
    assert all(name in err for name in cli.SERVICES)


def test_no_command_and_an_unknown_one_are_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2
        assert "usage: tidegate" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["telemetry"], ["actuator"]])
def test_a_service_of_one_node_must_be_told_which(arguments: list[str]) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("TIDEGATE_", "OTEL_"))}
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "run", *arguments], capture_output=True, text=True, env=environ
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "node" in done.stderr


def test_an_unknown_setting_names_the_nearest_one(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["run", "featurizer", "--set", "window_stepps=3"]) == 2
    err = said(capsys)
    assert "window_stepps" in err
    assert "window_steps" in err.replace("window_stepps", "")

    file = tmp_path / "tidegate.toml"
    file.write_text("[featurizer]\nwindow_step = 3\n")
    assert cli.main(["run", "featurizer", "--config", str(file)]) == 2
    err = said(capsys)
    assert str(file) in err
    assert "window_steps" in err


@pytest.mark.usefixtures("own_log")
def test_a_server_that_does_not_answer_is_told_without_its_password(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["common.nats_url=nats://me:secret@127.0.0.1:9", "common.connect_timeout_s=0.2"]
    assert cli.main(["run", "decision", *(part for one in settings for part in ("--set", one))]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "127.0.0.1:9" in lines[-1]
    assert "secret" not in "".join(lines)


def test_trace_info_of_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "minute.csv"
    file.write_text(MINUTE)
    assert cli.main(["trace", "info", str(file)]) == 0
    out = capsys.readouterr().out
    assert "60" in out, "its requests"
    assert "1/s" in out
    assert "sessions" in out


def test_trace_info_of_a_bad_file_gives_line_and_column(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "bad.csv"
    file.write_text(MINUTE.replace("2023-11-16 18:17:07.0000000,107", "2023-11-16 18:17:07.0000000,x"))
    assert cli.main(["trace", "info", str(file)]) == 2
    err = said(capsys)
    assert str(file) in err
    assert "9" in err, "line number"
    assert "ContextTokens" in err
    assert cli.main(["trace", "info", "--skip-bad", str(file)]) == 0
    assert "1" in capsys.readouterr().out


def test_bench_engine_writes_its_figures_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "engine.json"
    assert cli.main(["bench", "engine", "--steps", "10", "--json", str(file)]) == 0
    assert json.loads(file.read_text()) == json.loads(capsys.readouterr().out)
    assert {path.name for path in tmp_path.iterdir()} == {"engine.json"}


def test_bench_returns_examines_the_built_in_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "returns.json"
    assert cli.main(["bench", "returns", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["trace"] == "built-in agent"
    assert figures["validate_sessions"] > 50
    out = capsys.readouterr().out
    assert "return times on built-in agent" in out
    assert all(one["name"] in out for one in figures["questions"])


def test_bench_returns_of_a_trace_in_which_nobody_comes_back_is_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "minute.csv"
    file.write_text(MINUTE)
    assert cli.main(["bench", "returns", "--trace", str(file)]) == 2
    assert "no validation session with a second turn" in said(capsys)


def test_bench_returns_reads_the_sessions_of_a_trace(shared_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = shared_dir / "traces" / "mooncake" / "synthetic_trace.jsonl.gz"
    assert cli.main(["bench", "returns", "--trace", str(trace)]) == 0
    assert "back within 60 s" in capsys.readouterr().out


def test_figures_that_cannot_be_written_are_told_before_the_work(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["bench", "engine"], ["bench", "loop"], ["bench", "returns"]):
        assert cli.main([*command, "--json", "absent/figures.json"]) == 2
        assert "absent" in said(capsys)


def test_ctrl_c_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_trace_info", interrupted)
    assert cli.main(["trace", "info", "any"]) == 130


def test_a_failure_on_purpose_is_told_without_a_trace(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_: object) -> None:
        raise BusUnavailable("nats-server ended with code 1: no space left on device")

    monkeypatch.setattr(cli, "_trace_info", failing)
    assert cli.main(["trace", "info", "any"]) == 1
    assert "no space left" in said(capsys)


def test_a_user_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(_: object) -> None:
        raise UserError("this: found that, expected something else")

    monkeypatch.setattr(cli, "_trace_info", wrong)
    assert cli.main(["trace", "info", "any"]) == 2
    assert said(capsys) == "tidegate: this: found that, expected something else\n"
