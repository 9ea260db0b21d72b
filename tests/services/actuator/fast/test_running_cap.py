"""The AIMD cap on running requests."""

from __future__ import annotations

import math

from services.actuator.fast.running_cap import CUT, LOWEST, RAISE, next_cap, smoothed_gap_s


def test_tokens_beyond_the_limit_cut_what_runs_to_a_share() -> None:
    assert next_cap(256.0, 256.0, 40.0, 0.06, 0.05) == CUT * 40
    assert next_cap(30.0, 256.0, 40.0, 0.06, 0.05) == CUT * 30, "it was cut already, those above it still run"


def test_the_cap_never_falls_below_its_floor_nor_rises_above_the_ceiling() -> None:
    cap = 256.0
    for _ in range(100):
        cap = next_cap(cap, 256.0, cap, 1.0, 0.05)
    assert cap == LOWEST
    for _ in range(200):
        cap = next_cap(cap, 64.0, cap, 0.01, 0.05)
    assert cap == 64.0
    assert next_cap(64.0, 20.0, 5.0, 0.045, 0.05) == 20.0, "the slow control lowered the ceiling"


def test_calm_raises_a_cap_that_holds_somebody_back_and_no_other() -> None:
    assert next_cap(10.0, 256.0, 10.0, 0.02, 0.05) == 10.0 + RAISE
    assert next_cap(100.0, 256.0, 10.0, 0.02, 0.05) == 100.0
    assert next_cap(10.0, 256.0, 10.0, 0.049, 0.05) == 10.0, "near the limit it stays"


def test_without_a_limit_there_is_no_cap() -> None:
    assert next_cap(4.0, 256.0, 100.0, 5.0, math.inf) == 256.0


def test_the_gap_is_smoothed_and_starts_with_the_first_measurement() -> None:
    assert smoothed_gap_s(0.0, 0.03) == 0.03
    assert smoothed_gap_s(0.03, math.nan) == 0.03
    assert smoothed_gap_s(0.03, 0.0) == 0.03
    assert 0.03 < smoothed_gap_s(0.03, 0.05) < 0.05
