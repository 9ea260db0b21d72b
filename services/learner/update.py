"""One gradient step out of the replay: sample, join, aim, step, re-prioritise. The same code learns from the
stream, from emulated fleets and in the benchmarks; what differs is who filled the buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from schemas.features import normalise
from services.learner import dqn, risk
from services.learner.agent import Agent
from services.learner.nstep import ON_POLICY_PROBABILITY, join
from services.learner.replay_buffer import ReplayBuffer
from services.learner.settings import Settings

Encode = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Stored states float32 [n, features] -> the network's inputs float32 [n, inputs]."""


def update(
    agent: Agent, replay: ReplayBuffer, settings: Settings, rng: np.random.Generator, encode: Encode = normalise
) -> dqn.Step:
    """One gradient step on a sampled batch; ValueError while the replay is empty."""
    progress = min(1.0, agent.updates / settings.beta_updates)
    beta = settings.beta_start + (1.0 - settings.beta_start) * progress
    sample = replay.sample(settings.batch, beta, rng)
    places = sample.places
    with_risk = agent.online.risk_size > 0
    chain = replay.chain(places, max(settings.n_step, settings.risk_steps if with_risk else 1))
    imitating = settings.margin_weight > 0
    batch = dqn.Batch(
        inputs=torch.from_numpy(encode(replay.states[places])),
        actions=torch.from_numpy(replay.actions[places].astype(np.int64)),
        targets=targets(agent, replay, chain[: settings.n_step], settings, encode),
        weights=torch.from_numpy(sample.weights),
        masks=torch.from_numpy(replay.masks[places]) if imitating else None,
        demonstrated=torch.from_numpy(replay.demonstrated[places].astype(np.float32)) if imitating else None,
        exhausted=torch.from_numpy(risk_labels(replay, chain[: settings.risk_steps])) if with_risk else None,
    )
    step = dqn.gradient_step(
        agent,
        batch,
        tau=settings.tau,
        clip_norm=settings.clip_norm,
        margin=settings.margin,
        margin_weight=settings.margin_weight,
    )
    if step.applied:
        replay.update(places, step.errors)
    return step


@torch.no_grad()
def targets(
    agent: Agent, replay: ReplayBuffer, chain: NDArray[np.int64], settings: Settings, encode: Encode = normalise
) -> torch.Tensor:
    """y float32 [b] of chains of places [n, b]: joined returns and the bootstrap value after each's last row.

    The state after row k-1 is row k's state, so one pass of the online network over the next states gives
    both what is greedy in row k and the action of the bootstrap.
    """
    known = chain >= 0
    rows = np.where(known, chain, 0)
    length, width = rows.shape
    inputs = torch.from_numpy(encode(replay.next_states[rows.ravel()]))
    masks = torch.from_numpy(replay.next_masks[rows.ravel()])
    best = dqn.masked_argmax(agent.online(inputs), masks).reshape(length, width)
    if settings.off_policy_cut == "greedy":
        on_policy = np.ones(rows.shape, np.bool_)
        on_policy[1:] = replay.actions[rows[1:]] == best[:-1].numpy()
    else:
        on_policy = replay.probabilities[rows] >= ON_POLICY_PROBABILITY
    joined = join(replay.rewards[rows], replay.discounts[rows], known, on_policy)
    last = torch.from_numpy((joined.lengths - 1) * width + np.arange(width))
    return dqn.target_q(
        torch.from_numpy(joined.returns),
        torch.from_numpy(joined.discounts),
        best.ravel()[last],
        agent.target(inputs[last]),
    )


def risk_labels(replay: ReplayBuffer, chain: NDArray[np.int64]) -> NDArray[np.float32]:
    """z float32 [b] of chains of places [k, b], NaN where it is not known (see ``risk``)."""
    known = chain >= 0
    rows = np.where(known, chain, 0)[..., None]
    events = risk.exhausted(replay.states[rows, risk.RISK_COLUMNS], replay.next_states[rows, risk.RISK_COLUMNS])
    return risk.within(events, known, replay.discounts[rows[..., 0]] == 0)
