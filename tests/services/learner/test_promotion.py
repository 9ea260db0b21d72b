from __future__ import annotations

import msgspec
import numpy as np
import pytest

from schemas.features import FEATURE
from schemas.transitions import REWARD_PARTS, TransitionBatch
from services.learner.blocks import MAX_POLICIES
from services.learner.promotion import Judgement, Ledger, Limits
from tests.services.learner.batches import batch, state

LIMITS = Limits(block_steps=5, window_blocks=12, least_blocks=4, draws=300)
NEW, FORMER = "dqn:new", "heuristic"


def message(
    step: int,
    policies: tuple[str, ...],
    goodput: tuple[float, ...],
    *,
    violation: float = 0.0,
    preemptions: float = 0.0,
    oom: float = 0.0,
    queue: float = 3.0,
) -> TransitionBatch:
    rows = len(policies)
    parts = np.zeros((rows, len(REWARD_PARTS)), np.float32)
    for name, value in (("tokens", 1.0), ("violation", violation), ("oom", oom)):
        parts[:, REWARD_PARTS.index(name)] = value
    noise = np.random.default_rng(step).normal(0, 0.02)
    parts[:, REWARD_PARTS.index("goodput")] = np.array(goodput) + noise
    states = np.stack([state(0.5)] * rows)
    states[:, FEATURE["preemption_rate"]], states[:, FEATURE["l_queue"]] = preemptions, queue
    return batch(step, rows=rows, policies=policies, rewards=parts, next_states=states)


def before_and_after(before: float, after: float, steps: int = 70, **later: float) -> Judgement:
    ledger = Ledger(LIMITS)
    for step in range(100):
        ledger.add(message(step, (FORMER,), (before,)))
    ledger.begin(NEW)
    for step in range(100, 100 + steps):
        ledger.add(message(step, (NEW,), (after,), **later))
    return ledger.judge(NEW, FORMER, np.random.default_rng(0))


def test_as_good_as_the_window_before_is_sound_once_the_window_is_full() -> None:
    assert before_and_after(0.5, 0.5).state == "sound"
    assert before_and_after(0.5, 0.6).state == "sound"
    assert before_and_after(0.5, 0.5, steps=40).state == "waiting"


@pytest.mark.parametrize(
    ("what", "later"),
    [("goodput_share", {}), ("violation", {"violation": 0.2}), ("preemptions", {"preemptions": 0.5})],
)
def test_a_worse_one_is_found_before_the_window_is_full(what: str, later: dict[str, float]) -> None:
    found = before_and_after(0.5, 0.5 if later else 0.3, steps=40, **later)
    assert found.state == "regressed"
    assert found.why.startswith(what)


def test_less_goodput_alone_counts_only_while_no_fewer_requests_wait() -> None:
    ledger = Ledger(LIMITS)
    for step in range(100):
        ledger.add(message(step, (FORMER,), (0.5,)))
    ledger.begin(NEW)
    for step in range(100, 170):
        quiet = message(step, (NEW,), (0.25,), queue=0.0)
        parts = np.frombuffer(quiet.rewards, "<f4").copy().reshape(1, -1)
        parts[:, REWARD_PARTS.index("tokens")] = 0.5
        ledger.add(batch(step, policies=(NEW,), rewards=parts, next_states=quiet.next_states))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "sound", "half of the load, as well served"


def test_one_crash_is_enough() -> None:
    found = before_and_after(0.5, 0.9, steps=20, oom=1.0)
    assert (found.state, found.why) == ("regressed", "a card ran out of memory")


def test_workers_still_on_the_former_policy_are_the_comparison_when_the_load_changes() -> None:
    ledger = Ledger(LIMITS)
    for step in range(100):
        ledger.add(msgspec.structs.replace(message(step, (FORMER, FORMER), (0.8, 0.8)), workers=CARDS))
    ledger.begin(NEW)
    for step in range(100, 200):  # a harder time for both
        ledger.add(msgspec.structs.replace(message(step, (NEW, FORMER), (0.5, 0.5)), workers=CARDS))
    found = ledger.judge(NEW, FORMER, np.random.default_rng(0))
    assert found.state == "sound"
    assert found.figures["split"] == 1.0


def test_what_it_did_in_an_earlier_life_does_not_count() -> None:
    ledger = Ledger(LIMITS)
    for step in range(60):
        ledger.add(message(step, (NEW,), (0.1,)))
    for step in range(60, 160):
        ledger.add(message(step, (FORMER,), (0.5,)))
    ledger.begin(NEW)
    for step in range(160, 230):
        ledger.add(message(step, (NEW,), (0.5,)))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "sound"


def test_with_nothing_to_compare_it_waits_and_then_stands() -> None:
    ledger = Ledger(LIMITS)
    for step in range(30):
        ledger.add(message(step, (NEW,), (0.5,)))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "waiting"
    for step in range(30, 100):
        ledger.add(message(step, (NEW,), (0.5,)))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "sound"


def test_memory_is_bounded_and_poison_is_no_sum() -> None:
    ledger = Ledger(LIMITS)
    for step in range(2000):
        ledger.add(message(step, (f"dqn:{step % 40}",), (np.nan,)))
    assert ledger.blocks.policies <= MAX_POLICIES
    for step in range(0, 4000, 5):
        ledger.add(message(step, (NEW,), (0.5,)))
    assert ledger.blocks.count(NEW) <= 4 * LIMITS.window_blocks
    ledger.add(batch(1, rewards=b"123"))
    assert ledger.blocks.refused == 1


CARDS = ("n0/0/w0", "n0/1/w0")
ONE_CARD = ("n0/0/w0", "n0/0/w1")


def beside(
    workers: tuple[str, str],
    before: tuple[float, float],
    after: tuple[float, float],
    steps: int = 100,
    late: tuple[float, float] = (0.5, 0.5),
) -> Judgement:
    """The first worker is tried on the new policy, the second stays; ``late``: p95 of first tokens over the limit."""
    ledger = Ledger(LIMITS)
    for step in range(100):
        ledger.add(msgspec.structs.replace(message(step, (FORMER, FORMER), before), workers=workers))
    ledger.begin(NEW)
    for step in range(100, 100 + steps):
        made = message(step, (NEW, FORMER), after)
        states = np.frombuffer(made.next_states, "<f4").reshape(2, -1).copy()
        states[:, FEATURE["ttft_p95"]] = late
        ledger.add(msgspec.structs.replace(made, workers=workers, next_states=states.tobytes()))
    return ledger.judge(NEW, FORMER, np.random.default_rng(0))


def test_unlike_workers_are_compared_by_how_each_side_changed() -> None:
    found = beside(CARDS, (0.3, 0.8), (0.3, 0.8))
    assert (found.state, found.figures["split"]) == ("sound", 1.0)
    assert found.figures["former_goodput"] == pytest.approx(0.3, abs=0.02), "what its workers showed before"
    worse = beside(CARDS, (0.8, 0.3), (0.6, 0.3), steps=40)
    assert worse.state == "regressed", "still twice its neighbour's"
    assert "beside it" in worse.why
    assert beside(CARDS, (0.8, 0.3), (0.6, 0.1)).state == "sound", "a harder time for both"


def test_on_one_card_workers_are_told_apart_by_their_own_latency() -> None:
    assert beside(ONE_CARD, (0.5, 0.5), (0.5, 0.5)).figures["split"] == 0.5
    assert beside(ONE_CARD, (0.5, 0.5), (0.5, 0.5), late=(2.0, 2.0)).state == "sound", "the former's is late as well"
    found = beside(ONE_CARD, (0.5, 0.5), (0.5, 0.5), steps=40, late=(2.0, 0.5))
    assert (found.state, found.why.split()[0]) == ("regressed", "late")
    found = beside(ONE_CARD, (0.5, 0.5), (0.3, 0.3), steps=40)
    assert (found.state, "before it" in found.why) == ("regressed", True), "the card's goodput is both workers' own"


def test_a_new_policy_that_nobody_follows_is_absent() -> None:
    ledger = Ledger(LIMITS)
    ledger.begin(NEW)
    for step in range(50):
        ledger.add(message(step, (FORMER,), (0.5,)))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "waiting"
    for step in range(50, 100):
        ledger.add(message(step, (FORMER,), (0.5,)))
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "absent"
    ledger.mark()
    assert ledger.judge(NEW, FORMER, np.random.default_rng(0)).state == "waiting", "that may have been a backlog"
