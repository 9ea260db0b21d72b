"""Gradient steps out of the replay: sample, join, aim, step, re-prioritise. The same code learns from the stream,
from emulated fleets and in the benchmarks; what differs is who filled the buffer.
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


def as_stored(states: NDArray[np.float32]) -> NDArray[np.float32]:
    """The encoding of a buffer that holds the network's inputs already."""
    return states


@torch.no_grad()
def update(
    agent: Agent,
    replay: ReplayBuffer,
    settings: Settings,
    rng: np.random.Generator,
    encode: Encode = normalise,
    steps: int = 1,
) -> list[dqn.Step]:
    """``steps`` gradient steps on batches that are sampled and aimed together; ValueError while the replay is empty.

    The targets of all are those of the network before the first, and priorities change after the last: a handful
    of steps at once costs the targets a hair of freshness and saves half of the time.
    """
    progress = min(1.0, agent.updates / settings.beta_updates)
    beta = settings.beta_start + (1.0 - settings.beta_start) * progress
    sample = replay.sample(settings.batch * steps, beta, rng)
    # Slices of the total priority lie in the order of the ring: each batch takes every steps-th of them.
    order = np.arange(len(sample.places)).reshape(-1, steps).T.ravel()
    places = sample.places[order]
    with_risk = agent.online.risk_size > 0
    chain = replay.chain(places, max(settings.n_step, settings.risk_steps if with_risk else 1))
    imitating = settings.margin_weight > 0
    columns = dqn.Batch(
        inputs=torch.from_numpy(encode(replay.states[places])),
        actions=torch.from_numpy(replay.actions[places].astype(np.int64)),
        targets=torch.from_numpy(targets(agent, replay, chain[: settings.n_step], settings, encode)),
        weights=torch.from_numpy(sample.weights[order]),
        masks=torch.from_numpy(replay.masks[places]) if imitating else None,
        shown=torch.from_numpy(replay.shown[places].astype(np.int64)) if imitating else None,
        exhausted=torch.from_numpy(risk_labels(replay, chain[: settings.risk_steps])) if with_risk else None,
    )
    made = []
    for batch in columns.split(steps):
        made.append(
            dqn.gradient_step(
                agent, batch, tau=settings.tau, clip_norm=settings.clip_norm,
                margin=settings.margin, margin_weight=settings.margin_weight,
            )
        )  # fmt: skip
    if all(step.applied for step in made):
        replay.update(places, np.concatenate([step.errors for step in made]))
    return made


@torch.no_grad()
def targets(
    agent: Agent, replay: ReplayBuffer, chain: NDArray[np.int64], settings: Settings, encode: Encode = normalise
) -> NDArray[np.float32]:
    """y float32 [b] of chains of places [n, b]: joined returns and the bootstrap value after each's last row.

    The state after row k-1 is row k's state: its Q tells what was greedy in row k and where a return bootstraps that
    ends with row k-1. A chain that was cut needs neither of the rows beyond, so they are not computed.
    """
    length, width = chain.shape
    known = chain >= 0
    rows = np.where(known, chain, 0)
    greedy = settings.off_policy_cut == "greedy"
    on_policy = np.ones(rows.shape, np.bool_) if greedy else replay.probabilities[rows] >= ON_POLICY_PROBABILITY
    best = np.empty(width, np.int64)
    last = rows[0].copy()
    going = np.arange(width)
    for k in range(length):
        here = last[going]
        q = agent.net.q(torch.from_numpy(encode(replay.next_states[here])))
        best[going] = chosen = dqn.masked_argmax(q, replay.next_masks[here])
        if k + 1 == length:
            break
        then = rows[k + 1, going]
        if greedy:
            on_policy[k + 1, going] = replay.actions[then] == chosen
        goes = known[k + 1, going] & on_policy[k + 1, going] & (replay.discounts[here] > 0)
        going = going[goes]
        if not going.size:
            break
        last[going] = then[goes]
    joined = join(replay.rewards[rows], replay.discounts[rows], known, on_policy)
    then_q = agent.target_net.q(torch.from_numpy(encode(replay.next_states[last])))
    return dqn.target_q(joined.returns, joined.discounts, best, then_q)


def risk_labels(replay: ReplayBuffer, chain: NDArray[np.int64]) -> NDArray[np.float32]:
    """z float32 [b] of chains of places [k, b], NaN where it is not known (see ``risk``)."""
    known = chain >= 0
    rows = np.where(known, chain, 0)
    return risk.within(replay.exhausted[rows], known, replay.discounts[rows] == 0)
