"""Double DQN (van Hasselt et al. 2016) on a dueling network (Wang et al. 2016), as free functions on tensors.

    y      = R + G Q'(s', a*)        a* = argmax over a in mask(s') of Q(s', a)
    delta  = Q(s, a) - y
    L_td   = mean of w huber(delta)
    L_e    = mean over demonstrated rows of w (max over a in mask(s) of [Q(s, a) + m (a != a_e)] - Q(s, a_e))
    L      = L_td + lambda L_e + L_risk
    theta' <- theta' + tau (theta - theta')

Q is the online network (theta), Q' the target network (theta'); R and G are the n-step return and discount of
``nstep``; w are the importance weights of the replay; mask(s') travels with the transition, so that the
maximum runs over what the shield will allow and nothing else. L_e is the large-margin loss of DQfD (Hester et
al. 2018): the demonstrated action a_e must beat every other allowed one by the margin m, or the gap is a loss.
L_risk is that of ``risk``, whose head shares no weight with Q: neither training disturbs the other.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.learner.agent import Agent
from services.learner.risk import risk_loss

_MAX_ACTIONS: Final = 8
_BITS: Final = torch.tensor([1 << action for action in range(_MAX_ACTIONS)], dtype=torch.uint8)
_ALLOWED: Final = torch.tensor([[bool(mask >> action & 1) for action in range(_MAX_ACTIONS)] for mask in range(256)])


class Batch(msgspec.Struct, frozen=True):
    """What one gradient step learns from; b rows."""

    inputs: torch.Tensor
    """float32 [b, inputs], normalised states."""
    actions: torch.Tensor
    """int64 [b], executed."""
    targets: torch.Tensor
    """float32 [b], y."""
    weights: torch.Tensor
    """float32 [b], w."""
    masks: torch.Tensor | None = None
    """uint8 [b], allowed actions in the states; with ``demonstrated``."""
    demonstrated: torch.Tensor | None = None
    """float32 [b], 1 for a demonstration, else 0; None: no margin loss."""
    exhausted: torch.Tensor | None = None
    """float32 [b], 1 when memory was exhausted within the horizon, 0 when not, NaN not known; None: no risk loss."""


class Step(msgspec.Struct, frozen=True):
    """What one gradient step found."""

    loss: float
    errors: NDArray[np.float32]
    """TD errors delta, [b]: the new priorities."""
    q_mean: float
    applied: bool
    """False when loss or gradient were not finite: then the weights are as before."""
    margin: float = 0.0
    """L_e."""
    risk: float = 0.0
    """L_risk."""


def allowed(masks: torch.Tensor, actions: int) -> torch.Tensor:
    """bool [n, actions] of uint8 [n], bit k is action k. A mask of 0 allows action 0 alone, as a terminal row's,
    which is never read, may have."""
    return _ALLOWED_OR_HOLD[masks.long(), :actions]


_ALLOWED_OR_HOLD: Final = _ALLOWED.clone()
_ALLOWED_OR_HOLD[0, 0] = True


def masked_argmax(q: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the best allowed action of q float32 [n, actions]; masks uint8 [n]."""
    return q.masked_fill(~allowed(masks, q.shape[1]), -torch.inf).argmax(dim=1)


def target_q(
    returns: torch.Tensor, discounts: torch.Tensor, best: torch.Tensor, next_target: torch.Tensor
) -> torch.Tensor:
    """y = R + G Q'(s', a*), float32 [b].

    ``returns`` R and ``discounts`` G float32 [b], ``best`` a* int64 [b] chosen by the online network,
    ``next_target`` Q'(s', .) float32 [b, actions].
    """
    return returns + discounts * next_target.gather(1, best.unsqueeze(1)).squeeze(1)


def weighted_huber(errors: torch.Tensor, weights: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    """L_td: mean over [b] of weights x huber(errors); quadratic up to ``delta``, linear beyond."""
    return (weights * functional.huber_loss(errors, torch.zeros_like(errors), reduction="none", delta=delta)).mean()


def margin_loss(
    q: torch.Tensor, actions: torch.Tensor, masks: torch.Tensor, weights: torch.Tensor, margin: float
) -> torch.Tensor:
    """L_e: weighted mean over [b] of max over allowed a of [Q(s, a) + margin (a != a_e)] - Q(s, a_e).

    q float32 [b, actions], ``actions`` a_e int64 [b] (each allowed), masks uint8 [b], ``weights`` float32 [b]: 0
    for rows that are no demonstration. Never negative, since a = a_e is one of the allowed.
    """
    chosen = actions.unsqueeze(1)
    rivals = (q + margin).scatter(1, chosen, q.gather(1, chosen))
    best = rivals.masked_fill(~allowed(masks, q.shape[1]), -torch.inf).amax(dim=1)
    return (weights * (best - q.gather(1, chosen).squeeze(1))).mean()


def polyak(agent: Agent, tau: float) -> None:
    """theta' <- theta' + tau (theta - theta'), in place; every weight of Q in one vector, hence one operation."""
    with torch.no_grad():
        agent.target_vector.lerp_(agent.vector[: agent.target_vector.numel()], tau)


def gradient_step(
    agent: Agent,
    batch: Batch,
    *,
    tau: float,
    clip_norm: float,
    margin: float = 0.0,
    margin_weight: float = 0.0,
) -> Step:
    """One step of Adam on L, then one of Polyak. A step that is not finite is not made."""
    q = agent.online(batch.inputs)
    errors = q.gather(1, batch.actions.unsqueeze(1)).squeeze(1) - batch.targets
    loss = weighted_huber(errors, batch.weights)
    expert = at_risk = None
    if margin_weight > 0 and batch.demonstrated is not None and batch.masks is not None:
        expert = margin_loss(q, batch.actions, batch.masks, batch.weights * batch.demonstrated, margin)
        loss = loss + margin_weight * expert
    if batch.exhausted is not None and agent.online.risk_size:
        at_risk = risk_loss(agent.online.risk_logits(batch.inputs), batch.actions, batch.exhausted, batch.weights)
        loss = loss + at_risk
    agent.gradient.zero_()
    loss.backward()  # type: ignore[no-untyped-call]
    size = agent.target_vector.numel()
    parts = (agent.gradient[:size], agent.gradient[size:]) if at_risk is not None else (agent.gradient[:size],)
    norms = [_clip(part, clip_norm) for part in parts]
    value = float(loss.detach())
    applied = math.isfinite(value) and all(map(math.isfinite, norms))
    if applied:
        agent.optimizer.step()
        polyak(agent, tau)
        agent.updates += 1
    return Step(
        value, errors.detach().numpy(), float(q.detach().mean()), applied,
        0.0 if expert is None else float(expert.detach()), 0.0 if at_risk is None else float(at_risk.detach()),
    )  # fmt: skip


def _clip(gradient: torch.Tensor, largest: float) -> float:
    """Scale ``gradient`` in place to a norm of at most ``largest``; its norm before."""
    norm = float(gradient.norm())
    if norm > largest:
        gradient.mul_(largest / (norm + 1e-6))
    return norm
