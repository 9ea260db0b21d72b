"""What the risk head is taught: exhaustion within the next k steps, and nothing about recordings that end."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from schemas.features import FEATURE, FEATURE_COUNT
from services.learner import risk
from services.learner.replay_buffer import NO_ROW, ReplayBuffer, Rows
from services.learner.update import risk_labels


def columns(**values: float) -> np.ndarray:
    row = np.zeros(FEATURE_COUNT, np.float32)
    row[FEATURE["quota_hard"]] = row[FEATURE["q0_share"]] = 0.5
    for name, value in values.items():
        row[FEATURE[name]] = value
    return row[risk.RISK_COLUMNS]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, False),
        ({}, {"preemption_rate": 0.1}, True),
        ({"preemption_rate": 0.1}, {"preemption_rate": 0.1}, False),  # still the one from before
        ({"preemption_rate": 0.2}, {"preemption_rate": 0.1}, False),
        ({"preemption_rate": math.nan}, {"preemption_rate": 0.1}, True),
        ({}, {"preemption_rate": math.nan}, False),
        ({}, {"u_alloc": 0.99}, True),
        ({}, {"u_alloc": 0.99, "idle_share": 0.5}, False),  # the guard drops what is idle
        ({}, {"u_alloc": 0.99, "quota_hard": 0.6}, False),  # borrowed from a neighbour
        ({}, {"u_alloc": 0.99, "quota_hard": math.nan}, False),
        ({}, {"u_alloc": 0.0, "quota_hard": 0.0}, False),
    ],
)
def test_exhaustion_is_a_preemption_or_a_full_quota(before: dict, after: dict, expected: bool) -> None:
    assert risk.exhausted(columns(**before), columns(**after)) == expected


def label(events: str, known: str = "111", ends: str = "000") -> float:
    """One chain of three steps, each argument a digit a step."""
    column = lambda digits: np.array([d == "1" for d in digits]).reshape(-1, 1)  # noqa: E731
    return float(risk.within(column(events), column(known), column(ends))[0])


def test_one_event_within_the_horizon_is_enough() -> None:
    assert [label(events) for events in ("000", "100", "010", "001")] == [0.0, 1.0, 1.0, 1.0]


def test_a_recording_that_ends_before_the_horizon_is_not_known() -> None:
    assert math.isnan(label("000", known="110"))
    assert label("010", known="110") == 1.0, "what happened before the end is known"
    assert math.isnan(label("001", known="110")), "values of unknown rows are never read"


def test_a_crash_is_exhaustion() -> None:
    assert label("000", known="110", ends="010") == 1.0


def test_the_loss_is_a_weighted_cross_entropy_of_the_known_rows() -> None:
    logits = torch.tensor([[0.0, math.log(3.0)], [9.0, 9.0], [math.log(3.0), 9.0]])
    loss, slopes = risk.risk_loss(
        logits, torch.tensor([1, 0, 0]), torch.tensor([1.0, math.nan, 0.0]), torch.tensor([1.0, 1.0, 0.5])
    )
    # Odds of 3 to 1 are 0.75: right costs -ln 0.75, wrong -ln 0.25; two of the three rows are known.
    assert loss.item() == pytest.approx((-math.log(0.75) - 0.5 * math.log(0.25)) / 2)
    expected = torch.tensor([[0.0, (0.75 - 1) / 2], [0.0, 0.0], [0.5 * 0.75 / 2, 0.0]])
    torch.testing.assert_close(slopes, expected, msg="sigmoid less label, at the action alone")


def test_nothing_known_costs_nothing() -> None:
    loss, slopes = risk.risk_loss(torch.zeros(2, 2), torch.tensor([0, 1]), torch.full((2,), math.nan), torch.ones(2))
    assert loss.item() == 0.0
    assert (slopes == 0).all()


def test_labels_come_from_the_rows_that_followed() -> None:
    buffer = ReplayBuffer(8, 1)
    previous = np.array([NO_ROW])
    one = np.ones(1)
    for event in (False, False, True, False):
        row = Rows(one.astype("f4").reshape(1, 1), one.astype("f4").reshape(1, 1), one.astype("u1"), one.astype("u1"),
                   one.astype("f4"), one.astype("f4"), one.astype("f4"), one.astype("i8"))  # fmt: skip
        previous = buffer.insert(row, previous, exhausted=np.array([event]))
    labels = risk_labels(buffer, buffer.chain(np.arange(4), 2))
    np.testing.assert_array_equal(labels, [0.0, 1.0, 1.0, np.nan], "memory was exhausted in step 2")
