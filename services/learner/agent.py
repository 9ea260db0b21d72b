"""What training changes: the networks, the optimiser's moments and the count of updates.

All weights of a network lie in one vector, of which the layers' tensors are views, and so do the gradients. The
optimiser, the gradient's norm and Polyak's step then are one operation each instead of one a tensor, and at
these sizes what an operation costs is its call.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from services.errors import PolicyError
from services.learner.adam import MOMENTS, Adam
from services.learner.backprop import Layer, dueling, forward
from services.qnet import QNet

_KINDS = ("weight", "bias")


class Net(NamedTuple):
    """A network's parts as :mod:`backprop` works on them."""

    hidden: list[Layer]
    heads: Layer
    """Value and advantage, 1 + actions rows."""
    risk_hidden: list[Layer]
    """One layer, or none where there is no risk head."""
    risk: Layer | None

    def q(self, inputs: torch.Tensor) -> torch.Tensor:
        """Q float32 [n, actions] of normalised inputs float32 [n, inputs]; no gradient."""
        return dueling(torch.addmm(self.heads.bias, forward(self.hidden, inputs)[-1], self.heads.weight.t()))

    def risks(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """Risk float32 [n, actions], None without a risk head; no gradient."""
        if self.risk is None:
            return None
        last = forward(self.risk_hidden, inputs)[-1]
        return torch.addmm(self.risk.bias, last, self.risk.weight.t()).sigmoid_()


class Agent(msgspec.Struct):
    """The networks and what moves them."""

    online: QNet
    target: QNet
    """Without a risk head: nothing is bootstrapped from it."""
    vector: torch.Tensor
    """float32 [weights]: the online network's, Q's first and the risk head's after them."""
    gradient: torch.Tensor
    """float32 [weights]."""
    target_vector: torch.Tensor
    """float32 [weights of Q]."""
    optimizer: Adam
    net: Net
    """The online network's parts, with places for gradients."""
    target_net: Net
    updates: int = 0


def make_agent(
    hidden: tuple[int, ...],
    learning_rate: float,
    seed: int,
    start: QNet | None = None,
    *,
    risk_size: int = 0,
) -> Agent:
    """A fresh agent; ``start`` gives the network to begin with instead of random weights."""
    return agent_of(
        start or QNet(hidden, risk_size=risk_size, generator=torch.Generator().manual_seed(seed)), learning_rate
    )


def agent_of(online: QNet, learning_rate: float) -> Agent:
    """The agent that trains ``online``, in place, from its present weights."""
    target = QNet(online.sizes, inputs=online.inputs, actions=online.actions)
    vector, target_vector = _bound(online), _bound(target)
    target_vector.copy_(vector[: target_vector.numel()])
    target.requires_grad_(False)
    gradient = torch.zeros_like(vector)
    vector.grad = gradient
    optimizer = Adam([vector], learning_rate=learning_rate, eps=1e-5)
    net, target_net = _net(online, vector, gradient), _net(target, target_vector, torch.empty_like(target_vector))
    return Agent(online, target, vector, gradient, target_vector, optimizer, net, target_net)


def _net(net: QNet, vector: torch.Tensor, gradient: torch.Tensor) -> Net:
    weights, gradients = (dict(zip(layout(net), _views(one, net), strict=True)) for one in (vector, gradient))

    def layer(name: str) -> Layer:
        parts = [f"{name}.{kind}" for kind in _KINDS]
        return Layer(*(weights[part] for part in parts), *(gradients[part] for part in parts))

    def both(kind: str, where: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
        """Both heads' as one tensor: they are neighbours in the vector."""
        value, advantage = where[f"value.{kind}"], where[f"advantage.{kind}"]
        shape = (1 + net.actions, *advantage.shape[1:])
        return one[value.storage_offset() :][: value.numel() + advantage.numel()].view(shape)

    return Net(
        [layer(f"hidden.{k}") for k in range(len(net.sizes))],
        Layer(
            *(both(kind, w, v) for w, v in ((weights, vector), (gradients, gradient)) for kind in ("weight", "bias"))
        ),
        [layer("risk_hidden")] if net.risk_size else [],
        layer("risk") if net.risk_size else None,
    )


def layout(net: QNet) -> list[str]:
    """The tensors in the vector's order: as in the network, but the two heads' weights side by side, and biases."""
    names = [name for name, _ in net.named_parameters()]
    at = names.index("value.weight")
    return [
        *names[:at], "value.weight", "advantage.weight", "value.bias", "advantage.bias", *names[at + 4 :]
    ]  # fmt: skip


def _parameters(net: QNet) -> list[torch.nn.Parameter]:
    named = dict(net.named_parameters())
    return [named[name] for name in layout(net)]


def version_of(agent: Agent, transitions: int) -> str:
    """The name of the online network's present weights, learned from so many transitions: of no others."""
    tensors = sorted(agent.online.weights().tensors.items())
    return f"dqn-{transitions}-{hashlib.sha256(b''.join(t.tobytes() for _, t in tensors)).hexdigest()[:8]}"


def tensors_of(agent: Agent) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the agent by name: ``online.*``, ``target.*`` and Adam's moments ``adam.*``."""
    out = {
        f"{part}.{name}": tensor.detach().numpy().copy()
        for part, net in (("online", agent.online), ("target", agent.target))
        for name, tensor in net.state_dict().items()
    }
    names = layout(agent.online)
    for moment, vector in agent.optimizer.state.get(agent.vector, {}).items():
        views = [vector] * len(names) if moment == "step" else _views(vector, agent.online)
        for name, view in zip(names, views, strict=True):
            out[f"adam.{name}.{moment}"] = np.atleast_1d(view.numpy()).astype(np.float32)
    return out


def restore_agent(agent: Agent, tensors: Mapping[str, NDArray[np.float32]], updates: int) -> None:
    """Take over :func:`tensors_of`; PolicyError when one is missing, of another shape or not finite."""
    for name, tensor in tensors.items():
        if not np.isfinite(tensor).all():
            raise PolicyError(f"checkpoint: {name} has values that are not finite")
    try:
        for part, net in (("online", agent.online), ("target", agent.target)):
            prefix = f"{part}."
            state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
            net.load_state_dict({name: torch.from_numpy(t.copy()) for name, t in state.items()})
        if updates:
            names = layout(agent.online)
            agent.optimizer.state[agent.vector] = {
                moment: _joined([tensors[f"adam.{name}.{moment}"] for name in names])
                if moment != "step"
                else torch.tensor(float(tensors[f"adam.{names[0]}.step"][0]))
                for moment in MOMENTS
            }
    except (RuntimeError, KeyError) as error:
        raise PolicyError(f"checkpoint: {error}") from error
    agent.updates = updates


def _bound(net: QNet) -> torch.Tensor:
    """One vector with the network's weights, which become views of it."""
    vector = torch.cat([one.detach().reshape(-1) for one in _parameters(net)])
    for parameter, view in zip(_parameters(net), _views(vector, net), strict=True):
        parameter.data = view
    return vector


def _views(vector: torch.Tensor, net: QNet) -> list[torch.Tensor]:
    own = _parameters(net)
    parts = torch.split(vector, [one.numel() for one in own])
    return [part.view(one.shape) for part, one in zip(parts, own, strict=True)]


def _joined(parts: list[NDArray[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([part.ravel() for part in parts]))
