"""Double DQN (van Hasselt et al. 2016) on a dueling network (Wang et al. 2016), as free functions on tensors.

    y      = R + G Q'(s', a*)        a* = argmax over a in mask(s') of Q(s', a)
    delta  = Q(s, a) - y
    L_td   = mean of w huber(delta)
    L_e    = mean over shown rows of w (max over a in mask(s) of [Q(s, a) + m (a != a_e)] - Q(s, a_e))
    L      = L_td + lambda L_e + L_risk
    theta' <- theta' + tau (theta - theta')

Q is the online network (theta), Q' the target network (theta'); R and G are the n-step return and discount of
``nstep``; w are the importance weights of the replay; mask(s') travels with the transition, so that the
maximum runs over what the shield will allow and nothing else. L_e is the large-margin loss of DQfD (Hester et
al. 2018): the action a_e that was shown must beat every other allowed one by the margin m, or the gap is a loss. It is
shown in states that the learner itself came to as well (DAgger, Ross et al. 2011), whatever it did there.
L_risk is that of ``risk``, whose head shares no weight with Q: neither training disturbs the other.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.agent import Agent
from services.learner.backprop import backward, dueling, dueling_slope, forward
from services.learner.replay_buffer import NOTHING_SHOWN
from services.learner.risk import risk_loss

_ALLOWED: Final = np.array([[bool(mask >> action & 1) for action in range(8)] for mask in range(256)])
_ALLOWED[0, 0] = True
"""Row m: which actions mask m allows. A mask of 0 allows action 0 alone, as a terminal row's, which is never read,
may have."""


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
    """uint8 [b], allowed actions in the states; with ``shown``."""
    shown: torch.Tensor | None = None
    """int64 [b], a_e, ``NOTHING_SHOWN`` where there is none; None: no margin loss."""
    exhausted: torch.Tensor | None = None
    """float32 [b], 1 when memory was exhausted within the horizon, 0 when not, NaN not known; None: no risk loss."""

    def split(self, parts: int) -> list[Batch]:
        """``parts`` batches of as many rows each, one after the other, without a copy."""
        if parts == 1:
            return [self]
        columns = [getattr(self, name) for name in self.__struct_fields__]
        chunks = [[None] * parts if c is None else c.chunk(parts) for c in columns]
        return [Batch(*row) for row in zip(*chunks, strict=True)]


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


def masked_argmax(q: torch.Tensor, masks: NDArray[np.uint8]) -> NDArray[np.int64]:
    """int64 [n]: the best allowed action of q float32 [n, actions]; masks uint8 [n], bit k is action k."""
    allowed = _ALLOWED[masks, : q.shape[1]]
    best: NDArray[np.int64] = np.where(allowed, q.numpy(), -np.inf).argmax(axis=1)
    return best


def target_q(
    returns: NDArray[np.float32], discounts: NDArray[np.float32], best: NDArray[np.int64], next_target: torch.Tensor
) -> NDArray[np.float32]:
    """y = R + G Q'(s', a*), float32 [b].

    ``returns`` R and ``discounts`` G float32 [b], ``best`` a* int64 [b] chosen by the online network,
    ``next_target`` Q'(s', .) float32 [b, actions].
    """
    worth: NDArray[np.float32] = next_target.numpy()[np.arange(len(best)), best]
    # Where nothing follows, what the network says of nothing must not matter, be it NaN.
    return returns + np.multiply(discounts, worth, out=np.zeros_like(returns), where=discounts > 0)


def weighted_huber(
    errors: NDArray[np.float32], weights: NDArray[np.float32], delta: float = 1.0
) -> tuple[float, NDArray[np.float32]]:
    """(L_td, its derivative by each error [b]); quadratic up to ``delta``, linear beyond.

    With c = clip(e, -delta, delta), huber(e) = c (e - c / 2) and its derivative is c.
    """
    clipped = np.minimum(np.maximum(errors, -delta), delta)
    slope = weights * clipped / np.float32(len(errors))
    return float(slope @ (errors - 0.5 * clipped)), slope


def margin_loss(
    q: torch.Tensor, actions: torch.Tensor, masks: torch.Tensor, weights: torch.Tensor, margin: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(L_e, its derivative by Q [b, actions]): the weighted mean over [b] of max over allowed a of
    [Q(s, a) + margin (a != a_e)] - Q(s, a_e).

    q float32 [b, actions], ``actions`` a_e int64 [b] (each allowed), masks uint8 [b], ``weights`` float32 [b]: 0
    for rows that are no demonstration. Never negative, since a = a_e is one of the allowed. The derivative is the
    weight at the best rival and its negative at a_e, 0 where a_e leads by the margin.
    """
    chosen = actions.unsqueeze(1)
    own = q.gather(1, chosen)
    forbidden = torch.from_numpy(~_ALLOWED[masks.numpy(), : q.shape[1]])
    rivals = (q + margin).scatter_(1, chosen, own).masked_fill_(forbidden, -torch.inf)
    best, place = rivals.max(dim=1, keepdim=True)
    share = (weights / len(weights)).unsqueeze(1)
    slopes = torch.zeros_like(q).scatter_add_(1, place, share).scatter_add_(1, chosen, -share)
    return ((best - own) * share).sum(), slopes


def polyak(agent: Agent, tau: float) -> None:
    """theta' <- theta' + tau (theta - theta'), in place; every weight of Q in one vector, hence one operation."""
    with torch.no_grad():
        agent.target_vector.lerp_(agent.vector[: agent.target_vector.numel()], tau)


@torch.no_grad()
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
    net, size = agent.net, agent.target_vector.numel()
    passed = forward(net.hidden, batch.inputs)
    heads = net.heads
    q = dueling(torch.addmm(heads.bias, passed[-1], heads.weight.t()))
    chosen = batch.actions.unsqueeze(1)
    # Rows of numbers go through NumPy, on the same memory: an operation on 64 of them costs a third there.
    errors = (q.gather(1, chosen).squeeze(1) - batch.targets).numpy()
    loss, slope = weighted_huber(errors, batch.weights.numpy())
    by_q = torch.zeros_like(q).scatter_(1, chosen, torch.from_numpy(slope).unsqueeze(1))
    expert = at_risk = 0.0
    if margin_weight > 0 and batch.shown is not None and batch.masks is not None:
        known = batch.shown != NOTHING_SHOWN
        shown = torch.where(known, batch.shown, batch.actions)
        imitated, slopes = margin_loss(q, shown, batch.masks, batch.weights * known, margin)
        expert = float(imitated)
        by_q.add_(slopes, alpha=margin_weight)
    by_heads = dueling_slope(by_q)
    torch.mm(by_heads.t(), passed[-1], out=heads.weight_gradient)
    torch.sum(by_heads, 0, out=heads.bias_gradient)
    backward(net.hidden, passed, by_heads @ heads.weight)
    norms = [_clip(agent.gradient[:size], clip_norm)]
    if batch.exhausted is not None and net.risk is not None:
        at_risk = _risk_gradient(agent, batch)
        norms.append(_clip(agent.gradient[size:], clip_norm))
    value = loss + margin_weight * expert + at_risk
    applied = math.isfinite(value) and all(map(math.isfinite, norms))
    if applied:
        agent.optimizer.step()
        polyak(agent, tau)
        agent.updates += 1
    return Step(value, errors, float(q.mean()), applied, expert, at_risk)


def _risk_gradient(agent: Agent, batch: Batch) -> float:
    """Write the risk head's gradient; L_risk."""
    net = agent.net
    assert net.risk is not None
    assert batch.exhausted is not None
    passed = forward(net.risk_hidden, batch.inputs)
    logits = torch.addmm(net.risk.bias, passed[-1], net.risk.weight.t())
    loss, slopes = risk_loss(logits, batch.actions, batch.exhausted, batch.weights)
    torch.mm(slopes.t(), passed[-1], out=net.risk.weight_gradient)
    torch.sum(slopes, 0, out=net.risk.bias_gradient)
    backward(net.risk_hidden, passed, slopes @ net.risk.weight)
    return float(loss)


def _clip(gradient: torch.Tensor, largest: float) -> float:
    """Scale ``gradient`` in place to a norm of at most ``largest``; its norm before."""
    norm = math.sqrt(float(gradient.dot(gradient)))
    if norm > largest:
        gradient.mul_(largest / (norm + 1e-6))
    return norm
