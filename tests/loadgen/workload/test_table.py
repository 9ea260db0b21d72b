"""Workloads are cut, scaled, repeated and shared out without breaking sessions."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.workload import Workload, builtin, info, merged
from loadgen.workload.chains import start_times
from loadgen.workload.table import AFTER_TOO_LONG, TOO_LONG
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from tests.loadgen.workload.tables import workload

NAN = float("nan")


def session_of_three() -> Workload:
    return workload(
        [10.0, NAN, NAN, 20.0],
        prompt=[100, 500, 900, 100],
        cached=[0, 110, 510, 0],
        next_turn=[1, 2, -1, -1],
        think_s=[30.0, 30.0, 0, 0],
    )


def test_calls_beyond_the_context_go_with_what_follows_them_and_are_counted() -> None:
    kept = session_of_three().within_context(400).check()
    assert kept.requests.prompt_tokens.tolist() == [100, 100]
    assert kept.left_out == {TOO_LONG: 2, AFTER_TOO_LONG: 0}
    assert kept.requests.max_tokens.tolist() == [300, 300], "capped by what the context leaves"
    again = workload([10.0, NAN, NAN], prompt=[100, 5000, 300], next_turn=[1, 2, -1]).within_context(400)
    assert again.left_out == {TOO_LONG: 1, AFTER_TOO_LONG: 1}
    assert "left out: 1 calls longer than the context" in again.statement()


def test_a_window_cuts_in_open_sessions_as_cold_first_turns() -> None:
    cut = session_of_three().window(50.0, 15.0).check()
    assert cut.requests.prompt_tokens.tolist() == [500, 100], "the third turn is too late"
    assert cut.requests.is_first.all()
    assert cut.requests.cached_tokens.tolist() == [0, 0], "its context is not on the card at the start"
    nominal_s = 10 + (100 / 10_000 + 10 * 0.03) + 30
    assert cut.requests.arrival_s.tolist() == pytest.approx([nominal_s - 15, 5.0])


def test_a_window_from_the_start_keeps_sessions_whole() -> None:
    cut = session_of_three().window(50.0).check()
    assert cut.requests.prompt_tokens.tolist() == [100, 500, 100]
    assert cut.requests.next_turn.tolist() == [1, -1, -1]


def test_looping_repeats_with_new_sessions() -> None:
    longer = session_of_three().looped(250.0).check()
    firsts = longer.requests.arrival_s[longer.requests.is_first]
    assert sorted(firsts.tolist()) == pytest.approx([10, 20, 110, 120, 210, 220])
    assert longer.duration_s == 250.0


@pytest.mark.parametrize("factor", [0.25, 0.8, 1.3, 2.6])
@pytest.mark.parametrize("kind", ["chat", "agent", "mixed"])
def test_scaling_changes_the_rate_and_keeps_the_duration_and_think_times(kind: str, factor: float) -> None:
    whole = builtin(kind, 3000.0, rate_scale=2.0, seed=5, swing=0.0)
    scaled = whole.scaled(factor).check()
    assert scaled.duration_s == whole.duration_s
    assert len(scaled) / len(whole) == pytest.approx(factor, rel=0.15), "thinning by session is a lottery"
    if kind == "agent":
        assert info(scaled).think.p50 == pytest.approx(info(whole).think.p50, rel=0.2), "people think as before"
    firsts = scaled.requests.arrival_s[scaled.requests.is_first]
    assert firsts.min() >= 0
    assert firsts.max() < whole.duration_s


def test_compressed_arrivals_keep_their_burstiness() -> None:
    whole = builtin("chat", 3000.0, seed=5, swing=0.0)
    assert info(whole.scaled(2.0)).arrival_cv == pytest.approx(info(whole).arrival_cv, rel=0.05)


def test_a_higher_factor_keeps_every_session_of_a_lower_one() -> None:
    whole = builtin("agent", 600.0, seed=3)
    few, more = (set(_marks(whole.scaled(factor))) for factor in (0.4, 0.7))
    assert few < more, "a search over factors sees a monotone load"


def _marks(whole: Workload) -> list[tuple[float, int]]:
    """(arrival, prompt) of sessions of several turns: what is thinned and not compressed."""
    table = whole.requests
    rows = np.flatnonzero(table.is_first & (table.next_turn >= 0))
    return [(float(table.arrival_s[row]), int(table.prompt_tokens[row])) for row in rows]


@pytest.mark.parametrize("factor", [0.0, -1.0, NAN, float("inf")])
def test_a_nonsense_factor_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match="rate_factor"):
        session_of_three().scaled(factor)


def test_assignment_is_sticky_balanced_and_complete() -> None:
    whole = builtin("mixed", 1800.0, rate_scale=2.0, seed=2)
    tables = whole.assign(3, seed=1)
    assert sum(len(table) for table in tables) == len(whole)
    for table in tables:
        table.check()  # a chain broken over two workers would have an orphan turn
        begins = table.arrival_s[table.is_first]
        assert (np.diff(begins) >= 0).all(), "rows are in order of the sessions' start"
    tokens = [int((t.prompt_tokens - t.cached_tokens + t.output_tokens).sum()) for t in tables]
    assert max(tokens) / min(tokens) < 1.1


def test_subagents_go_to_their_parents_worker() -> None:
    grouped = workload([0.0, 1.0, 2.0, 3.0], group=[7, 7, 9, 9])
    for table in grouped.assign(2):
        assert len(table) == 2
        assert table.arrival_s[1] - table.arrival_s[0] == 1.0


def test_more_workers_than_sessions_leaves_some_idle() -> None:
    assert sorted(len(t) for t in workload([0.0]).assign(3)) == [0, 0, 1]
    with pytest.raises(ValueError, match="workers 0"):
        workload([0.0]).assign(0)


def test_class_and_limits_set_max_tokens() -> None:
    copilot = workload([0.0]).with_class(ServiceClass.COPILOT)
    assert copilot.requests.max_tokens.tolist() == [512]
    limits = {
        **DEFAULT_LIMITS,
        ServiceClass.COPILOT: ClassLimits(ttft_base_s=1, ttft_per_token_s=0, tpot_s=1, default_max_tokens=64),
    }
    assert copilot.with_limits(limits).requests.max_tokens.tolist() == [64]


def test_merged_workloads_keep_their_counts_and_groups_apart() -> None:
    both = merged("both", "test", [session_of_three().within_context(400), workload([0.0]).within_context(50)])
    both.check()
    assert both.left_out[TOO_LONG] == 3
    assert len(np.unique(both.group)) == 2


def test_an_excerpt_starts_where_the_load_is_in_balance() -> None:
    whole = builtin("agent", 4000.0, rate_scale=3.0, seed=1, swing=0.0)
    calls = [int((start_times(whole.requests) < end).sum()) for end in (1000.0, 2000.0, 3000.0)]
    steps = np.diff([0, *calls])
    assert steps.max() / steps.min() < 1.2, "the built-in sessions are under way from the first second"
    assert whole.excerpt(9000.0).check().duration_s == 9000.0
