"""The calibration report on sessions whose law is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.bench.returns import render, return_report
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
        assert sum(band.count for band in question.bands) == question.asked
    assert any("class median" in line for line in render(report))


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
