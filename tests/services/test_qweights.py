"""The weights file and the forward pass without torch."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save as save_tensors

from schemas.features import FEATURE_COUNT, FEATURE_HASH, INPUT_COUNT
from services import qweights
from services.errors import PolicyError
from services.qweights import Weights
from tests.services.decision.rows import state, weights

GOOD = weights("v1", [0, 1, 2, 3, 4])
BYTES = qweights.save(GOOD)


def changed(name: str, value: object) -> Weights:
    tensor = GOOD.tensors[name].copy()
    tensor.flat[0] = value
    return msgspec.structs.replace(GOOD, tensors={**GOOD.tensors, name: tensor})


def raw_bytes(network: Weights, **changes: object) -> bytes:
    """A file that nobody checked when it was written."""
    right = {"format": "tidegate-q-1", "feature_hash": FEATURE_HASH, "version": "v1", "hidden": [4]}
    about = msgspec.json.encode({**right, **changes}).decode()
    return save_tensors(dict(network.tensors), {"tidegate": about})


def test_q_is_the_value_plus_the_advantage_less_the_mean_over_all_actions() -> None:
    # By hand: V = 1, A = 0 1 2 3 4, mean A = 2.
    assert qweights.q_values(GOOD, state()).tolist() == [[-1.0, 0.0, 1.0, 2.0, 3.0]]


def test_hidden_layers_are_rectified_sums_of_the_normalised_state() -> None:
    hand = weights("hand", [0, 0, 0, 0, 0], hidden=(2,))
    hand.tensors["hidden.0.weight"][0, 0] = 2.0  # u_alloc, normalised 0.25
    hand.tensors["hidden.0.weight"][1, 0] = -2.0
    hand.tensors["value.weight"][0] = [1.0, 10.0]
    assert qweights.q_values(hand, state(u_alloc=0.5))[0, 0] == 1.5, "1 + 2 x 0.25 + 10 x max(0, -0.5)"


def test_many_rows_give_what_each_gives_alone() -> None:
    rng = np.random.default_rng(0)
    shapes = qweights.shapes((16, 8))
    network = Weights({n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}, (16, 8))
    raw = rng.random((1100, FEATURE_COUNT)).astype(np.float32)
    alone = np.concatenate([qweights.q_values(network, raw[i : i + 1]) for i in (0, 511, 512, 1099)])
    np.testing.assert_allclose(qweights.q_values(network, raw)[[0, 511, 512, 1099]], alone, rtol=1e-4, atol=1e-4)
    assert qweights.q_values(network, raw[:0]).shape == (0, 5)


def test_a_file_gives_back_what_was_saved() -> None:
    loaded = qweights.load(BYTES)
    assert (loaded.version, loaded.hidden, loaded.transitions) == ("v1", (4,), 100)
    for name, tensor in GOOD.tensors.items():
        assert (loaded.tensors[name] == tensor).all()


def test_the_usual_network_stays_far_below_a_megabyte() -> None:
    network = Weights({n: np.zeros(s, np.float32) for n, s in qweights.shapes((128, 128)).items()}, (128, 128))
    assert len(qweights.save(network)) < 200_000
    wide = Weights({n: np.zeros(s, np.float32) for n, s in qweights.shapes((4096,)).items()}, (4096,))
    with pytest.raises(PolicyError, match="at most"):
        qweights.save(wide)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e4])
def test_values_that_no_training_run_should_give_are_refused(value: float) -> None:
    bad = changed("hidden.0.weight", value)
    with pytest.raises(PolicyError, match=r"hidden\.0\.weight"):
        qweights.save(bad)
    with pytest.raises(PolicyError, match=r"hidden\.0\.weight"):
        qweights.load(raw_bytes(bad))


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"feature_hash": "0123456789abcdef"}, "feature table '0123456789abcdef'"),
        ({"format": "other"}, "format 'other'"),
        ({"hidden": [5]}, "expected float32"),
        ({"hidden": []}, "hidden sizes"),
        ({"hidden": [99999999]}, "hidden sizes"),
        ({"hidden": ["four"]}, "unreadable header"),
        ({"transitions": "many"}, "unreadable header"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(metadata: dict[str, object], told: str) -> None:
    with pytest.raises(PolicyError, match=told):
        qweights.load(raw_bytes(GOOD, **metadata))


def test_missing_tensors_and_other_types_are_refused() -> None:
    fewer = {name: tensor for name, tensor in GOOD.tensors.items() if name != "value.bias"}
    with pytest.raises(PolicyError, match=r"value\.bias"):
        qweights.load(raw_bytes(msgspec.structs.replace(GOOD, tensors=fewer)))
    doubled = {name: tensor.astype(np.float64) for name, tensor in GOOD.tensors.items()}
    with pytest.raises(PolicyError, match="float64"):
        qweights.load(raw_bytes(msgspec.structs.replace(GOOD, tensors=doubled)))


def risky(logits: list[float]) -> Weights:
    """GOOD (Q = -1 0 1 2 3 everywhere) with a risk head that says these logits everywhere."""
    tensors = {n: np.zeros(s, np.float32) for n, s in qweights.shapes(GOOD.hidden, 2).items()} | dict(GOOD.tensors)
    tensors["risk.bias"][:] = logits
    return msgspec.structs.replace(GOOD, tensors=tensors, risk_size=2)


def test_risk_is_the_sigmoid_of_a_head_of_its_own() -> None:
    hand = risky([0, 0, 0, 0, 0])
    hand.tensors["risk_hidden.weight"][0, 0] = 4.0  # u_alloc, normalised 0.25
    hand.tensors["risk_hidden.weight"][1, 0] = -4.0
    hand.tensors["risk.weight"][3] = [np.log(3.0), 50.0]
    found = qweights.values(hand, state(u_alloc=0.5))
    np.testing.assert_allclose(found.risk, [[0.5, 0.5, 0.5, 0.75, 0.5]], rtol=1e-6, err_msg="ln 3 is odds of 3 to 1")
    assert found.q.tolist() == qweights.q_values(GOOD, state()).tolist()


def test_a_file_without_a_risk_head_is_read_and_never_vetoes() -> None:
    old = qweights.load(raw_bytes(GOOD))
    found = qweights.values(old, state())
    assert (old.risk_size, found.risk) == (0, None)
    assert qweights.best(found, np.ones((1, 5), bool), veto=0.0).tolist() == [4]


def test_a_file_gives_back_risk_head_and_origin() -> None:
    origin = qweights.Origin(seed=3, command="tidegate train --seed 3", config={"gamma": 0.97, "hidden": [4]})
    made = msgspec.structs.replace(risky([1, 2, 3, 4, 5]), origin=origin)
    loaded = qweights.load(qweights.save(made))
    assert loaded.origin == origin
    assert loaded.tensors["risk.bias"].tolist() == [1, 2, 3, 4, 5]
    assert qweights.digest(qweights.save(loaded)) == qweights.digest(qweights.save(made))


@pytest.mark.parametrize(
    ("allowed", "veto", "expected", "why"),
    [
        ([1, 1, 1, 1, 1], 1.0, 4, "no veto: the highest Q"),
        ([1, 1, 1, 1, 1], 0.5, 2, "3 and 4 are too risky: the highest Q of the safe ones"),
        ([1, 0, 0, 1, 1], 0.5, 0, "a safe action wins, however low its Q"),
        ([0, 0, 0, 1, 1], 0.5, 3, "none is safe: the least risky"),
    ],
)
def test_a_risky_action_loses_against_a_safer_one(allowed: list[int], veto: float, expected: int, why: str) -> None:
    found = qweights.values(risky([-5, -5, -5, 1, 2]), state())
    assert qweights.best(found, np.array([allowed], bool), veto).tolist() == [expected], why


def test_a_risk_head_of_no_size_is_refused() -> None:
    with pytest.raises(PolicyError, match="risk head"):
        qweights.load(raw_bytes(GOOD, risk_size=-1))
    with pytest.raises(PolicyError, match="risk"):
        qweights.load(raw_bytes(GOOD, risk_size=2))


def test_states_of_another_width_are_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="expected"):
        qweights.q_values(GOOD, np.zeros((1, INPUT_COUNT), np.float32))


def test_too_large_a_file_is_refused_unread() -> None:
    with pytest.raises(PolicyError, match="at most"):
        qweights.load(bytes(qweights.MAX_FILE_BYTES + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_policy_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(PolicyError):
        qweights.load(data)


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_a_policy_error_or_other_weights_but_never_a_crash(at: int, flip: int) -> None:
    data = bytearray(BYTES)
    data[at] ^= flip
    assert qweights.digest(bytes(data)) != qweights.digest(BYTES), "the pointer's digest catches every change"
    try:
        qweights.check(qweights.load(bytes(data)))
    except PolicyError:
        return
