"""Refusing who cannot be served in time any more, with a margin for what a prediction may be wrong by."""

from __future__ import annotations

import math

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from services.actuator.fast.shedding import hopeless

MARGIN = 0.1


def test_late_by_less_than_the_margin_is_kept() -> None:
    assert not hopeless(10.0, 12.0, 2.0, 0.1, 2.0, MARGIN)
    assert not hopeless(10.0, 12.0, 2.0 + 0.99 * MARGIN * 2.0, 0.1, 2.0, MARGIN)
    assert hopeless(10.0, 12.0, 2.0 + 1.01 * MARGIN * 2.0, 0.1, 2.0, MARGIN)


def test_who_could_never_have_been_in_time_is_not_refused() -> None:
    """Its session's KV was lost: served late, it is there for the next turn."""
    assert hopeless(10.0, 9.0, 1.9, 1.9, 2.0, MARGIN)
    assert not hopeless(10.0, 9.0, 2.1, 2.1, 2.0, MARGIN)


def test_who_has_no_limit_is_never_hopeless() -> None:
    assert not hopeless(1e6, math.inf, 1e6, 1e6, math.inf, MARGIN)


def test_a_class_whose_refused_turns_save_nothing_is_not_shed() -> None:
    """A session's next turn has the refused one's prompt to compute as well."""
    assert DEFAULT_LIMITS[ServiceClass.AGENT].shed_margin == math.inf
    assert not hopeless(1e6, 12.0, 2.0, 0.1, 2.0, math.inf)
