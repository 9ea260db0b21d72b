"""Adam (Kingma and Ba 2015) without ``torch.optim.Adam``.

The class brings torch's compiler along as soon as one is made: 800 modules, seconds of every start, and a folder
in the machine's temporary one. The operation that it comes down to brings nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

MOMENTS: Final = ("exp_avg", "exp_avg_sq", "step")


class Adam:
    """Minimises by the parameters' gradients; ``state`` holds :data:`MOMENTS` of each once a step was made."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, learning_rate: float, eps: float) -> None:
        self._parameters = list(parameters)
        self._learning_rate = learning_rate
        self._eps = eps
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """theta <- theta - lr m / (sqrt(v) + eps), both moments without their bias. All parameters have a gradient."""
        states = [self.state.setdefault(one, _fresh(one)) for one in self._parameters]
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        means, squares, steps = ([state[moment] for state in states] for moment in MOMENTS)
        # One pass over all weights; below torch.optim.adam, whose checks take twice as long as the pass itself.
        torch._foreach_add_(steps, 1.0)
        torch._fused_adam_(
            self._parameters, gradients, means, squares, [], steps,
            lr=self._learning_rate, beta1=0.9, beta2=0.999, weight_decay=0.0, eps=self._eps,
            amsgrad=False, maximize=False,
        )  # fmt: skip


def _fresh(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        "step": torch.tensor(0.0),
    }
