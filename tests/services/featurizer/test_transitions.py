"""Which state, action, reward and next state belong together, and what ends a trajectory."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from schemas.features import FEATURE
from schemas.outcomes import OutcomeBatch, outcome_batch, outcomes_of
from schemas.transitions import REWARD_PARTS, Columns, TransitionBatch, columns_of
from services.featurizer.tracker import Tracker, TrackerSettings
from services.featurizer.transitions import Transitions

from .samples import counting, outcome, row, sample


class Loop:
    """A node with two workers whose windows are full after step 1."""

    def __init__(self) -> None:
        self.tracker = Tracker(TrackerSettings(window_steps=1))
        self.pairs = Transitions(self.tracker)

    def sampled(self, step: int, *, boot_id: int = 1, node: str = "n0", **changes: float) -> list[TransitionBatch]:
        now = counting(step, output_tokens=1000)
        first = now.copy()
        extra = row(**changes)
        for column in np.flatnonzero(extra != row()):
            first[column] = extra[column]
        states = self.tracker.observe(sample(step, [first, now], boot_id=boot_id, node=node))
        assert states is not None, f"the sample of step {step} is news"
        return self.pairs.sampled(states)

    def executed(self, batch: OutcomeBatch) -> list[TransitionBatch]:
        return self.pairs.executed([batch])

    def step(self, step: int, **said: Any) -> list[TransitionBatch]:
        return self.sampled(step) + self.executed(outcome(step, **said))


def only(batches: list[TransitionBatch]) -> Columns:
    assert len(batches) == 1, "one batch a node and step"
    return columns_of(batches[0])


def test_a_transition_is_whole_when_the_next_outcome_brings_the_next_mask() -> None:
    loop = Loop()
    assert loop.step(0) == []
    assert loop.step(1, action=2, mask=7) == [], "step 0 was held: its window was not full"
    assert loop.sampled(2, waiting=77) == [], "the next mask is not known yet"
    batches = loop.executed(outcome(2, action=0, mask=17))
    got = only(batches)
    assert (batches[0].node, batches[0].boot_id, batches[0].step) == ("n0", 1, 1)
    assert batches[0].workers == ("n0/0/w0", "n0/0/w1")
    assert batches[0].policies == ("heuristic", "heuristic")
    assert got.actions.tolist() == [2, 2], "what was executed in step 1"
    assert got.masks.tolist() == [7, 7]
    assert got.next_masks.tolist() == [17, 17], "the mask of step 2"
    assert got.states[0, FEATURE["l_queue"]] == 6
    assert got.next_states[0, FEATURE["l_queue"]] == 77
    assert got.next_states[0, FEATURE["since_tighten"]] == 1
    assert got.rewards[0, REWARD_PARTS.index("tokens")] == pytest.approx(0.2), "2 x 1000 tokens, 2 s, 5000 tokens/s"
    assert got.discounts.tolist() == [1, 1]
    assert got.dones.tolist() == [0, 0]
    assert got.probabilities.tolist() == [1, 1]


def test_every_step_gives_one_transition_once_the_loop_runs() -> None:
    loop = Loop()
    steps = [batch.step for step in range(8) for batch in loop.step(step)]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("lost", ["sample", "outcome"])
def test_a_gap_ends_the_trajectory(lost: str) -> None:
    loop = Loop()
    steps = []
    for step in range(9):
        batches = [] if lost == "sample" and step == 4 else loop.sampled(step)
        if not (lost == "outcome" and step == 4):
            batches += loop.executed(outcome(step))
        steps += [batch.step for batch in batches]
    assert steps == [1, 2, 5, 6, 7], "3 has no next step, 4 is not known"


def test_a_worker_missing_in_an_outcome_has_a_gap_and_the_others_go_on() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    assert only(loop.executed(outcome(3, ["n0/0/w1"]))).actions.shape == (1,)
    loop.sampled(4)
    batches = loop.executed(outcome(4))
    assert batches[0].workers == ("n0/0/w1",), "the other has no executed action in step 3"


def test_an_absent_reward_gives_no_transition() -> None:
    loop = Loop()
    loop.step(0)
    loop.step(1)
    loop.sampled(2, output_tokens=np.nan)
    assert loop.executed(outcome(2)) == [], "the card's throughput is not known"


def test_a_window_that_fills_at_either_end_gives_no_transition() -> None:
    loop = Loop()
    for step in range(4):
        loop.step(step)
    loop.sampled(4, boot_id=2)
    assert loop.executed(outcome(4, boot_id=2)) == [], "held at its end"
    loop.sampled(5, boot_id=2)
    assert loop.executed(outcome(5, boot_id=2)) == [], "held at its beginning"
    loop.sampled(6, boot_id=2)
    assert loop.executed(outcome(6, boot_id=2))[0].step == 5


def test_an_outcome_of_another_boot_or_an_older_step_is_counted_and_ignored() -> None:
    loop = Loop()
    for step in range(4):
        loop.step(step)
    assert loop.executed(outcome(3)) == [], "a duplicate"
    assert loop.executed(outcome(1)) == []
    assert loop.executed(outcome(4)) == [], "its sample never came"
    assert loop.executed(outcome(3, boot_id=0)) == []
    assert loop.executed(outcome(3, node="elsewhere")) == []
    assert loop.pairs.counts["old_outcome", ""] == 3
    assert loop.pairs.counts["outcome_without_sample", ""] == 1
    assert loop.pairs.counts["unknown_node", ""] == 1


def test_completions_are_no_receipts() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    assert loop.executed(outcome(3, kind=1)) == [], "an effect of an earlier step"
    assert loop.executed(outcome(3))[0].step == 2, "the receipt of the step still counts"


def test_a_crash_is_terminal_for_its_card() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3, oom=1, starting=1)
    got = only(loop.executed(outcome(3)))
    assert got.dones.tolist() == [1, 1], "the card ran out of memory"
    assert got.discounts.tolist() == [0, 0]
    assert got.rewards[0, REWARD_PARTS.index("goodput")] == pytest.approx(-20)


def test_a_crash_whose_next_outcome_never_comes_goes_with_the_next_sample() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3, oom=1, starting=1)
    batches = loop.sampled(4, oom=1)
    got = only(batches)
    assert batches[0].step == 2
    assert got.dones.tolist() == [1, 1]
    assert got.next_masks.tolist() == [1, 1], "nothing but hold is known to be allowed"
    assert loop.executed(outcome(4)) == [], "and only once"


def test_an_outcome_that_comes_after_the_next_sample_still_counts() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    loop.sampled(4)
    assert loop.executed(outcome(3))[0].step == 2
    assert loop.executed(outcome(4))[0].step == 3


def test_outcomes_of_many_nodes_and_steps_in_one_batch_are_told_apart() -> None:
    loop = Loop()
    nodes = ("a", "b", "c")
    for step in range(2):
        for node in nodes:
            loop.sampled(step, node=node)
            loop.executed(outcome(step, [f"{node}/0/w0", f"{node}/0/w1"], node=node))
    for node in nodes:
        loop.sampled(2, node=node)
    batches = loop.pairs.executed(
        [outcome(2, [f"{node}/0/w1", f"{node}/0/w0"][: 2 - (node == "b")], node=node, policy=node) for node in nodes]
    )
    assert [batch.node for batch in batches] == list(nodes)
    assert [batch.workers for batch in batches] == [("a/0/w1", "a/0/w0"), ("b/0/w1",), ("c/0/w1", "c/0/w0")]
    assert all(columns_of(batch).states.shape[0] == len(batch.workers) for batch in batches)


@pytest.mark.parametrize(
    "change",
    [
        {"executed_action": 9},
        {"executed_action": 255},
        {"mask": 0},
        {"mask": 99},
        {"probability": float("nan")},
        {"probability": 2.0},
        {"worker": "n0/0/other"},
    ],
)
def test_a_receipt_that_cannot_be_is_counted_and_the_others_are_kept(change: dict[str, object]) -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    good = outcome(3)
    first, second = outcomes_of(good)
    bad = outcome_batch(good.node, good.boot_id, good.step, good.t_ns, [first._replace(**change), second])
    assert loop.executed(bad)[0].workers == ("n0/0/w1",)
    counts = loop.pairs.counts
    assert counts.get(("bad_outcome", ""), 0) + counts.get(("unknown_worker", ""), 0) == 1


def test_an_outcome_whose_columns_do_not_agree_is_counted_and_ignored() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    assert loop.executed(msgspec.structs.replace(outcome(3), masks=b"\x1f")) == []
    assert loop.pairs.counts["bad_shape", ""] == 1
    assert loop.executed(outcome(3))[0].step == 2, "the right one still counts"


def test_policies_are_told_apart_by_row() -> None:
    loop = Loop()
    for step in range(3):
        loop.step(step)
    loop.sampled(3)
    first, second = outcomes_of(outcome(3))
    loop.executed(outcome_batch("n0", 1, 3, 0, [first._replace(policy="dqn:v1", probability=0.25), second]))
    (batch,) = loop.step(4)
    assert batch.policies == ("dqn:v1", "heuristic")
    assert columns_of(batch).probabilities.tolist() == [0.25, 1.0]


def test_a_row_given_to_another_worker_keeps_nothing_of_the_former() -> None:
    tracker = Tracker(TrackerSettings(window_steps=1, forget_steps=1))
    pairs = Transitions(tracker)
    for step in range(3):
        states = tracker.observe(sample(step, [row(), row()]))
        assert states is not None
        pairs.sampled(states)
        pairs.executed([outcome(step)])
    for step, workers in ((3, ["n0/0/w0"]), (4, ["n0/0/w0"]), (5, ["n0/0/w0", "n0/1/new"])):
        states = tracker.observe(sample(step, [row()] * len(workers), workers=workers, cards=range(len(workers))))
        assert states is not None
        pairs.sampled(states)
        batches = pairs.executed([outcome(step, workers)])
    assert batches[0].workers == ("n0/0/w0",)
