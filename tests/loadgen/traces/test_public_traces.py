"""The public traces come out with their published figures, quickly enough to wait for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from loadgen.traces import azure_split, read, session_split
from loadgen.workload import info


def test_azure_chat_has_its_published_figures_and_split(shared_dir: Path) -> None:
    whole = read(shared_dir / "traces/azure-2023/AzureLLMInferenceTrace_conv.csv.gz")
    described = info(whole)
    assert described.requests == 19_366
    assert (described.prompt.mean, described.prompt.p50, described.prompt.p99) == pytest.approx(
        (1155, 1020, 4142), rel=0.001
    )
    assert (described.output.mean, described.output.p50, described.output.p99) == pytest.approx(
        (211, 129, 601), rel=0.001
    )
    assert described.requests_per_s == pytest.approx(5.5, rel=0.01)
    assert described.arrival_cv == pytest.approx(1.1, abs=0.02)
    train, validate = azure_split(whole)
    assert len(train) + len(validate) == len(whole)
    assert train.duration_s == 2400.0
    assert train.requests.arrival_s.max() < 2400.0


def test_weka_sessions_have_their_published_figures_and_split(shared_dir: Path) -> None:
    whole = read(shared_dir / "traces/weka-agentic-coding/requests.csv.gz")
    described = info(whole)
    assert len(whole) == 39_004 - 22
    assert len(np.unique(whole.group)) == 567
    assert described.prefix_reuse == pytest.approx(0.96, abs=0.005)
    assert (described.think.p50, described.think.p90) == pytest.approx((10, 160), rel=0.05)
    train, validate = session_split(whole)
    assert set((train.group % 5).tolist()) == {0, 1, 2}
    assert set((validate.group % 5).tolist()) == {3}
    for table in whole.within_context(131_072).assign(2):
        table.check()
    excerpt = whole.excerpt(600.0).check()
    assert len(excerpt) / 600.0 > 0.3 * described.requests_per_s, "an excerpt meets sessions that are under way"


def test_mooncake_reuse_is_mostly_inside_sessions(shared_dir: Path) -> None:
    whole = read(shared_dir / "traces/mooncake/synthetic_trace.jsonl.gz")
    described = info(whole)
    assert described.requests == 3_993
    assert described.prefix_reuse == pytest.approx(0.63, abs=0.02), "of the 65 % that the ids hold in all"
    assert described.sessions > 100


def test_servegen_day_is_read(shared_dir: Path) -> None:
    whole = read(shared_dir / "traces/servegen/generated_m-large_day4_1rps.csv.gz")
    assert len(whole) == 84_684
