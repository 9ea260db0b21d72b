"""A mistake in what was asked: one line, exit code 2, before anything is started or written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from loadgen.demo.plan import Plan
from loadgen.engine.specs import FleetConfig
from loadgen.load import UnitLoad
from loadgen.policies import policy_named, with_admission
from loadgen.workload import builtin
from services import cli

BAD_LINE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,374,44\n2023-11-16 18:17:04,many,5\n"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text(BAD_LINE)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--card", "RTX-9"], ["RTX-9", "A100-80G"]),
        (["--model", "GPT-9"], ["GPT-9", "Llama-3.1-8B"]),
        (["--workload", "poetry"], ["poetry", "agent"]),
        (["--class", "royal"], ["--class", "royal", "copilot"]),
        (["--trace", "absent.csv"], ["absent.csv"]),
        (["--trace", "bad.csv"], ["bad.csv", "3", "ContextTokens", "many"]),
        (["--policy", "luck"], ["--policy", "luck", "heuristic"]),
        (["--admission", "lifo"], ["--admission", "lifo", "deadline_cap_shed"]),
        (["--policy", "fixed:9"], ["--policy", "fixed:9", "1.0 to 1.6"]),
        (["--json", "absent/demo.json"], ["--json", "absent", "does not exist"]),
        (["--trace-out", "absent/spans.jsonl"], ["--trace-out", "absent"]),
        (["--json", "."], ["--json", "expected the name of a file"]),
        (["--trace-out", "."], ["--trace-out", "expected the name of a file"]),
        (["--trace", "."], ["directory"]),
        (["--keep", "bad.csv"], ["--keep", "bad.csv", "expected a folder"]),
        (["--keep", "bad.csv/run"], ["--keep", "bad.csv/run", "expected a folder"]),
        (["--keep", "."], ["--keep", "not empty"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--nodes", "0"], ["--nodes", "found 0"]),
        (["--workers-per-card", "4"], ["--workers-per-card", "found 4", "1 to 3"]),
        (["--load", "nan"], ["--load", "nan"]),
        (["--speed", "-1"], ["--speed", "-1"]),
        (["--duration", "1"], ["--duration", "found 1", "20"]),
        (["--context-scale", "0"], ["--context-scale", "found 0"]),
        (["--model", "Llama-3.1-70B-4bit", "--card", "A100-80G", "--workers-per-card", "3"], ["70B", "A100"]),
    ],
)
def test_a_mistake_is_told_in_one_line(
    arguments: list[str], told: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["demo", "--plain", "--duration", "40", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("tidegate: ")
    assert err.count("\n") == 1, f"one line, no trace: {err}"
    for part in told:
        assert part in err, err
    assert {path.name for path in tmp_path.iterdir()} == {"bad.csv"}, "nothing was written"


@pytest.mark.parametrize("arguments", [["--seed", "lucky"], ["--nodes", "1.5"], ["--spede", "1"]])
def test_what_argparse_finds_has_the_same_exit_code(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *arguments])
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_the_admission_is_the_live_nodes() -> None:
    fleet = FleetConfig()
    plan = Plan(
        workload=builtin("chat", duration_s=60.0, seed=1),
        fleet=fleet,
        unit=UnitLoad(factor=1.0, share=0.85),
        tables=[],
        duration_s=60.0,
        admission="deadline_shed",
    )
    mode = plan.live_fleet().mode
    assert (mode.order, mode.running_cap, mode.shed, mode.prefetch) == ("deadline", False, True, False)
    acting = with_admission(policy_named("heuristic"), "deadline_shed").mode
    assert plan.node_fleet().mode == acting, "candidates are judged on the engines that they would act on"
    assert mode == msgspec.structs.replace(acting, prefetch=False), "the actuator brings sessions back itself"
