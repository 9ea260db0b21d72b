"""Reserving the output that a worker's finished requests let expect, not all that a client allows."""

from __future__ import annotations

import numpy as np
import pytest

from services.actuator.fast.reservation import (
    DEVIATIONS,
    LEAST_FINISHED,
    WEIGHT,
    expected_output_tokens,
    weight,
)


def test_max_tokens_stands_until_enough_have_finished() -> None:
    assert expected_output_tokens(LEAST_FINISHED - 1, 100.0, 100.0**2, 0.0, 4096.0) == 4096.0
    assert expected_output_tokens(LEAST_FINISHED, 100.0, 100.0**2, 0.0, 4096.0) == 100.0


def test_the_spread_of_outputs_is_reserved_as_well() -> None:
    assert expected_output_tokens(50.0, 100.0, 100.0**2 + 30.0**2, 0.0, 4096.0) == pytest.approx(100 + DEVIATIONS * 30)


def test_never_more_than_the_client_allows() -> None:
    assert expected_output_tokens(50.0, 600.0, 600.0**2, 0.0, 512.0) == 512.0
    assert expected_output_tokens(50.0, 100.0, 100.0**2, 500.0, 512.0) == 512.0


def test_who_has_outgrown_the_expectation_is_expected_to_go_on() -> None:
    assert expected_output_tokens(50.0, 100.0, 100.0**2, 300.0, 4096.0) == 400.0


def test_rounding_below_zero_variance_is_no_error() -> None:
    assert expected_output_tokens(50.0, 100.0, 100.0**2 - 1e-9, 0.0, 4096.0) == 100.0


def test_the_moments_are_plain_means_first_and_forget_later() -> None:
    values = np.random.default_rng(1).integers(1, 900, 2000).astype(float)
    mean = 0.0
    for count, value in enumerate(values[:40]):
        mean += weight(count) * (value - mean)
    assert mean == pytest.approx(values[:40].mean())
    assert weight(1e6) == WEIGHT
