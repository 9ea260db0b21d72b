"""The gradient benchmark's own side; the other is no dependency."""

from __future__ import annotations

import importlib

import pytest

from loadgen.bench import gradient
from services.errors import UserError
from services.learner.settings import Settings


def test_our_side_makes_the_steps_that_it_is_timed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(*arguments: object) -> None:
        made.append(arguments[-1])

    monkeypatch.setattr(gradient, "update", counted)
    gradient.our_steps(Settings(hidden=(8,)), seed=0)(24)
    assert sum(made) == 24


def test_without_the_other_side_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UserError, match="pip install stable-baselines3"):
        gradient.bench_gradient()
