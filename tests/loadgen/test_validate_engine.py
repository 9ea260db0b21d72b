"""The engine against measured timings, where they are at hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.validate_engine import render, validate
from services.errors import UserError


def test_a_measured_run_is_reproduced_within_its_stated_errors(shared_dir: Path) -> None:
    found = validate(shared_dir / "calibration")
    assert max(one.mean_abs for one in found.iteration_times) < 0.10
    figures = {one.figure: one for one in found.run.figures}
    assert abs(figures["whole run"].error) < 0.08
    for name in ("TPOT p50", "TPOT p90", "TPOT p99"):
        assert abs(figures[name].error) < 0.10, "nothing of the run was fitted"
    assert abs(figures["TTFT p90"].error) < 0.25, "a queue adds the errors of all before it up"
    assert found.run.tpot_mean_abs_error < 0.10
    assert any("measured run: 300 requests" in line for line in render(found))


def test_a_folder_without_the_files_is_a_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="derived_iteration_times"):
        validate(tmp_path)
