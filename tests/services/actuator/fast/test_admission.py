"""Order of admission: who can still be in time first, by deadline; the late last; readers before all."""

from __future__ import annotations

import math

from services.actuator.fast import admission


def test_a_promise_ends_with_its_first_token_or_its_completion() -> None:
    assert admission.deadline_s(10.0, 2.5, math.inf) == 12.5
    assert admission.deadline_s(10.0, math.inf, 600.0) == 610.0
    assert admission.deadline_s(10.0, math.inf, math.inf) == math.inf


def test_the_first_token_comes_after_the_prompts_ahead_the_own_and_one_iteration() -> None:
    assert admission.first_token_in_s(4000.0, 2000.0, 10_000.0, 0.03) == 0.63
    assert admission.first_token_in_s(4000.0, 2000.0, 0.0, 0.03) == 0.03, "nothing is known of the rate yet"


def test_a_request_can_meet_its_deadline_up_to_the_last_instant() -> None:
    assert admission.can_meet(10.0, 12.0, 2.0)
    assert not admission.can_meet(10.0, 12.0, 2.01)
    assert admission.can_meet(10.0, math.inf, 1e9)


def test_ranks_put_readers_first_then_deadlines_then_the_late() -> None:
    reader = admission.rank(50.0, meets=True, has_first_token=True)
    soon, later = admission.rank(12.0, True, False), admission.rank(15.0, True, False)
    late, very_late = admission.rank(9.0, False, False), admission.rank(3.0, False, False)
    unlimited = admission.rank(math.inf, True, False)
    assert reader < soon < later < unlimited < very_late < late
    assert admission.rank(9.0, False, True) == late, "a reader whose first token was late is late"


def test_the_prefill_rate_follows_what_is_measured() -> None:
    assert admission.prefill_rate(0.0, 8000.0) == 8000.0
    rate = 8000.0
    for _ in range(50):
        rate = admission.prefill_rate(rate, 4000.0)
    assert abs(rate - 4000.0) < 1.0


def test_the_batch_holds_prompts_for_two_looks_or_one_iteration() -> None:
    assert admission.prefill_ahead_tokens(2048.0, 8000.0, 0.1) == 2048.0
    assert admission.prefill_ahead_tokens(2048.0, 50_000.0, 0.1) == 10_000.0
