"""Why a decision was made: the rules as data say what the heuristic does, and a flip is one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import ALL_ACTIONS, Action, MaskReason
from schemas.features import FEATURE, FEATURE_COUNT
from services.decision.heuristic import HeuristicSettings, choose
from services.decision.shield import ShieldSettings
from services.operator.reasons import (
    Row,
    heuristic_choice,
    heuristic_flips,
    heuristic_rules,
    mask_words,
    q_flips,
)
from tests.services.decision.rows import state

SETTINGS = HeuristicSettings(
    latency_high=1.1, latency_low=0.9, first_token_late=0.3, preemption_high=0.5, tighten_every_steps=3, evict_high=0.6,
    evict_waiting=0.4, evict_host_use=0.6, evict_every_steps=2, reserved_high=0.85, frag_high=0.5, queue_low=1.0,
    ceiling_near=0.95,
)  # fmt: skip
"""Named here, since the defaults are tuned."""


def near(rng: np.random.Generator) -> Row:
    """A state whose values lie about the rules' thresholds, some absent, some exactly on them."""
    row = state()[0]
    values = {
        "u_alloc": [0.2, 0.39, 0.4, 0.6, 0.61, 1.0], "du_alloc": [-0.1, 0.0, 0.05, np.nan], "q0_share": [0.5, 1.0],
        "quota_hard": [0.0, 0.5, 1.0, np.nan], "l_queue": [0, 1, 5], "l_queue_memory": [0, 1, 5, np.nan],
        "tpot_p95": [0.5, 0.9, 1.0, 1.1, 2.0, np.nan], "ttft_p95": [0.1, 0.3, 0.9, np.nan],
        "preemption_rate": [0.0, 0.5, 3.0, np.nan], "since_tighten": [0, 2, 3, 300],
        "u_reserved": [0.5, 0.85, 1.0, np.nan], "running": [1, 243, 244, 256], "max_running": [256.0, 257.0],
        "neighbour_queue": [0, 1, np.nan], "f_frag": [0.2, 0.5, 0.9, np.nan], "since_evict": [0, 1, 2, 300],
        "host_use": [0.1, 0.59, 0.6, 0.9, np.nan], "rho": [1.0, 1.05, 1.1, 1.6, np.nan],
    }  # fmt: skip
    for name, choices in values.items():
        row[FEATURE[name]] = rng.choice(choices)
    return row


@given(st.integers(0, 2**32), st.integers(0, 15))
def test_the_rules_as_data_choose_what_the_heuristic_chooses(seed: int, others: int) -> None:
    row, mask = near(np.random.default_rng(seed)), others << 1 | 1
    (chosen,) = choose(row[None, :], np.array([mask], np.uint8), SETTINGS).tolist()
    assert heuristic_choice(heuristic_rules(row, SETTINGS), mask) == chosen


def test_thousands_of_states_near_the_thresholds_are_chosen_alike() -> None:
    rng = np.random.default_rng(7)
    rows = np.stack([near(rng) for _ in range(3000)])
    masks = (rng.integers(0, 16, 3000) << 1 | 1).astype(np.uint8)
    chosen = choose(rows, masks, SETTINGS).tolist()
    told = [heuristic_choice(heuristic_rules(r, SETTINGS), int(m)) for r, m in zip(rows, masks, strict=True)]
    assert told == chosen
    assert set(chosen) == set(range(5)), "every rule was tried"


@pytest.mark.parametrize(
    ("changes", "chosen", "flip", "words"),
    [
        ({"tpot_p95": 1.05}, Action.HOLD, "tighten", "tpot_p95 at or above 1.1 instead of 1.05"),
        ({"tpot_p95": 1.15}, Action.TIGHTEN, "hold", "tpot_p95 below 1.1 instead of 1.15"),
        ({"u_alloc": 0.58}, Action.HOLD, "evict", "forecast_use at or above 0.6 instead of 0.58"),
        ({"u_alloc": 0.7, "preemption_rate": 0.45}, Action.EVICT, "tighten",
         "preemption_rate at or above 0.5 instead of 0.45"),
        ({"l_queue_memory": 9.0, "u_reserved": 0.9, "u_alloc": 0.2}, Action.WIDEN, "hold",
         "u_reserved below 0.85 instead of 0.9"),
    ],
)  # fmt: skip
def test_the_smallest_change_comes_first(changes: dict[str, float], chosen: Action, flip: str, words: str) -> None:
    rules = heuristic_rules(state(**changes)[0], SETTINGS)
    assert heuristic_choice(rules, ALL_ACTIONS) == chosen
    first = heuristic_flips(rules, ALL_ACTIONS)[0]
    assert (first.to, first.words) == (flip, words)


@given(st.integers(0, 2**32))
def test_a_change_that_is_told_does_flip_the_choice(seed: int) -> None:
    row = near(np.random.default_rng(seed))
    rules = heuristic_rules(row, SETTINGS)
    for flip in heuristic_flips(rules, ALL_ACTIONS):
        if " and " in flip.words or "forecast_use" in flip.words or "known" in flip.words:
            continue
        name, _, rest = flip.words.partition(" ")
        threshold = float(rest.split(" instead")[0].split()[-1])
        changed = row.copy()
        changed[FEATURE[name]] = np.float32(threshold) * (0.999 if rest.startswith("below") else 1.001)
        assert heuristic_choice(heuristic_rules(changed, SETTINGS), ALL_ACTIONS).name.lower() == flip.to


def test_a_network_is_told_by_its_margins_and_by_what_the_mask_forbade() -> None:
    reasons = [0, 0, 0, MaskReason.NOTHING_FRAGMENTED, 0]
    second, forbidden = q_flips([0.0, 0.5, 2.0, 3.0, 1.5], 0b10111, reasons)
    assert (second.to, second.size) == ("evict", 0.5)
    assert forbidden.to == "compact"
    assert "nothing_fragmented" in forbidden.words
    assert q_flips([0.0] * 5, 1, [0, 1, 1, 1, 1]) == [], "hold alone was allowed, and nothing is above it"


def test_what_a_networks_own_risk_head_vetoed_is_no_allowed_action() -> None:
    reasons = [0, 0, MaskReason.RISK_VETO, 0, 0]
    second, vetoed = q_flips([0.0, 0.5, 3.0, 0.2, 1.5], 0b11111, reasons)
    assert (second.to, second.size) == ("widen", 1.0), "evict was chosen"
    assert (vetoed.to, "its own risk head vetoes it" in vetoed.words) == ("tighten", True)


def test_a_mask_reason_is_told_with_its_numbers() -> None:
    row = state(host_use=0.99, host_free=np.nan)[0]
    words = mask_words(MaskReason.HOST_FULL, row, ShieldSettings())
    assert words == "host_free absent <= 0.001 or host_use 0.99 >= 0.98"
    assert mask_words(MaskReason.HELD, row, ShieldSettings()) == ""
    assert mask_words(200, row, ShieldSettings()) == "", "a newer sender's reason"
    for reason in MaskReason:
        mask_words(reason, np.full(FEATURE_COUNT, np.nan, np.float32), ShieldSettings())
