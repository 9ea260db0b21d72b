"""What knowing returns is worth: three sources on the same tables."""

from __future__ import annotations

import pytest

from loadgen.bench import returns_worth
from loadgen.bench.returns_worth import render

SMALL = "a100-2x8b-chat-agent"


def test_the_three_sources_are_compared_on_the_same_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(returns_worth, "TEACHING_S", 300.0)
    report = returns_worth.returns_worth(seeds=(11,), duration_s=40.0, names=(SMALL,))
    assert report.gaps == "one law"
    assert [one.control for one in report.controls] == ["heuristic", "rho 1.3, watermark"]
    for told in report.controls:
        assert [one.name for one in told.configurations] == [SMALL]
        one = told.whole
        assert one.pairs == 1
        for ratio in (one.table_over_median, one.oracle_over_median):
            assert ratio.ci95[0] <= ratio.ratio <= ratio.ci95[1]
            assert 0.5 < ratio.ratio < 2.0
        assert 0 <= one.wrongly_ended <= 1
    assert any(SMALL in line for line in render(report))


def test_the_same_seed_gives_the_same_ratio() -> None:
    assert returns_worth._ratio([2.0, 4.0], [1.0, 2.0]).ratio == pytest.approx(2.0)
    assert returns_worth._ratio([1.0, 4.0], [1.0, 2.0]) == returns_worth._ratio([1.0, 4.0], [1.0, 2.0])
