"""A gauge that contradicts the others is not believed; ordinary moments are."""

from __future__ import annotations

import math

import pytest

from services.telemetry.sources.contradictions import contradictions


@pytest.mark.parametrize(
    ("values", "gained", "metric"),
    [
        ({"kv_bytes": 0, "running": 8, "waiting": 0}, {"output_tokens": 50.0}, "kv_bytes"),
        ({"kv_bytes": 0, "running": 8, "waiting": 0}, {}, "kv_bytes"),
        ({"kv_bytes": 200, "running": 1, "waiting": 0}, {}, "kv_bytes"),
        ({"kv_bytes": 10, "running": 1, "waiting": 3, "waiting_for_memory": 3}, {}, "waiting_for_memory"),
        ({"kv_bytes": 90, "running": 1, "waiting": 1, "waiting_for_memory": 3}, {}, "waiting_for_memory"),
        ({"kv_bytes": 0, "running": 0, "waiting": 0}, {"output_tokens": 9.0, "finished": 0.0}, "running"),
        ({"kv_bytes": 9, "running": 1, "waiting": 0, "prefilling": 2}, {}, "prefilling"),
    ],
)
def test_what_cannot_be_is_named(values: dict[str, float], gained: dict[str, float], metric: str) -> None:
    found = contradictions(values, gained, 100.0)
    assert [name for name, _ in found] == [metric]


@pytest.mark.parametrize(
    ("values", "gained"),
    [
        ({"kv_bytes": 0, "running": 0, "waiting": 0}, {"output_tokens": 0.0, "finished": 0.0}),
        ({"kv_bytes": 0, "running": 2, "waiting": 0}, {"output_tokens": 5.0}),
        ({"kv_bytes": 0, "running": 8, "waiting": 0}, {"output_tokens": 0.0}),
        ({"kv_bytes": 0, "running": 0, "waiting": 0}, {"output_tokens": 90.0, "finished": 3.0}),
        ({"kv_bytes": 90, "running": 3, "waiting": 4, "waiting_for_memory": 4}, {"output_tokens": 5.0}),
        ({"kv_bytes": math.nan, "running": math.nan, "waiting": math.nan, "waiting_for_memory": math.nan}, {}),
        ({}, {}),
    ],
    ids=["idle", "two short ones", "not begun", "short ones between two pages", "memory is short", "nan", "nothing"],
)
def test_ordinary_moments_are_believed(values: dict[str, float], gained: dict[str, float]) -> None:
    assert contradictions(values, gained, 100.0) == []
