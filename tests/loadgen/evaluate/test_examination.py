"""The whole examination, quickly: complete, resumable, repeatable, and a page that says what the numbers say."""

from __future__ import annotations

import argparse
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from loadgen.bench.returns_scores import Question, Reliability
from loadgen.evaluate import cli, matrix, runs
from loadgen.evaluate.cache import Cache
from loadgen.evaluate.matrix import QUICK, SYSTEM_ADMISSION
from loadgen.evaluate.pool import run_all
from schemas.actions import Action
from services.errors import UserError
from tests.loadgen.evaluate.test_entrants import _network as network

FIGURES = {
    "goodput_tokens_per_s", "ci95", "hbm_utilisation", "queue_wait_p99_s", "tpot_p99_ms", "preemptions", "oom",
    "oom_upper_bound_per_week",
}  # fmt: skip
RATIO = {"ratio", "ci95"}


def _parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return parser.parse_args(options)


class Examined(NamedTuple):
    """What one quick run left behind."""

    options: tuple[str, ...]
    json: dict[str, Any]
    html: str
    said: str
    folder: Path


@pytest.fixture(scope="module")
def examined(tmp_path_factory: pytest.TempPathFactory) -> Examined:
    folder = tmp_path_factory.mktemp("examined")
    policies = [str(network(folder / name, action)) for name, action in (("one", Action.EVICT), ("two", Action.HOLD))]
    log = folder / "training.jsonl"
    log.write_text(
        '{"note": "no point"}\n{"transitions": 10, "ratio": 0.9, "worst": 0.5}\n{"transitions": 20, "ratio": 1}\n'
    )
    question = Question(
        "ended", 9, 0.1, 0.1, 0.2, 0.3, 0.05, 0.06, 0.07, 0.01, 0.02, Reliability((0.05,), (0.06,), (9,))
    )
    (folder / "returns.json").write_bytes(msgspec.json.encode({"questions": [question], "trace": "as bench writes it"}))
    options = (
        "--quick", "--seconds", "40", "--jobs", "1", "--policy", *policies, "--extra", "heuristic-no_evict",
        "--json", str(folder / "out.json"), "--html", str(folder / "out.html"), "--cache", str(folder / "cache"),
        "--training-log", str(log), "--returns", str(folder / "returns.json"),
    )  # fmt: skip
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "_say", said.extend)
        assert cli.run(_parsed(*options)) == 0
    found = json.loads((folder / "out.json").read_text())
    return Examined(options, found, (folder / "out.html").read_text(), "\n".join(said), folder)


def test_every_key_that_was_promised_is_there(examined: Examined) -> None:
    result = examined.json
    for policy in (
        "static", "rho_1.0", "fixed_best", "vllm_recompute", "vllm_offload", "one_line", "heuristic",
        "heuristic_tuned", "random", "hindsight", "dqn",
    ):  # fmt: skip
        for admission in ("fcfs", SYSTEM_ADMISSION):
            assert set(result["policies"][policy][admission]) == FIGURES, (policy, admission)
    system, dqn = result["system"], result["dqn"]
    for name in ("vs_vllm_offload_fcfs", "vs_vllm_offload_timeouts", "vs_vllm_offload_equal_admission"):
        assert set(system[name]) == RATIO
    for name in ("vs_universal", "vs_universal_with_cap", "vs_tuned_per_configuration", "vs_hindsight"):
        assert set(dqn[name]) == RATIO
    for worst in (system["worst_configuration"], dqn["worst_configuration"]):
        assert set(worst) >= RATIO
        assert worst["configuration"] in {regime["configuration"] for regime in result["regimes"]}
    assert len(dqn["seeds"]) == 2, "one for each training seed's file"
    for regime in result["regimes"]:
        assert {"configuration", "load", "policies"} == set(regime)
        assert set(regime["policies"]["dqn"][SYSTEM_ADMISSION]) == FIGURES


def test_figures_are_plausible(examined: Examined) -> None:
    for admissions in examined.json["policies"].values():
        for one in admissions.values():
            low, high = one["ci95"]
            assert low <= one["goodput_tokens_per_s"] <= high
            assert 0 < one["hbm_utilisation"] < 1
            assert one["oom"] == 0
            assert one["oom_upper_bound_per_week"] > 0
    best = examined.json["policies"]["hindsight"]["fcfs"]["goodput_tokens_per_s"]
    assert best >= examined.json["policies"]["heuristic"]["fcfs"]["goodput_tokens_per_s"]


def test_a_policy_is_compared_under_the_same_admission_only(examined: Examined) -> None:
    policies, dqn = examined.json["policies"], examined.json["dqn"]
    assert dqn["seeds"][0]["ratio"] == dqn["vs_universal_with_cap"]["ratio"]
    assert dqn["vs_hindsight"]["ratio"] <= dqn["vs_universal_with_cap"]["ratio"] + 1e-9
    assert "heuristic-no_evict" in policies
    assert set(examined.json["ablations"]["heuristic-no_evict"]) == RATIO


def test_a_second_run_takes_everything_from_the_cache(examined: Examined, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(task: runs.Task) -> runs.Done:
        raise AssertionError(f"ran {task.cell} again")

    monkeypatch.setattr("loadgen.evaluate.pool.run", never)
    monkeypatch.setattr(cli, "_say", lambda lines: None)
    namespace = _parsed(*examined.options)
    namespace.html = None
    assert cli.run(namespace) == 0
    again = json.loads((examined.folder / "out.json").read_text())
    for part in ("policies", "system", "dqn", "regimes"):
        assert again[part] == examined.json[part]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(QUICK, seconds=20.0)
    cells = [cell for cell in matrix.cells(plan, []) if cell.entrant.name == "static"][:2]
    groups = matrix.blocks(plan)
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(cells, groups, Cache(tmp_path), 1, interrupt)
    kept = Cache(tmp_path)
    assert kept.load() > 0, "the first task's rows were kept before it was told"
    rows, cost = run_all(cells, groups, kept, 1, lines.append)
    assert cost.cached_worker_steps == cost.worker_steps, "one of two tasks was there"
    fresh, _ = run_all(cells, groups, Cache(None), 1, lines.append)
    assert sorted(map(repr, rows)) == sorted(map(repr, fresh)), "and the rows are those of a run in one go"


class _Page(HTMLParser):
    """Tags that are open, tables and plots."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.ids: list[str] = []
        self.counts: dict[str, int] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.ids += [value or "" for name, value in attrs if name == "id"]
        for name, value in attrs:
            assert not (name in ("src", "href") and value and value.startswith("http")), "the page stands alone"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def test_the_page_parses_and_holds_tables_and_plots(examined: Examined) -> None:
    page = _Page()
    page.feed(examined.html)
    assert page.open == []
    assert page.counts["table"] >= 2
    assert page.counts["svg"] >= 8, "goodput, regimes, tails, actions, three of losses, learning, reliability"
    assert len(page.ids) == len(set(page.ids)), "plots do not share names"
    assert {"static", "hindsight", SYSTEM_ADMISSION, "dqn.vs_universal", "heuristic_tuned"} <= set(page.cells)
    goodput = examined.json["policies"]["static"]["fcfs"]["goodput_tokens_per_s"]
    assert f"{goodput:,.1f}" in page.cells


def test_the_terminal_says_what_was_sampled_and_what_it_cost(examined: Examined) -> None:
    assert "configurations x 2 traces of 40 s" in examined.said
    assert "worker-steps in" in examined.said


def test_the_terminal_and_the_page_say_what_each_name_stands_for(examined: Examined) -> None:
    for told in (examined.said, examined.html):
        assert "over vllm_offload fcfs, clients wait for ever on both sides" in told
        assert "card-seconds a token within the SLO, static first-come = 100" in told


def test_the_page_names_the_best_that_could_be_run_and_how_far_others_fall_behind(examined: Examined) -> None:
    runnable = [
        (one["goodput_tokens_per_s"], policy)
        for policy, admissions in examined.json["policies"].items()
        for one in admissions.values()
        if policy not in ("hindsight", "fixed_best", "heuristic_tuned") and "-" not in policy
    ]
    named = examined.html.partition("The best mean is ")[2].partition(" under ")[0]
    assert max(runnable)[0] == max(goodput for goodput, policy in runnable if policy == named), "no ablation, no choice"
    assert examined.html.count("Below 1 on ") == 3, "for each pair, whether or not it is certain"


def test_mistakes_are_told_before_anything_runs(tmp_path: Path) -> None:
    for options, said in (
        (("--traces", "1"), "at least 2 traces"),
        (("--jobs", "0"), "--jobs"),
        (("--json", str(tmp_path / "no" / "x")), "does not exist"),
        (("--policy", str(tmp_path / "missing")), "missing"),
        (("--adversarial", "0"), "--adversarial"),
        (("--returns", str(tmp_path / "missing")), "--returns"),
        (("--policy", __file__), "test_examination.py: weights: .* no safetensors"),
        (("--seconds", "nan"), "--seconds: found nan"),
        (("--seconds", "inf"), "--seconds: found inf"),
        (("--seconds", "0.5"), "the time of one decision"),
        (("--json", str(tmp_path / "x"), "--html", str(tmp_path / "x")), "expected two files"),
        (("--adversarial", "9", "--html", str(tmp_path / "x")), "--html: found beside --adversarial"),
        (("--scenario", "article", "--extra", "heuristic-no_evict"), "--extra: found beside --scenario article"),
    ):
        with pytest.raises(UserError, match=said):
            cli.run(_parsed(*options))
