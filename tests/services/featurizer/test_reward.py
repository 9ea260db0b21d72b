"""Rewards by hand (DESIGN section 3)."""

from __future__ import annotations

import numpy as np
import pytest

from schemas.transitions import REWARD_PARTS
from services.featurizer.reward import RewardSettings, reward_parts
from services.featurizer.tracker import Tracker

from .samples import counting, row, sample

ARTICLE, GOODPUT, TOKENS, ALLOC, VIOLATION, OOM = range(len(REWARD_PARTS))
ONE_CARD = np.array([7, 7])


def parts(first: dict[str, float], second: dict[str, float] | None = None, **settings: float) -> np.ndarray:
    """Rewards of two workers on one card: ``first`` and ``second`` are what their samples after the step say."""
    before = np.array([row(), row()])
    after = np.array([row(**first), row(**(second or {}))])
    return reward_parts(before, after, ONE_CARD, RewardSettings(**settings))


def test_the_articles_reward_is_the_cards_and_credited_to_each_worker() -> None:
    found = parts(
        {"output_tokens": 3000, "judged": 8, "violations": 1, "kv_bytes": 10e9},
        {"output_tokens": 1000, "judged": 2, "violations": 1, "kv_bytes": 6e9},
    )
    # tokens: 4000 / 2 s / 5000 = 0.4; alloc: 16 / 40 = 0.4; violation: 2 / 10 = 0.2
    assert found[0].tolist() == found[1].tolist(), "both share the card"
    assert found[0, TOKENS] == pytest.approx(0.4)
    assert found[0, ALLOC] == pytest.approx(0.4)
    assert found[0, VIOLATION] == pytest.approx(0.2)
    assert found[0, ARTICLE] == pytest.approx(0.4 + 0.2 * 0.4 - 0.2)


def test_weights_are_settings() -> None:
    found = parts({"output_tokens": 4000, "judged": 4, "violations": 1}, alpha=2.0, beta=0.0, gamma=0.5)
    assert found[0, ARTICLE] == pytest.approx(2 * 0.4 - 0.5 * 0.25)


def test_goodput_pays_for_preemption_and_recomputation() -> None:
    found = parts({"good_tokens": 2000, "preemptions": 5, "recomputed_tokens": 400})
    assert found[0, GOODPUT] == pytest.approx((2000 - 5 * 16 - 0.5 * 400) / (5000 * 2))


def test_running_out_of_memory_costs_a_thousand_or_twenty() -> None:
    found = parts({"oom": 1})
    assert found[0, OOM] == 1
    assert found[1, OOM] == 1, "the card's event"
    assert found[0, ARTICLE] == pytest.approx(0.2 * 20 / 40 - 1000)
    assert found[0, GOODPUT] == pytest.approx(-20)


def test_a_crash_is_rewarded_even_when_the_dead_engine_says_nothing_else() -> None:
    gone = dict.fromkeys(("output_tokens", "good_tokens", "judged", "violations", "kv_bytes"), np.nan)
    found = parts({"oom": 1, **gone})
    assert found[0, GOODPUT] == pytest.approx(-20), "the one event that a learner must not miss"
    assert found[0, ALLOC] == pytest.approx(10 / 40), "the other worker's KV"


@pytest.mark.parametrize("missing", ["output_tokens", "judged", "reference_tokens_per_s", "kv_bytes", "oom"])
def test_an_absent_input_makes_the_cards_reward_absent(missing: str) -> None:
    found = parts({missing: np.nan})
    assert np.isnan(found[:, ARTICLE]).all(), "unknown is not zero, and the card is one"


def test_nobody_finished_is_no_violation() -> None:
    assert parts({})[0, VIOLATION] == 0


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    before = np.array([row(output_tokens=9000.0)])
    after = np.array([row(output_tokens=1000.0)])
    found = reward_parts(before, after, np.array([0]), RewardSettings(), dt_s=1.0)
    assert found[0, TOKENS] == pytest.approx(1000 / 5000)


def test_more_tokens_than_any_card_makes_are_not_believed() -> None:
    found = parts({"output_tokens": float(2**32)})
    assert np.isnan(found[0, ARTICLE]), "a wrapped counter"


def test_cards_do_not_mix() -> None:
    before = np.array([row(), row()])
    after = np.array([row(output_tokens=1000), row(output_tokens=np.nan)])
    found = reward_parts(before, after, np.array([3, 1]), RewardSettings())
    assert found[0, TOKENS] == pytest.approx(0.1)
    assert np.isnan(found[1, TOKENS])


def test_the_tracker_gives_the_same_rewards_as_the_formula() -> None:
    tracker = Tracker()
    rows = [
        [counting(s, output_tokens=700 * k, judged=3, violations=1, good_tokens=99) for k in (1, 2)] for s in (0, 1)
    ]
    tracker.observe(sample(0, rows[0]))
    states = tracker.observe(sample(1, rows[1]))
    assert states is not None
    expected = reward_parts(np.array(rows[0]), np.array(rows[1]), ONE_CARD, RewardSettings())
    np.testing.assert_allclose(states.rewards, expected)
