"""Double DQN (van Hasselt et al. 2016) on a dueling network (Wang et al. 2016), as free functions on tensors.

    y      = R + G Q'(s', a*)        a* = argmax over a in mask(s') of Q(s', a)
    delta  = Q(s, a) - y
    L      = mean of w huber(delta)
    theta' <- theta' + tau (theta - theta')

Q is the online network (theta), Q' the target network (theta'); R and G are the n-step return and discount of
``nstep``; w are the importance weights of the replay; mask(s') travels with the transition, so that the
maximum runs over what the shield will allow and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from schemas.actions import ACTION_COUNT
from services.errors import PolicyError
from services.learner.adam import MOMENTS, Adam
from services.qnet import QNet

_BITS = torch.tensor([1 << action for action in range(ACTION_COUNT)], dtype=torch.uint8)


class Agent(msgspec.Struct):
    """What training changes."""

    online: QNet
    target: QNet
    optimizer: Adam
    updates: int = 0


class Step(msgspec.Struct, frozen=True):
    """What one gradient step found."""

    loss: float
    errors: NDArray[np.float32]
    """TD errors delta, [b]: the new priorities."""
    q_mean: float
    applied: bool
    """False when loss or gradient were not finite: then the weights are as before."""


def make_agent(hidden: tuple[int, ...], learning_rate: float, seed: int, start: QNet | None = None) -> Agent:
    """A fresh agent; ``start`` gives the weights to begin with instead of random ones."""
    online = start or QNet(hidden, generator=torch.Generator().manual_seed(seed))
    target = QNet(online.sizes)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    return Agent(online, target, Adam(online.parameters(), learning_rate=learning_rate, eps=1e-5))


def masked_argmax(q: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the best allowed action of q float32 [n, 5]; masks uint8 [n], bit k is action k. A mask of 0
    allows hold alone, as a terminal row's, which is never read, may have."""
    allowed = (masks.unsqueeze(1) & _BITS) != 0
    allowed[:, 0] |= masks == 0
    return q.masked_fill(~allowed, -torch.inf).argmax(dim=1)


def target_q(
    returns: torch.Tensor, discounts: torch.Tensor, best: torch.Tensor, next_target: torch.Tensor
) -> torch.Tensor:
    """y = R + G Q'(s', a*), float32 [b].

    ``returns`` R and ``discounts`` G float32 [b], ``best`` a* int64 [b] chosen by the online network,
    ``next_target`` Q'(s', .) float32 [b, 5].
    """
    return returns + discounts * next_target.gather(1, best.unsqueeze(1)).squeeze(1)


def weighted_huber(errors: torch.Tensor, weights: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """L: mean over [b] of weights x huber(errors); quadratic up to ``delta``, linear beyond."""
    return (weights * functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)).mean()


def polyak(target: QNet, online: QNet, tau: float) -> None:
    """theta' <- theta' + tau (theta - theta'), in place."""
    with torch.no_grad():
        torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


def gradient_step(
    agent: Agent,
    inputs: torch.Tensor,
    actions: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    *,
    tau: float,
    clip_norm: float,
) -> Step:
    """One step of Adam towards ``targets`` y [b] for ``actions`` int64 [b] in normalised states ``inputs``
    [b, inputs], then one of Polyak. A step that is not finite is not made."""
    q = agent.online(inputs)
    errors = q.gather(1, actions.unsqueeze(1)).squeeze(1) - targets
    loss = weighted_huber(errors, weights)
    agent.optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = torch.nn.utils.clip_grad_norm_(agent.online.parameters(), clip_norm)
    applied = bool(torch.isfinite(loss)) and bool(torch.isfinite(norm))
    if applied:
        agent.optimizer.step()
        polyak(agent.target, agent.online, tau)
        agent.updates += 1
    found = errors.detach()
    return Step(float(loss.detach()), found.numpy(), float(q.detach().mean()), applied)


def tensors_of(agent: Agent) -> dict[str, NDArray[np.float32]]:
    """Every tensor of the agent by name: ``online.*``, ``target.*`` and Adam's moments ``adam.*``."""
    out = {
        f"{part}.{name}": tensor.detach().numpy().copy()
        for part, net in (("online", agent.online), ("target", agent.target))
        for name, tensor in net.state_dict().items()
    }
    for name, parameter in agent.online.named_parameters():
        for moment, tensor in agent.optimizer.state.get(parameter, {}).items():
            out[f"adam.{name}.{moment}"] = np.atleast_1d(tensor.numpy()).astype(np.float32)
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
            for name, parameter in agent.online.named_parameters():
                state = {moment: tensors[f"adam.{name}.{moment}"] for moment in MOMENTS}
                agent.optimizer.state[parameter] = {
                    moment: torch.from_numpy(t.copy()).reshape(() if moment == "step" else parameter.shape)
                    for moment, t in state.items()
                }
    except (RuntimeError, KeyError) as error:
        raise PolicyError(f"checkpoint: {error}") from error
    agent.updates = updates
