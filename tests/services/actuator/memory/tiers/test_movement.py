"""One movement budget for a card: order, decode gaps, feedback, forbidden classes."""

from __future__ import annotations

import numpy as np
import pytest

from services.actuator.memory.movement import CardMovement, Grants, MovementSettings

GB = 1e9
YES = np.array([True, True])


def grants(card: CardMovement, prefetch: float, swap: float, compact: float, allowed: np.ndarray = YES) -> Grants:
    each = [np.array([want / 2, want / 2]) * GB for want in (prefetch, swap, compact)]
    return card.grants(
        *each, allowed, link_bytes_per_s=10 * GB, copy_bytes_per_s=100 * GB, decode_gap_s=0.04, step_s=2.0
    )


def test_prefetch_comes_before_swap_out_and_swap_out_before_compaction() -> None:
    card = CardMovement(MovementSettings(step_share=0.5, gap_ms=20.0))  # 1 s a step: 10 GB over the link
    dealt = grants(card, 6, 6, 60)
    assert dealt.prefetch_bytes.sum() == pytest.approx(6 * GB)
    assert dealt.swap_bytes.sum() == pytest.approx(4 * GB)
    assert dealt.compact_bytes.sum() == 0


def test_decode_gaps_bound_a_step_too() -> None:
    card = CardMovement(MovementSettings(step_share=0.5, gap_ms=4.0))  # 50 gaps of 4 ms: 0.2 s
    dealt = grants(card, 0, 9, 0)
    assert dealt.swap_bytes.sum() == pytest.approx(2 * GB)
    assert dealt.gap_link_bytes == pytest.approx(0.04 * GB)
    assert dealt.gap_copy_bytes == pytest.approx(0.4 * GB)
    assert card.seconds(float("inf")) == pytest.approx(1.0), "nothing decodes: only the step bounds"


def test_the_budget_halves_beyond_the_tpot_limit_and_recovers_slowly() -> None:
    card = CardMovement()
    whole = card.seconds(0.04)
    card.saw_tpot(over_limit=True)
    assert card.seconds(0.04) == pytest.approx(whole / 2)
    for _ in range(5):
        card.saw_tpot(over_limit=False)
    assert whole / 2 < card.seconds(0.04) < whole
    for _ in range(20):
        card.saw_tpot(over_limit=False)
    assert card.seconds(0.04) == pytest.approx(whole)


def test_a_class_that_forbids_swapping_has_swap_budget_zero() -> None:
    dealt = grants(CardMovement(), 1, 1, 1, np.array([False, True]))
    assert dealt.swap_bytes[0] == dealt.prefetch_bytes[0] == 0
    assert dealt.swap_bytes[1] > 0
    assert (dealt.compact_bytes > 0).all(), "compaction leaves nothing off the card"


def test_rates_must_be_positive() -> None:
    none = np.zeros(2)
    with pytest.raises(ValueError, match="positive"):
        CardMovement().grants(none, none, none, YES, link_bytes_per_s=0, copy_bytes_per_s=1, decode_gap_s=1)
