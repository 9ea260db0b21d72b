"""The torch network: the same formula and file as ``services.qweights``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from schemas.features import FEATURE_COUNT, normalise
from services import qweights
from services.errors import PolicyError
from services.qnet import QNet, digest
from tests.services.decision.rows import state, weights


@pytest.fixture(scope="module")
def states() -> np.ndarray:
    rng = np.random.default_rng(3)
    raw = (rng.random((64, FEATURE_COUNT)) * 2).astype(np.float32)
    raw[rng.random(raw.shape) < 0.1] = np.nan
    return raw


def test_torch_and_numpy_agree(states: np.ndarray) -> None:
    net = QNet((32, 16), generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(net.q_values(states), qweights.q_values(net.weights(), states), atol=1e-5)


def test_torch_and_numpy_agree_on_the_risk(states: np.ndarray) -> None:
    net = QNet((32, 16), risk_size=8, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = torch.sigmoid(net.risk_logits(torch.from_numpy(normalise(states)))).numpy()
    found = qweights.values(net.weights(), states)
    np.testing.assert_allclose(found.risk, expected, atol=1e-5)
    np.testing.assert_allclose(found.q, net.q_values(states), atol=1e-5)
    assert QNet.load(net.save()).risk_size == 8


def test_a_network_without_a_risk_head_says_so() -> None:
    with pytest.raises(ValueError, match="no risk head"):
        QNet((8,)).risk_logits(torch.zeros(1, 1))


def test_q_values_by_hand() -> None:
    assert QNet.of(weights("v1", [0, 1, 2, 3, 4])).q_values(state()).tolist() == [[-1.0, 0.0, 1.0, 2.0, 3.0]]


def test_the_mean_advantage_is_taken_off_so_that_q_averages_to_v(states: np.ndarray) -> None:
    net = QNet((16,))
    x = torch.from_numpy(normalise(states))
    with torch.inference_mode():
        value = net.value(torch.relu(net.hidden[0](x)))
        mean = net(x).mean(dim=1, keepdim=True)
    np.testing.assert_allclose(mean.numpy(), value.numpy(), rtol=1.3e-6, atol=1e-5)


def test_a_saved_network_comes_back_the_same(states: np.ndarray) -> None:
    net = QNet((16, 16), version="v7", transitions=1234, generator=torch.Generator().manual_seed(2))
    data = net.save()
    back = QNet.load(data)
    assert (back.version, back.transitions, back.sizes) == ("v7", 1234, (16, 16))
    assert (back.q_values(states) == net.q_values(states)).all()
    assert digest(back.save()) == digest(data), "the same weights have the same name everywhere"


def test_the_generator_alone_decides_the_first_weights(states: np.ndarray) -> None:
    torch.manual_seed(5)
    first = QNet((8,), generator=torch.Generator().manual_seed(1)).q_values(states)
    torch.manual_seed(6)
    assert (QNet((8,), generator=torch.Generator().manual_seed(1)).q_values(states) == first).all()
    assert (QNet((8,), generator=torch.Generator().manual_seed(2)).q_values(states) != first).any()
    assert np.abs(first).max() < 1.0, "an untrained network prefers nothing strongly"


def test_weights_that_diverged_cannot_be_saved() -> None:
    net = QNet((8,), version="broken")
    with torch.no_grad():
        net.value.bias.fill_(float("nan"))
    with pytest.raises(PolicyError, match="broken"):
        net.save()


def test_weights_of_another_shape_are_refused() -> None:
    good = weights("v1", [0, 1, 2, 3, 4])
    with pytest.raises(PolicyError):
        QNet.of(qweights.Weights(good.tensors, (5,), "v1"))


def test_hidden_sizes_and_widths_are_checked() -> None:
    with pytest.raises(ValueError, match="hidden sizes"):
        QNet(())
    with pytest.raises(ValueError, match="expected"):
        QNet((8,)).q_values(np.zeros((1, 3), np.float32))
