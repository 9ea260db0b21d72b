"""The Q network in torch: what the learner trains (its file format and formula: ``services.qweights``).

The one module of the services, beside the learner's, that imports torch.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from schemas.actions import ACTION_COUNT
from schemas.features import FEATURE_COUNT, INPUT_COUNT, normalise
from services import qweights
from services.errors import PolicyError
from services.qweights import Weights, digest

__all__ = ["QNet", "digest"]


class QNet(nn.Module):
    """Dueling Q network over normalised states.

    ``generator`` makes the initial weights repeatable; torch's global one is never used.
    """

    def __init__(
        self,
        hidden: tuple[int, ...] = (128, 128),
        *,
        version: str = "",
        transitions: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        if not hidden or not all(0 < size <= qweights.MAX_HIDDEN for size in hidden):
            raise ValueError(f"hidden sizes {hidden}: expected 1 to {qweights.MAX_HIDDEN} each")
        super().__init__()
        self.sizes = tuple(hidden)
        self.version = version
        self.transitions = transitions
        widths = (INPUT_COUNT, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.value = nn.Linear(widths[-1], 1)
        self.advantage = nn.Linear(widths[-1], ACTION_COUNT)
        self._initialise(generator or torch.Generator().manual_seed(0))

    def _initialise(self, generator: torch.Generator) -> None:
        """He initialisation for the ReLU layers; small heads, so that all Q values start near zero."""
        with torch.no_grad():
            for layer in [*self.hidden, self.value, self.advantage]:
                assert isinstance(layer, nn.Linear)
                spread = (2.0 / layer.in_features) ** 0.5 if layer in list(self.hidden) else 0.01
                layer.weight.normal_(0.0, spread, generator=generator)
                layer.bias.zero_()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Q [n, 5] of *normalised* inputs float32 [n, INPUT_COUNT]."""
        x = inputs
        for layer in self.hidden:
            x = torch.relu(layer(x))
        advantage: torch.Tensor = self.advantage(x)
        value: torch.Tensor = self.value(x)
        return value + advantage - advantage.mean(dim=1, keepdim=True)

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
        return Weights(tensors, self.sizes, self.version, self.transitions)

    @classmethod
    def of(cls, weights: Weights) -> QNet:
        """A network with these weights; PolicyError when they do not fit together."""
        qweights.check(weights)
        net = cls(weights.hidden, version=weights.version, transitions=weights.transitions)
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
