"""`tidegate bench loop` as its caller sees it: a short real run, and mistakes in what was asked."""

from __future__ import annotations

import functools
import json

import pytest

from loadgen.bench import loop
from loadgen.bench.loop import SERVICES, bench_loop, payload_bytes
from services import cli
from services.errors import UserError

KEYS = {
    "workers", "latency_p50_ms", "latency_p99_ms", "dropped", "cpu_s_per_step", "bare_hops_p50_ms", "ratio_p50",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_loses_nothing_and_gives_every_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "bench_loop", functools.partial(bench_loop, step_s=1.0))  # half of the system's own
    path = tmp_path / "loop.json"
    asked = ["bench", "loop", "--workers", "16", "--per-node", "8", "--seconds", "2", "--json", str(path)]
    assert cli.main(asked) == 0
    figures = json.loads(path.read_text())
    assert figures.keys() >= KEYS
    assert figures["workers"] == 16
    assert figures["dropped"] == 0, figures["dropped_by"]
    assert 0 < figures["latency_p50_ms"] <= figures["latency_p99_ms"]
    assert figures["bare_hops_p50_ms"] > 0
    assert figures["ratio_p50"] > 0
    assert figures["cpu_s_per_step"].keys() == set(SERVICES), "all five services ran"
    assert figures["transitions_per_step"] == 16, "the learner's side of the loop is measured too"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((12, 8, 4.0), "--workers: found 12, expected a multiple of --per-node 8"),
        ((0, 8, 4.0), "--workers: found 0"),
        ((8, 0, 4.0), "--per-node: found 0, expected 1 to 64"),
        ((650, 65, 4.0), "--per-node: found 65"),
        ((8, 8, 3.9), "--seconds: found 3.9, expected 4"),
        ((8, 8, float("nan")), "--seconds: found nan"),
        ((8, 8, float("inf")), "--seconds: found inf"),
    ],
)
def test_impossible_numbers_are_the_callers_mistake(arguments, told):
    with pytest.raises(UserError, match=told):
        bench_loop(*arguments)


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    assert cli.main(["bench", "loop", "--workers", "12"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_bare_messages_are_as_large_as_those_of_the_loop():
    small, large = payload_bytes(1), payload_bytes(8)
    assert all(a < b < 8 * a for a, b in zip(small, large, strict=True))
