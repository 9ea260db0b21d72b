"""Forward and backward pass of a small ReLU network by hand, on the agent's own tensors.

    h_0 = x,  h_k = relu(h_k-1 W_k^T + b_k),  y = h_n W^T + b
    dW_k = d_k^T h_k-1,  db_k = sum of d_k,  d_k-1 = (d_k W_k) where h_k-1 > 0

At a batch of 64 and layers of 128, building and walking autograd's graph takes longer than the matrix products do;
here they are all there is. A test holds both to the same numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Layer(NamedTuple):
    """Weight [out, in] and bias [out], and where their gradients go; all views of the agent's vectors."""

    weight: torch.Tensor
    bias: torch.Tensor
    weight_gradient: torch.Tensor
    bias_gradient: torch.Tensor


def forward(layers: list[Layer], inputs: torch.Tensor) -> list[torch.Tensor]:
    """h_0 = ``inputs`` float32 [b, in] to h_n, behind the ReLU layers ``layers``."""
    passed = [inputs]
    for layer in layers:
        passed.append(torch.addmm(layer.bias, passed[-1], layer.weight.t()).relu_())
    return passed


def backward(layers: list[Layer], passed: list[torch.Tensor], slope: torch.Tensor) -> None:
    """Write the gradients of ``layers``; ``passed`` as :func:`forward` gave it, ``slope`` the loss's derivative by
    h_n, float32 [b, out], which is overwritten."""
    for k in range(len(layers) - 1, -1, -1):
        layer = layers[k]
        slope.mul_(passed[k + 1].sign())  # h >= 0: its sign is relu's derivative
        torch.mm(slope.t(), passed[k], out=layer.weight_gradient)
        torch.sum(slope, 0, out=layer.bias_gradient)
        if k:
            slope = slope @ layer.weight


def dueling(heads: torch.Tensor) -> torch.Tensor:
    """Q = V + A - mean A, float32 [n, actions], of both heads' outputs float32 [n, 1 + actions], V first."""
    value, advantage = heads[:, :1], heads[:, 1:]
    return advantage + (value - advantage.mean(1, keepdim=True))


def dueling_slope(by_q: torch.Tensor) -> torch.Tensor:
    """The derivative by both heads' outputs float32 [n, 1 + actions] of that by Q, float32 [n, actions]."""
    by_value = by_q.sum(1, keepdim=True)
    return torch.cat([by_value, torch.sub(by_q, by_value, alpha=1.0 / by_q.shape[1])], dim=1)
