"""A line tells what is seen, what would be done about it and why; where something is silent, it says what."""

from __future__ import annotations

from schemas.actions import Action, Hold, MaskReason, ShadowDecision, WorkerAction
from schemas.identity import Order
from services.decision.settings import Settings
from services.operator.attach_view import kind_of_choice, line_of
from services.operator.live import Heard, StateRow
from tests.services.decision.rows import state

W = "n0/0/w0"
NOW = Order(1, 5)


def heard(
    wish: Action, hold: Hold = Hold.SHADOW, reasons: tuple[int, ...] = (0,) * 5, mask: int = 31, **features: float
) -> Heard:
    shadows = (ShadowDecision("heuristic", wish),) if hold == Hold.SHADOW else ()
    action = WorkerAction(W, f"{W}@1.5", Action.HOLD if hold else wish, 1.0, 256, 0, 0, 0, "heuristic", 1.0, mask,
                          reasons, hold, (), shadows)  # fmt: skip
    row = StateRow(NOW, 0, hold if hold not in (Hold.SHADOW, Hold.NONE) else 0, state(**features)[0])
    return Heard(W, "n0", 100.0, row, action, NOW, "heuristic")


def line(one: Heard | None, now_s: float = 101.0) -> str:
    return line_of(W, one, Settings(), now_s)


def test_a_choice_is_told_with_the_rule_behind_it() -> None:
    one = heard(Action.TIGHTEN, preemption_rate=0.3, l_queue=3.0, l_queue_memory=2.0)
    assert "u_alloc 0.50  running 20  queue 3 (2 for memory)  TPOT 0.50 x limit" in line(one)
    assert "shadow: heuristic would tighten (preemption_rate 0.3 >= 0.05 1/s" in line(one)
    assert kind_of_choice(one, Settings()).startswith("tighten: preemption_rate from 0.05")


def test_an_action_that_a_rule_wants_and_the_mask_forbids_is_told() -> None:
    reasons = (0, 0, 0, 0, int(MaskReason.UNKNOWN_STATE))
    one = heard(Action.HOLD, reasons=reasons, mask=15, u_alloc=0.9)
    assert "would hold (evict is forbidden: unknown state)" in line(one)
    assert kind_of_choice(one, Settings()) == "hold"


def test_a_doubt_is_told_instead_of_a_decision() -> None:
    one = heard(Action.HOLD, Hold.SAMPLE_REJECTED)
    assert "stale and held: nothing that could be believed came from the server" in line(one)
    assert kind_of_choice(one, Settings()) == "", "a choice on a doubtful state is none"


def test_silence_is_told_by_its_place() -> None:
    assert "nothing was heard yet" in line(None)
    assert "silent for 50 s" in line(heard(Action.HOLD), now_s=150.0)
    lonely = heard(Action.HOLD)
    lonely.action = None
    assert "decision is silent" in line(lonely)


def test_absent_numbers_are_dashes() -> None:
    nan = float("nan")
    assert "TPOT -  TTFT -" in line(heard(Action.HOLD, tpot_p95=nan, ttft_p95=nan))
