"""The calibration report on sessions whose law is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.bench import returns
from loadgen.bench.returns import bench_returns, render, return_report
from services.errors import UserError


def table(path: Path, sessions: range) -> Path:
    """A session table: every second session is slow (60 s +-), the others quick (5 s +-), 30 turns each."""
    rng = np.random.default_rng(0)
    lines = ["trace_id,t_s,prompt_tokens,output_tokens,think_time_s"]
    for session in sessions:
        mean_s = 60.0 if session % 2 else 5.0
        for turn in range(30):
            gap_s = rng.gamma(20.0, mean_s / 20.0)
            lines.append(f"trace_{session:04d},{turn * 100},{100 + turn},10,{gap_s:.2f}")
    path.write_text("\n".join(lines))
    return path


def test_histories_beat_the_class_and_chances_come_true(tmp_path: Path) -> None:
    report = return_report(table(tmp_path / "sessions.csv", range(1, 120)))
    assert report.validate_sessions == 24
    assert report.gap_error_s < report.gap_error_class_s / 2
    for question in report.questions:
        if question.name.startswith("back within") and question.name != "back within 600 s":
            assert question.log_loss < question.log_loss_class
            assert question.error < 0.1, question
            assert question.brier < question.brier_class
        diagram = question.reliability
        assert sum(diagram.count) == question.asked
        assert len(diagram.predicted) == len(diagram.observed) == len(diagram.count) <= 10
        assert list(diagram.predicted) == sorted(diagram.predicted)
    assert any("class median" in line for line in render(report))


def test_endings_are_scored_beside_doing_without_them(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    lines = ["trace_id,t_s,prompt_tokens,output_tokens,think_time_s,stop"]
    for session in range(1, 60):
        gap_s = 0.0
        for turn in range(20):
            stop = rng.choice(["tool_use", "end_turn", ""], p=[0.6, 0.3, 0.1])
            lines.append(f"trace_{session:04d},{turn * 100},{100 + turn},10,{gap_s:.2f},{stop}")
            gap_s = rng.gamma(4.0, (150.0 if stop == "end_turn" else 5.0) / 4.0)
    file = tmp_path / "sessions.csv"
    file.write_text("\n".join(lines))
    report = return_report(file, variants=True)
    shown = {one.name: one for one in report.variants}
    assert shown["endings"].log_loss[1] < shown["no endings"].log_loss[1] - 0.1
    assert shown["endings"].log_loss == tuple(one.log_loss for one in report.questions[:3])
    assert shown["endings"].log_loss[1] < shown["endings, asked at the turn's end only"].log_loss[1] - 0.1
    assert any("surest tenth" in line for line in render(report))
    assert return_report(table(tmp_path / "silent.csv", range(1, 40)), variants=True).variants == ()


def test_the_later_part_is_examined_with_what_the_earlier_taught(tmp_path: Path) -> None:
    report = return_report(table(tmp_path / "sessions.csv", range(1, 120)))
    assert report.later is not None
    assert report.later.train_waits > report.later.validate_waits > 500
    assert report.later.gap_error_s < report.later.gap_error_class_s / 2
    assert report.later.hour_factors == (), "the sessions' clock is drawn: no hour may show an effect"


def test_clients_rates_are_examined_by_later_days(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns, "CLIENT_RATE_PER_S", 0.02)
    file = tmp_path / "rates.csv"
    hours = np.arange(0, 6 * 86_400, 600)
    lines = [
        f"{client},{second},{(1 + 5 * client) * (0.2 if second % 86_400 < 28_800 else 1.0)},1,Gamma,1,1"
        for client in range(3)
        for second in hours.tolist()
    ]
    file.write_text("\n".join(["client,t_s,rate_rps,cv,dist,shape,scale", *lines]))
    report = bench_returns(file)
    assert report.split == "later"
    assert len(report.hour_factors) == 24, "the nights are slower in every client's rates"
    assert max(report.hour_factors[:8]) < min(report.hour_factors[8:])
    assert report.log_loss_with_hours is not None
    assert report.log_loss_without_hours is not None
    assert report.log_loss_with_hours < report.log_loss_without_hours + 0.002, "their own history knows the hour"


def test_a_part_without_sessions_is_the_user_s_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="validation"):
        return_report(table(tmp_path / "sessions.csv", range(1, 3)))


@pytest.mark.slow
def test_the_public_session_trace_is_calibrated(shared_dir: Path) -> None:
    report = return_report(shared_dir / "traces" / "weka-agentic-coding" / "requests.csv.gz")
    assert report.gap_factor < report.gap_factor_class
    for question in report.questions[:3]:
        assert question.log_loss < question.log_loss_class
        assert question.error < 0.05
