"""Refusing who cannot be served in time any more, with a margin for what a prediction may be wrong by."""

from __future__ import annotations

import math

from services.actuator.fast.shedding import MARGIN, hopeless


def test_late_by_less_than_the_margin_is_kept() -> None:
    assert not hopeless(10.0, 12.0, 2.0, 0.1, 2.0)
    assert not hopeless(10.0, 12.0, 2.0 + 0.99 * MARGIN * 2.0, 0.1, 2.0)
    assert hopeless(10.0, 12.0, 2.0 + 1.01 * MARGIN * 2.0, 0.1, 2.0)


def test_who_could_never_have_been_in_time_is_not_refused() -> None:
    """Its session's KV was lost: served late, it is there for the next turn."""
    assert hopeless(10.0, 9.0, 1.9, 1.9, 2.0)
    assert not hopeless(10.0, 9.0, 2.1, 2.1, 2.0)


def test_who_has_no_limit_is_never_hopeless() -> None:
    assert not hopeless(1e6, math.inf, 1e6, 1e6, math.inf)
