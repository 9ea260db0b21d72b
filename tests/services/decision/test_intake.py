"""Which messages are answered."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.actions import Hold
from schemas.states import STATE_BATCH, StateBatch
from schemas.subjects import subject
from services.decision.intake import Admitted, Intake
from tests.services.decision.rows import message, state, state_batch


class Taking:
    """An intake and what it rejected."""

    def __init__(self) -> None:
        self.rejected: Counter[str] = Counter()
        self.intake = Intake(lambda reason: self.rejected.update([reason]))

    def take(self, batch: StateBatch, on: str = "n0") -> Admitted | None:
        return self.intake.take(subject("state", on), STATE_BATCH.encode(batch))


@pytest.fixture
def taking() -> Taking:
    return Taking()


def test_a_good_message_is_admitted_with_its_states(taking: Taking) -> None:
    batch = state_batch(np.repeat(state(), 2, axis=0), holds=[0, 2], classes=[1, 3])
    admitted = taking.take(batch)
    assert admitted is not None
    assert admitted.batch == batch
    assert (admitted.features == np.repeat(state(), 2, axis=0)).all()
    assert (list(admitted.classes), list(admitted.holds)) == ([1, 3], [0, 2])
    assert not taking.rejected


@pytest.mark.parametrize(("boot_id", "step", "answered"), [(7, 5, False), (7, 4, False), (6, 9, False), (7, 6, True),
                                                           (8, 0, True)])  # fmt: skip
def test_duplicates_and_older_steps_are_dropped(taking: Taking, boot_id: int, step: int, answered: bool) -> None:
    assert taking.take(state_batch(state(), boot_id=7, step=5))
    assert (taking.take(state_batch(state(), boot_id=boot_id, step=step)) is not None) == answered
    assert taking.rejected["stale"] == int(not answered)


def test_each_node_has_its_own_order(taking: Taking) -> None:
    assert taking.take(state_batch(state(), node="a.b", step=5), on="a.b")
    assert taking.take(state_batch(state(), node="n1", step=1), on="n1")


def test_a_message_on_another_nodes_subject_is_dropped(taking: Taking) -> None:
    assert taking.take(state_batch(state(), node="n1"), on="n0") is None
    assert taking.intake.take("tg.v1.state.???", message(state_batch(state())).data) is None
    assert taking.rejected == {"wrong_node": 2}


def test_another_feature_table_holds_its_workers(taking: Taking) -> None:
    admitted = taking.take(state_batch(np.repeat(state(), 2, axis=0), feature_hash="0" * 16))
    assert admitted is not None
    assert list(admitted.holds) == [Hold.FEATURE_TABLE_MISMATCH] * 2
    assert np.isnan(admitted.features).all()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema_version": 99}, "unknown_version"),
        ({"features": b"123"}, "bad_shape"),
        ({"holds": ()}, "bad_shape"),
        ({"holds": (), "feature_hash": "0" * 16}, "bad_shape"),
        ({"workers": ("n0/0/w0", "n0/0/w1")}, "bad_shape"),
        ({"classes": (256,)}, "out_of_range"),
        ({"holds": (-1,)}, "out_of_range"),
        ({"generations": (-1,)}, "out_of_range"),
        ({"generations": (2**63,)}, "out_of_range"),
        ({"t_ns": 2**63}, "out_of_range"),
        ({"t_ns": -1}, "out_of_range"),
        ({"boot_id": 2**63}, "out_of_range"),
    ],
)
def test_what_does_not_hold_together_is_dropped_and_leaves_no_trace(
    taking: Taking, changes: dict[str, object], reason: str
) -> None:
    good = state_batch(state())
    assert taking.take(msgspec.structs.replace(good, **changes)) is None
    assert taking.rejected == {reason: 1}
    assert taking.take(good) is not None, "the order of the node is not moved by a message that was dropped"


def test_a_node_without_workers_is_answered(taking: Taking) -> None:
    assert taking.take(state_batch(np.empty((0, state().shape[1]), np.float32))) is not None


@given(st.binary(max_size=64))
def test_garbage_is_counted_and_dropped(data: bytes) -> None:
    taking = Taking()
    assert taking.intake.take(subject("state", "n0"), data) is None
    assert sum(taking.rejected.values()) == 1
