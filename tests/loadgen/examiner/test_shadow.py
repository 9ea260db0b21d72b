from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from loadgen.examiner.settings import ShadowLimits
from loadgen.examiner.shadow import Shadow
from schemas.actions import ActionBatch, Hold, ShadowDecisions, WorkerAction, action_batch
from schemas.codec import pack

LIMITS = ShadowLimits(steps=20, decisions=40)
NAME = "dqn:c"


def acted(
    step: int, actions: Sequence[int], acting: Sequence[int], q: np.ndarray, *, mask: int = 31, hold: int = 0
) -> ActionBatch:
    rows = [
        WorkerAction(f"n0/0/w{k}", "", action, 1.0, 64, 0, 9, 9, "heuristic", 1.0, mask, (0,) * 5, hold)
        for k, action in enumerate(acting)
    ]
    shadow = ShadowDecisions(NAME, bytes(actions), pack(q, "<f4"))
    return msgspec.structs.replace(action_batch("n0", 1, step, 0, rows), shadows=(shadow,))


def shadow_of(choices: Sequence[int], *, constant: bool = False, **changes: object) -> Shadow:
    """Twenty steps of two workers; the acting policy holds, and widens in every fourth step."""
    rng = np.random.default_rng(0)
    out = Shadow(NAME, LIMITS)
    for step in range(20):
        q = np.tile(np.arange(5.0), (2, 1)) if constant else rng.normal(size=(2, 5))
        if changes.get("bad_q") and step == 7:
            q[1, 3] = np.nan
        two = [choices[(2 * step) % len(choices)], choices[(2 * step + 1) % len(choices)]]
        out.add(acted(step, two, [int(step % 4 == 0)] * 2, q, mask=int(changes.get("mask", 31))))  # type: ignore[call-overload]
    return out


def test_a_candidate_that_decides_much_like_the_acting_policy_passes() -> None:
    seen = shadow_of([0, 0, 1, 0, 0, 4])
    assert seen.enough
    assert seen.refusal() == ""
    told = seen.report()
    assert (told.decisions, told.finite, told.masked) == (40, 1.0, 0.0)
    assert 0.5 < told.agreement < 1.0


def test_constant_q_values_and_one_and_the_same_action_are_refused() -> None:
    assert "constant output: its advantages" in shadow_of([0, 1], constant=True).refusal()
    assert "constant output: evict" in shadow_of([4]).refusal()
    assert shadow_of([0]).refusal() == "", "holding is what most states call for"


def test_q_values_that_are_none_and_forbidden_choices_are_refused() -> None:
    assert "not finite" in shadow_of([0, 1], bad_q=True).refusal()
    assert "forbidden" in shadow_of([0, 3], mask=0b00011).refusal()


def test_one_that_hardly_ever_agrees_is_refused() -> None:
    assert "agrees" in shadow_of([2, 3, 4, 2, 3]).refusal()


def test_held_rows_and_rows_without_a_choice_say_nothing() -> None:
    q = np.zeros((1, 5))
    seen = Shadow(NAME, LIMITS)
    seen.add(acted(1, [0], [0], q, hold=Hold.WINDOW_FILLING))
    seen.add(acted(2, [0], [0], q, mask=1))
    seen.add(msgspec.structs.replace(acted(3, [0], [0], q), shadows=()))
    seen.add(msgspec.structs.replace(acted(4, [0], [0], q), shadows=(ShadowDecisions(NAME, b"123"),)))
    assert seen.report().decisions == 0
    assert not seen.enough
