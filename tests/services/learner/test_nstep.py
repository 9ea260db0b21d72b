from __future__ import annotations

import numpy as np
import pytest

from services.learner.nstep import join

G = 0.5


def chain(rewards: list[float], *, discounts: list[float] | None = None, known: list[bool] | None = None,
          on_policy: list[bool] | None = None):  # fmt: skip
    n = len(rewards)
    column = lambda values, kind: np.array(values, kind).reshape(n, 1)  # noqa: E731
    joined = join(
        column(rewards, np.float32),
        column(discounts or [G] * n, np.float32),
        column(known or [True] * n, np.bool_),
        column(on_policy or [True] * n, np.bool_),
    )
    return float(joined.returns[0]), float(joined.discounts[0]), int(joined.lengths[0])


def test_three_rows_join_into_the_discounted_sum() -> None:
    assert chain([1, 2, 4]) == (1 + G * 2 + G * G * 4, G**3, 3), "R = r0 + g r1 + g^2 r2, G = g^3"


def test_a_chain_without_a_follower_is_a_one_step_return() -> None:
    assert chain([1, 2, 4], known=[True, False, False]) == (1, G, 1)


def test_a_gap_ends_the_return_even_when_later_rows_are_known() -> None:
    assert chain([1, 2, 4], known=[True, False, True]) == (1, G, 1), "what lies beyond a gap is another trajectory"


def test_a_terminal_row_ends_the_return_and_the_bootstrap() -> None:
    assert chain([1, 2, 4], discounts=[G, 0, G]) == (1 + G * 2, 0, 2)
    assert chain([1, 2, 4], discounts=[0, G, G]) == (1, 0, 1)


def test_the_first_off_policy_action_cuts_and_later_on_policy_ones_do_not_mend_it() -> None:
    assert chain([1, 2, 4], on_policy=[True, False, True]) == (1, G, 1)
    assert chain([1, 2, 4], on_policy=[True, True, False]) == (1 + G * 2, G**2, 2)


def test_the_first_action_may_be_anybodys() -> None:
    assert chain([1, 2, 4], on_policy=[False, True, True])[2] == 3, "Q(s, a) asks what follows a, whoever chose it"


def test_values_of_unknown_rows_never_reach_a_result() -> None:
    assert chain([1, float("nan"), 4], known=[True, False, False]) == (1, G, 1)


def test_columns_are_independent() -> None:
    joined = join(
        np.array([[1, 1], [2, 2]], np.float32),
        np.full((2, 2), G, np.float32),
        np.array([[True, True], [True, False]]),
        np.ones((2, 2), np.bool_),
    )
    assert joined.lengths.tolist() == [2, 1]
    assert joined.returns.tolist() == [2.0, 1.0]


def test_unequal_shapes_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="equal"):
        join(np.zeros((2, 1), np.float32), np.zeros((1, 1), np.float32), np.ones((2, 1), bool), np.ones((2, 1), bool))
