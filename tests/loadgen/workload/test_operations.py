"""Any workload stays a sound one whatever is done to it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workload import Workload, info, render
from loadgen.workload.lengths import fitted
from loadgen.workload.published import FIGURES
from loadgen.workload.sessions import SessionModel, step_of
from tests.loadgen.workload.tables import workload

SESSION = st.tuples(
    st.floats(0.0, 99.0),
    st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 500), st.floats(0.0, 60.0)), min_size=1, max_size=5),
)


def made(sessions: list[tuple[float, list[tuple[int, int, float]]]], pairs: bool) -> Workload:
    """A workload of these sessions; ``pairs`` puts two and two into a group."""
    arrival, prompt, output, following, think, cached, group = [], [], [], [], [], [], []
    for number, (start_s, turns) in enumerate(sessions):
        for turn, (prompt_tokens, output_tokens, think_s) in enumerate(turns):
            last = turn == len(turns) - 1
            arrival.append(float("nan") if turn else start_s)
            shared = min(prompt[-1] + output[-1], prompt_tokens - 1) if turn else 0
            prompt.append(prompt_tokens)
            output.append(output_tokens)
            cached.append(shared)
            following.append(-1 if last else len(arrival))
            think.append(0.0 if last else think_s)
            group.append(number // 2 if pairs else number)
    return workload(arrival, prompt, output, following, think, cached, group)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(SESSION, min_size=1, max_size=8),
    st.booleans(),
    st.floats(0.05, 5.0),
    st.floats(1.0, 300.0),
    st.floats(0.0, 200.0),
    st.integers(1, 4000),
)
def test_cutting_scaling_and_sharing_out_keep_every_promise(
    sessions: list[tuple[float, list[tuple[int, int, float]]]],
    pairs: bool,
    factor: float,
    duration_s: float,
    start_s: float,
    context_tokens: int,
) -> None:
    whole = made(sessions, pairs)
    scaled = whole.scaled(factor, seed=1).check()
    window = scaled.window(duration_s, start_s).check()
    fitting = window.within_context(context_tokens).check()
    excerpt = dataclasses.replace(fitting, warm_start_s=5.0).looped(2.5 * duration_s).excerpt(duration_s).check()
    assert render(info(excerpt))
    firsts = excerpt.requests.arrival_s[excerpt.requests.is_first]
    assert (firsts < duration_s).all()
    assert (fitting.requests.prompt_tokens + fitting.requests.output_tokens <= context_tokens).all()
    shares = scaled.assign(2, seed=1)
    assert sum(len(table.check()) for table in shares) == len(scaled)
    apart = [set(table.session.tolist()) for table in shares]
    assert not apart[0] & apart[1], "a session stays with one worker"


def test_lengths_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 < p50 < p99"):
        fitted(100, 200, 150)
    with pytest.raises(ValueError, match="mean 5000"):
        fitted(5000, 200, 1000)


def test_reuse_beyond_what_short_sessions_allow_is_refused() -> None:
    figures = FIGURES["long"]
    model = SessionModel(
        prompt=fitted(*figures.prompt),
        output=fitted(*figures.output),
        prefix_reuse=0.9,
        turns_mean=2.0,
        think_p50_s=10.0,
        think_p90_s=20.0,
    )
    with pytest.raises(ValueError, match=r"prefix_reuse 0\.9: expected below"):
        step_of(model)


def test_quantiles_rise() -> None:
    for figures in FIGURES.values():
        values = fitted(*figures.prompt).quantile(np.linspace(0.001, 0.999, 999))
        assert (np.diff(values) >= 0).all()
