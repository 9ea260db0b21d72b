"""The tables of docs/telemetry.md are what the sources declare."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.features import FEATURES
from schemas.metrics import METRICS
from services.telemetry.sources.presence_table import SOURCES, features_table, inputs, metrics_table
from services.telemetry.sources.said import Presence, provides

PAGE = Path(__file__).parents[4] / "docs" / "telemetry.md"
ALWAYS_KNOWN = ("class_", "since_")


@pytest.mark.parametrize("table", [metrics_table(), features_table()], ids=["metrics", "features"])
def test_the_page_holds_the_table(table: str) -> None:
    assert table in PAGE.read_text(encoding="utf-8"), f"docs/telemetry.md: expected this table:\n{table}"


def test_every_feature_is_made_of_metrics_or_known_to_the_featurizer_itself() -> None:
    without = [feature.name for feature in FEATURES if not inputs(feature.name, feature.formula)]
    assert all(name.startswith(ALWAYS_KNOWN) for name in without), without


def test_every_source_speaks_of_every_metric() -> None:
    for name, source in SOURCES.items():
        assert set(source) == {metric.name for metric in METRICS}, name


def test_an_engines_page_alone_has_all_that_is_required() -> None:
    required = [metric.name for metric in METRICS if metric.required]
    for kind in ("vLLM", "SGLang", "Triton"):
        assert not [name for name in required if SOURCES[kind][name] is Presence.ABSENT], kind


def test_a_declaration_names_each_metric_once() -> None:
    with pytest.raises(ValueError, match="named twice"):
        provides({Presence.MEASURED: ("rho",), Presence.FACT: ("rho",)})
    with pytest.raises(ValueError, match="expected a name of METRICS"):
        provides({Presence.MEASURED: ("rhoo",)})
