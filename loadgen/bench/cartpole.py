"""CartPole-v1 by the agent that learns Tidegate's control: a sanity run of the learning code, on a known problem.

Replay, n-step returns, targets and gradient step are those of ``services.learner``; only the network's width, the
states and the settings below are this problem's. Every 5,000 steps the network is frozen and plays 100 fresh episodes
greedily, from starts that training never sees; solved means that their mean return (at most 500) is 475 or more, within
100,000 steps of training. Stricter and told beside it: the best mean of 100 consecutive episodes of the training
itself, with its exploration and on a network that changes all the while.
"""

from __future__ import annotations

import time
from typing import Any, Final

import gymnasium
import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from services.learner.agent import Agent, agent_of
from services.learner.replay_buffer import NO_ROW, ReplayBuffer, Rows
from services.learner.settings import Settings
from services.learner.update import as_stored, update
from services.qnet import QNet

SOLVED: Final = 475.0
EPISODES: Final = 100
STEPS: Final = 100_000
EVALUATE_EVERY: Final = 5_000
_EVALUATION_SEED: Final = 1_000_000
_STATES, _ACTIONS, _MASK = 4, 2, 0b11


class Play(msgspec.Struct, frozen=True, kw_only=True):
    """How the problem is played."""

    learner: Settings = Settings(
        hidden=(64, 64),
        gamma=0.99,
        n_step=3,
        batch=64,
        learning_rate=5e-4,
        tau=0.01,
        clip_norm=10.0,
        updates_per_transition=1.0,
        warmup_rows=1000,
        capacity_rows=100_000,
        alpha=0.6,
        beta_start=0.4,
        beta_updates=50_000,
        risk_size=0,
    )
    reward_scale: float = 0.1
    """Q then lies within 0 to 10, where the Huber loss, which is linear beyond 1, is a gradient and not a sign."""
    epsilon_start: float = 1.0
    epsilon_end: float = 0.01
    epsilon_steps: int = 5_000


class Outcome(msgspec.Struct, frozen=True):
    """What one seed came to."""

    seed: int
    solved_at_step: int | None
    """Steps of training when the frozen network's mean first reached 475."""
    evaluations: list[float]
    """Mean return of 100 greedy episodes, every 5,000 steps."""
    training_best: float | None
    """The highest mean of 100 consecutive training episodes; None when there were fewer."""
    returns: list[float]
    """Of the training's episodes."""
    updates: int
    seconds: float


def bench_cartpole(seeds: int = 5, steps: int = STEPS) -> dict[str, Any]:
    """Each of ``seeds`` seeds until it is solved, ``steps`` steps at most."""
    found = [play(seed, steps) for seed in range(seeds)]
    rows = [msgspec.structs.asdict(one) | {"returns": [round(x) for x in one.returns]} for one in found]
    return {
        "solved": sum(one.solved_at_step is not None for one in found),
        "seeds": seeds,
        "threshold": SOLVED,
        "steps": steps,
        "outcomes": rows,
        "settings": msgspec.to_builtins(Play()),
    }


def play(seed: int, steps: int = STEPS, rules: Play | None = None) -> Outcome:
    """Learn from seed ``seed`` until solved or ``steps`` steps are done; the same seed gives the same returns."""
    rules = rules or Play()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Player(seed, rules).run(steps)
    finally:
        torch.set_num_threads(threads)


class _Player:
    def __init__(self, seed: int, rules: Play) -> None:
        self.seed, self.rules = seed, rules
        self.rng = np.random.default_rng(seed)
        net = QNet(
            rules.learner.hidden, inputs=_STATES, actions=_ACTIONS, generator=torch.Generator().manual_seed(seed)
        )
        self.agent: Agent = agent_of(net, rules.learner.learning_rate)
        self.replay = ReplayBuffer(rules.learner.capacity_rows, _STATES, alpha=rules.learner.alpha)
        self.returns: list[float] = []
        self.owed = 0.0

    def run(self, steps: int) -> Outcome:
        began = time.perf_counter()
        env = gymnasium.make("CartPole-v1", disable_env_checker=True)
        state, _ = env.reset(seed=self.seed)
        previous, total = NO_ROW, 0.0
        evaluations: list[float] = []
        for step in range(1, steps + 1):
            action, probability = self.act(state, step)
            after, reward, terminated, truncated, _ = env.step(action)
            previous = self.keep(state, action, probability, float(reward), after, terminated, previous)
            self.learn()
            state, total = after, total + float(reward)
            if terminated or truncated:
                self.returns.append(total)
                state, _ = env.reset()
                previous, total = NO_ROW, 0.0
            if step % EVALUATE_EVERY == 0:
                evaluations.append(self.evaluate(_EVALUATION_SEED + step))
                if evaluations[-1] >= SOLVED:
                    break
        env.close()
        solved = step if evaluations and evaluations[-1] >= SOLVED else None
        means = np.convolve(self.returns, np.full(EPISODES, 1 / EPISODES), "valid")
        best = float(means.max()) if len(self.returns) >= EPISODES else None
        seconds = time.perf_counter() - began
        return Outcome(self.seed, solved, evaluations, best, self.returns, self.agent.updates, seconds)

    @torch.no_grad()
    def evaluate(self, seed: int) -> float:
        """Mean return of 100 greedy episodes, played side by side, each from a start of its own."""
        env = gymnasium.make_vec("CartPole-v1", num_envs=EPISODES, vectorization_mode="vector_entry_point")
        states, _ = env.reset(seed=seed)
        going, total = np.ones(EPISODES, np.bool_), np.zeros(EPISODES)
        while going.any():
            q = self.agent.net.q(torch.from_numpy(np.ascontiguousarray(states, np.float32)))
            states, rewards, terminated, truncated, _ = env.step(q.argmax(dim=1).numpy())
            total += np.where(going, rewards, 0.0)
            going &= ~(terminated | truncated)
        env.close()
        return float(total.mean())

    def act(self, state: NDArray[np.float32], step: int) -> tuple[int, float]:
        """(action, its probability under the epsilon-greedy policy)."""
        rules = self.rules
        progress = min(1.0, step / rules.epsilon_steps)
        epsilon = rules.epsilon_start + (rules.epsilon_end - rules.epsilon_start) * progress
        with torch.no_grad():
            greedy = int(self.agent.net.q(torch.from_numpy(state[None])).argmax())
        action = int(self.rng.integers(_ACTIONS)) if self.rng.random() < epsilon else greedy
        return action, epsilon / _ACTIONS + (1.0 - epsilon) * (action == greedy)

    def keep(
        self,
        state: NDArray[np.float32],
        action: int,
        probability: float,
        reward: float,
        after: NDArray[np.float32],
        terminated: bool,
        previous: int,
    ) -> int:
        """Store one transition that follows row ``previous``; its serial. A truncated episode is no terminal one."""
        row = Rows(
            states=state[None],
            next_states=after[None],
            actions=np.array([action], np.uint8),
            next_masks=np.array([_MASK], np.uint8),
            rewards=np.array([reward * self.rules.reward_scale], np.float32),
            discounts=np.array([0.0 if terminated else self.rules.learner.gamma], np.float32),
            probabilities=np.array([probability], np.float32),
            sequences=np.zeros(1, np.int64),
        )
        return int(self.replay.insert(row, np.array([previous]))[0])

    def learn(self) -> None:
        learner = self.rules.learner
        if self.replay.size < learner.warmup_rows:
            return
        self.owed += learner.updates_per_transition
        if self.owed >= learner.updates_at_once:
            self.owed -= learner.updates_at_once
            update(self.agent, self.replay, learner, self.rng, as_stored, learner.updates_at_once)
