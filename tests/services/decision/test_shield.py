"""Which actions the shield forbids, and with which reason."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from schemas.actions import ALL_ACTIONS, Action, Hold, MaskReason
from schemas.classes import ServiceClass
from schemas.features import FEATURE_COUNT
from services.decision.shield import ALLOWED, ShieldSettings, masks
from tests.services.decision.rows import HEALTHY, state

NAN = float("nan")
SETTINGS = ShieldSettings()


def reason_of(
    action: Action,
    changes: Mapping[str, float] = HEALTHY,
    *,
    kind: ServiceClass = ServiceClass.CHAT,
    hold: Hold = Hold.NONE,
    settings: ShieldSettings = SETTINGS,
) -> MaskReason:
    mask, reasons = masks(state(**changes), np.array([kind]), np.array([hold]), settings)
    reason = MaskReason(reasons[0, action])
    assert bool(mask[0] >> action & 1) == (reason == MaskReason.ALLOWED), "bit and reason say the same"
    return reason


def test_a_healthy_worker_may_do_anything() -> None:
    mask, reasons = masks(state(), np.array([0]), np.array([0]), SETTINGS)
    assert mask[0] == ALL_ACTIONS
    assert not reasons.any()


@pytest.mark.parametrize("hold", [h for h in Hold if h])
def test_a_held_worker_may_only_hold(hold: Hold) -> None:
    for action in list(Action)[1:]:
        assert reason_of(action, hold=hold) == MaskReason.HELD
    assert reason_of(Action.HOLD, hold=hold) == MaskReason.ALLOWED, "hold is always allowed"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rho": 1.6}, MaskReason.AT_RHO_MAX),
        ({"rho": 1.56}, MaskReason.AT_RHO_MAX),
        ({"rho": 1.5}, MaskReason.ALLOWED),
        ({"rho": 1.6, "max_running": 100}, MaskReason.ALLOWED),  # only the ceiling opens
        ({"since_tighten": 4}, MaskReason.COOL_DOWN),
        ({"since_tighten": 5}, MaskReason.ALLOWED),
        ({"u_alloc": 1.0, "idle_share": 0.0}, MaskReason.FORECAST_EXHAUSTION),
        ({"u_alloc": 1.0, "idle_share": NAN}, MaskReason.FORECAST_EXHAUSTION),
        ({"u_alloc": 1.0, "idle_share": 0.5}, MaskReason.ALLOWED),  # idle KV can be dropped
        ({"u_alloc": 0.9, "idle_share": 0.0, "du_alloc": 0.03}, MaskReason.FORECAST_EXHAUSTION),
        ({"u_alloc": 0.9, "idle_share": 0.0, "du_alloc": -0.5}, MaskReason.ALLOWED),  # a fall is not promised
        ({"u_alloc": 1.0, "idle_share": 0.0, "q0_share": 0.5}, MaskReason.ALLOWED),  # borrows from its neighbour
        ({"quota_hard": 0.0}, MaskReason.FORECAST_EXHAUSTION),
        ({"tpot_p95": 1.01}, MaskReason.LATENCY_AT_LIMIT),
        ({"tpot_p95": 1.0}, MaskReason.ALLOWED),
        ({"tpot_p95": 1.5, "ttft_p95": 0.6}, MaskReason.ALLOWED),  # the queue is late too: the policy weighs
        ({"tpot_p95": NAN}, MaskReason.ALLOWED),  # none ended in the window
        ({"tpot_p95": NAN, "iteration": NAN}, MaskReason.UNKNOWN_STATE),
        ({"tpot_p95": NAN, "iteration": NAN, "running": 0}, MaskReason.ALLOWED),  # nothing decodes
        ({"tpot_p95": NAN, "iteration": NAN, "p_prefill": 1.0}, MaskReason.ALLOWED),
        ({"du_alloc": NAN}, MaskReason.UNKNOWN_STATE),
        ({"quota_hard": NAN}, MaskReason.UNKNOWN_STATE),
        ({"rho": NAN}, MaskReason.UNKNOWN_STATE),
    ],
)
def test_widen(changes: dict[str, float], expected: MaskReason) -> None:
    assert reason_of(Action.WIDEN, changes) == expected


def test_widen_stops_at_the_rho_of_the_class_or_of_the_setting_whichever_is_lower() -> None:
    assert reason_of(Action.WIDEN, {"rho": 1.3}, kind=ServiceClass.COPILOT) == MaskReason.AT_RHO_MAX
    assert reason_of(Action.WIDEN, {"rho": 1.2}, kind=ServiceClass.COPILOT) == MaskReason.ALLOWED
    low = ShieldSettings(rho_max=1.2)
    assert reason_of(Action.WIDEN, {"rho": 1.2}, settings=low) == MaskReason.AT_RHO_MAX
    none = ShieldSettings(rho_max=1.0)
    assert reason_of(Action.WIDEN, {"rho": 1.0}, settings=none) == MaskReason.CLASS_FORBIDS_OVERCOMMIT


def test_a_class_without_a_token_limit_is_not_asked_for_its_latency() -> None:
    assert reason_of(Action.WIDEN, {"tpot_p95": NAN}, kind=ServiceClass.BATCH) == MaskReason.ALLOWED
    assert reason_of(Action.WIDEN, {"tpot_p95": 9.0}, kind=ServiceClass.BATCH) == MaskReason.ALLOWED


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rho": 1.0}, MaskReason.ALLOWED),  # the ceiling can still go down
        ({"max_running": 4}, MaskReason.ALLOWED),  # rho can
        ({"rho": 1.0, "max_running": 4}, MaskReason.AT_MAX_RUNNING_LOW),
        ({"max_running": NAN}, MaskReason.UNKNOWN_STATE),
        ({"rho": NAN}, MaskReason.UNKNOWN_STATE),
    ],
)
def test_tighten(changes: dict[str, float], expected: MaskReason) -> None:
    assert reason_of(Action.TIGHTEN, changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"f_frag": 0.0}, MaskReason.NOTHING_FRAGMENTED),
        ({"f_frag": NAN}, MaskReason.UNKNOWN_STATE),
        ({"since_compact": 2}, MaskReason.COOL_DOWN),
        ({"since_compact": 3}, MaskReason.ALLOWED),
    ],
)
def test_compact(changes: dict[str, float], expected: MaskReason) -> None:
    assert reason_of(Action.COMPACT, changes) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"idle_share": 0.0}, MaskReason.NOTHING_IDLE),
        ({"host_use": 0.99}, MaskReason.HOST_FULL),
        ({"host_free": 0.0}, MaskReason.HOST_FULL),
        ({"host_free": 0.0, "host_use": NAN}, MaskReason.HOST_FULL),  # no host tier at all
        ({"host_use": NAN}, MaskReason.ALLOWED),
        ({"link_use": 0.96}, MaskReason.LINK_BUSY),
        ({"idle_share": NAN}, MaskReason.UNKNOWN_STATE),
        ({"host_free": NAN}, MaskReason.UNKNOWN_STATE),
        ({"link_use": NAN}, MaskReason.UNKNOWN_STATE),
    ],
)
def test_evict(changes: dict[str, float], expected: MaskReason) -> None:
    assert reason_of(Action.EVICT, changes) == expected


def test_code_completion_never_swaps() -> None:
    assert reason_of(Action.EVICT, kind=ServiceClass.COPILOT) == MaskReason.CLASS_FORBIDS_SWAP


def test_training_is_touched_only_when_opted_in_and_then_neither_overcommitted_nor_swapped() -> None:
    for action in list(Action)[1:]:
        assert reason_of(action, kind=ServiceClass.TRAINING) == MaskReason.TRAINING_NOT_OPTED_IN
    opted = ShieldSettings(training_opted_in=True)
    found = [reason_of(a, {"rho": 1.0}, kind=ServiceClass.TRAINING, settings=opted) for a in Action]
    assert found == [
        MaskReason.ALLOWED, MaskReason.CLASS_FORBIDS_OVERCOMMIT, MaskReason.ALLOWED, MaskReason.ALLOWED,
        MaskReason.CLASS_FORBIDS_SWAP,
    ]  # fmt: skip


def test_a_class_nobody_knows_may_only_hold() -> None:
    mask, reasons = masks(state(), np.array([200]), np.array([0]), SETTINGS)
    assert mask[0] == 1
    assert set(reasons[0, 1:].tolist()) == {MaskReason.UNKNOWN_STATE}


def test_another_shape_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="expected"):
        masks(state()[:, :-1], np.array([0]), np.array([0]), SETTINGS)


ANY_STATES = arrays(np.float32, (3, FEATURE_COUNT), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(ANY_STATES, st.lists(st.integers(0, 255), min_size=3, max_size=3), st.booleans())
def test_whatever_the_state_hold_is_allowed_and_every_other_bit_has_a_reason_or_is_set(
    features: np.ndarray, classes: list[int], held: bool
) -> None:
    mask, reasons = masks(features, np.array(classes), np.full(3, int(held)), SETTINGS)
    assert (ALLOWED[mask] == (reasons == 0)).all()
    assert (mask & 1).all()
    assert not held or (mask == 1).all()
