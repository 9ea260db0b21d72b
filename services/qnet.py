"""The Q network in torch: what the learner trains (its file format and formula: ``services.qweights``).

The one module of the services, beside the learner's, that imports torch.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from schemas.actions import ACTION_COUNT
from schemas.features import FEATURE_COUNT, INPUT_COUNT, normalise
from services import qweights
from services.errors import PolicyError
from services.qweights import Origin, Weights, digest

__all__ = ["QNet", "digest"]


class QNet(nn.Module):
    """Dueling Q network over normalised states, and beside it, where ``risk_size`` is above 0, a risk head: a
    small network of its own (one hidden layer of that size) over the same inputs.

    ``generator`` makes the initial weights repeatable; torch's global one is never used. ``inputs`` and
    ``actions`` are Tidegate's unless a benchmark trains on something else, whose weights no policy file holds.
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (128, 128),
        *,
        version: str = "",
        transitions: int = 0,
        origin: Origin | None = None,
        risk_size: int = 0,
        inputs: int = INPUT_COUNT,
        actions: int = ACTION_COUNT,
        generator: torch.Generator | None = None,
    ) -> None:
        if not hidden or not all(0 < size <= qweights.MAX_HIDDEN for size in hidden):
            raise ValueError(f"hidden sizes {hidden}: expected 1 to {qweights.MAX_HIDDEN} each")
        if not 0 <= risk_size <= qweights.MAX_HIDDEN:
            raise ValueError(f"risk head of {risk_size}: expected 0 (none) to {qweights.MAX_HIDDEN}")
        super().__init__()
        self.sizes = tuple(hidden)
        self.risk_size, self.inputs, self.actions = risk_size, inputs, actions
        self.version = version
        self.transitions = transitions
        self.origin = origin or Origin()
        widths = (inputs, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.value = nn.Linear(widths[-1], 1)
        self.advantage = nn.Linear(widths[-1], actions)
        if risk_size:
            self.risk_hidden = nn.Linear(inputs, risk_size)
            self.risk = nn.Linear(risk_size, actions)
        self._initialise(generator or torch.Generator().manual_seed(0))

    def _initialise(self, generator: torch.Generator) -> None:
        """He initialisation for the ReLU layers; small heads, so that all Q values start near zero and all risks
        near a half. Q's weights are drawn first: they are the same with and without a risk head."""
        with torch.no_grad():
            for name, layer in self.named_modules():
                if not isinstance(layer, nn.Linear):
                    continue
                spread = (2.0 / layer.in_features) ** 0.5 if "hidden" in name else 0.01
                layer.weight.normal_(0.0, spread, generator=generator)
                layer.bias.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Q [n, actions] of *normalised* inputs float32 [n, inputs]."""
        x = inputs
        for layer in self.hidden:
            x = functional.relu(layer(x))
        # Q = V + A - mean A is one matrix of the last layer: five operations of [actions] rows instead of [n].
        weight = self.value.weight + self.advantage.weight - self.advantage.weight.mean(dim=0)
        bias = self.value.bias + self.advantage.bias - self.advantage.bias.mean()
        return functional.linear(x, weight, bias)

    def risk_logits(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits [n, actions] of memory exhaustion within the horizon; ValueError without a risk head."""
        if not self.risk_size:
            raise ValueError("this network has no risk head")
        x = functional.relu(functional.linear(inputs, self.risk_hidden.weight, self.risk_hidden.bias))
        return functional.linear(x, self.risk.weight, self.risk.bias)

    def q_values(self, raw: NDArray[np.float32]) -> NDArray[np.float32]:
        """Q float32 [n, 5] of *raw* states float32 [n, FEATURE_COUNT]; no gradient."""
        if raw.ndim != 2 or raw.shape[1] != FEATURE_COUNT:
            raise ValueError(f"states of shape {raw.shape}: expected [n, {FEATURE_COUNT}]")
        with torch.inference_mode():
            q: NDArray[np.float32] = self(torch.from_numpy(normalise(raw))).numpy()
        return q

    def weights(self) -> Weights:
        """A copy of the weights, as decision reads them."""
        tensors = {name: t.detach().cpu().numpy().copy() for name, t in self.state_dict().items()}
        return Weights(tensors, self.sizes, self.version, self.transitions, self.risk_size, self.origin)

    @classmethod
    def of(cls, weights: Weights) -> QNet:
        """A network with these weights; PolicyError when they do not fit together."""
        qweights.check(weights)
        net = cls(
            weights.hidden,
            version=weights.version,
            transitions=weights.transitions,
            origin=weights.origin,
            risk_size=weights.risk_size,
        )
        try:
            net.load_state_dict({name: torch.from_numpy(t.copy()) for name, t in weights.tensors.items()})
        except RuntimeError as error:
            raise PolicyError(f"weights {weights.version!r}: {error}") from error
        return net

    def save(self) -> bytes:
        """safetensors bytes with metadata; PolicyError for weights that are not finite or absurd."""
        return qweights.save(self.weights())

    @classmethod
    def load(cls, data: bytes) -> QNet:
        """The network in ``data``; PolicyError for a wrong feature table, shape, or values."""
        return cls.of(qweights.load(data))
