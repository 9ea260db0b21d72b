"""What an action means as an absolute command."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import Action
from schemas.classes import ServiceClass
from services.decision.shield import ShieldSettings, rho_caps
from services.decision.targets import targets
from tests.services.decision.rows import state

SETTINGS = ShieldSettings()


def target(action: Action, kind: ServiceClass = ServiceClass.CHAT, **changes: float) -> tuple[float, int]:
    rho, ceiling = targets(np.array([action]), state(**changes), np.array([kind]), SETTINGS)
    return float(rho[0]), int(ceiling[0])


def test_widen_goes_one_step_up_and_opens_the_ceiling_by_a_quarter_rounded_up() -> None:
    assert target(Action.WIDEN, rho=1.2, max_running=256) == (1.3, 320)
    assert target(Action.WIDEN, rho=1.2, max_running=5) == (1.3, 7)


def test_tighten_goes_one_step_down_and_closes_the_ceiling_by_a_fifth() -> None:
    assert target(Action.TIGHTEN, rho=1.2, max_running=256) == (1.1, 204)
    assert target(Action.TIGHTEN, rho=1.2, max_running=35) == (1.1, 28), "35 x 0.8 is 28, not 27.99"
    assert target(Action.TIGHTEN, rho=1.2, max_running=5) == (1.1, 4)


@pytest.mark.parametrize("action", [Action.HOLD, Action.COMPACT, Action.EVICT])
def test_everything_else_keeps_what_is_in_force(action: Action) -> None:
    assert target(action, rho=1.3, max_running=77) == (1.3, 77)
    assert target(action, rho=1.27) == (1.27, 256), "off the grid, where an actuator clipped it"


def test_targets_stay_in_range() -> None:
    assert target(Action.WIDEN, rho=1.6, max_running=1000) == (1.6, 1024)
    assert target(Action.TIGHTEN, rho=1.0, max_running=4) == (1.0, 4)
    assert target(Action.WIDEN, ServiceClass.COPILOT, rho=1.3) == (1.3, 320)
    assert target(Action.HOLD, ServiceClass.TRAINING, rho=1.4) == (1.0, 256), "a class's limit binds held rho too"


def test_what_is_not_known_is_commanded_to_the_safe_side() -> None:
    assert target(Action.HOLD, rho=float("nan"), max_running=float("nan")) == (1.0, 256)


def test_a_walk_up_and_down_never_leaves_the_grid() -> None:
    rho, seen = 1.0, []
    for action in [Action.WIDEN] * 6 + [Action.TIGHTEN] * 6:
        rho, _ = target(action, rho=rho)
        seen.append(rho)
    assert seen == [1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.5, 1.4, 1.3, 1.2, 1.1, 1.0]


def test_with_a_goal_widen_and_tighten_jump_there_and_leave_the_ceiling() -> None:
    actions = np.array([Action.WIDEN, Action.TIGHTEN, Action.HOLD])
    rho, ceiling = targets(actions, np.repeat(state(), 3, axis=0), np.zeros(3, int), SETTINGS, goal_rho=1.5)
    assert rho.tolist() == [1.5, 1.5, 1.2]
    assert ceiling.tolist() == [256, 256, 256]


def test_another_shape_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="expected"):
        targets(np.array([0, 0]), state(), np.array([0]), SETTINGS)


@given(
    st.sampled_from(list(Action)),
    st.sampled_from(list(ServiceClass)),
    st.floats(width=32),
    st.floats(width=32),
    st.none() | st.floats(1.0, 1.6),
)
def test_targets_are_in_range_whatever_is_in_force(
    action: Action, kind: ServiceClass, rho: float, ceiling: float, goal: float | None
) -> None:
    states = state(rho=rho, max_running=ceiling)
    found_rho, found_ceiling = targets(np.array([action]), states, np.array([kind]), SETTINGS, goal)
    assert 1.0 <= found_rho[0] <= rho_caps(np.array([kind]), SETTINGS)[0]
    assert 4 <= found_ceiling[0] <= 1024
