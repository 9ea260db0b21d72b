"""Gradient steps per second of our agent beside those of Stable-Baselines3's DQN, in one process and run.

Both have a network of the same inputs, hidden sizes and actions, a full replay, the same batch, one thread, and
make their steps in turns, so that a machine which is busy for a while is busy for both. Ours makes its whole
step: prioritized sampling, three-step returns with Watkins' cut, Double and dueling targets under masks, importance
weights, Adam, Polyak, new priorities. Theirs is ``DQN.train()``: uniform sampling, one-step targets, Adam.

Stable-Baselines3 is no dependency of Tidegate: the comparison runs where it is installed.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Final

import gymnasium
import numpy as np
import torch

from schemas.actions import ACTION_COUNT, ALL_ACTIONS
from schemas.features import INPUT_COUNT
from services.errors import UserError
from services.learner.agent import make_agent
from services.learner.replay_buffer import NO_ROW, ReplayBuffer, Rows
from services.learner.settings import Settings
from services.learner.update import as_stored, update

TARGET_RATIO: Final = 2.0
SIZES: Final = (((128, 128), 64), ((64, 64), 32))
"""Hidden sizes and batch: Tidegate's defaults, which the target is for, and Stable-Baselines3's."""
_ROWS: Final = 20_000
_CHAINS: Final = 1000
_WARM_UP_STEPS: Final = 50


def bench_gradient(rounds: int = 20, steps: int = 100, seed: int = 0) -> dict[str, Any]:
    """``rounds`` turns of ``steps`` gradient steps on each side; steps per second by the median turn.

    Returns ``ratio`` (ours over theirs, Tidegate's sizes), ``target`` and one entry a size, with the same steps with
    a risk head beside it, which theirs has none of. UserError when Stable-Baselines3 is not installed.
    """
    their_module = _stable_baselines()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = [_compare(their_module, hidden, batch, rounds, steps, seed) for hidden, batch in SIZES]
    finally:
        torch.set_num_threads(threads)
    return {
        "ratio": sizes[0]["ratio"],
        "target": TARGET_RATIO,
        "stable_baselines3": str(their_module.__version__),
        "torch": torch.__version__,
        "sizes": sizes,
    }


def _compare(module: Any, hidden: tuple[int, ...], batch: int, rounds: int, steps: int, seed: int) -> dict[str, Any]:
    sides = {
        "ours": our_steps(Settings(hidden=hidden, batch=batch, risk_size=0), seed),
        "ours_with_risk": our_steps(Settings(hidden=hidden, batch=batch), seed),
        "theirs": _their_steps(module, hidden, batch, seed),
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for run in sides.values():
        run(_WARM_UP_STEPS)
    for _ in range(rounds):
        for name, run in sides.items():
            began = time.perf_counter()
            run(steps)
            seconds[name].append(time.perf_counter() - began)
    rates = {name: steps / float(np.median(spent)) for name, spent in seconds.items()}
    # Turn by turn, since both sides of a turn met the same machine.
    turns = np.array(seconds["theirs"]) / np.array(seconds["ours"])
    return {
        "hidden": list(hidden),
        "batch": batch,
        "ours_steps_per_s": rates["ours"],
        "ours_with_risk_steps_per_s": rates["ours_with_risk"],
        "theirs_steps_per_s": rates["theirs"],
        "ratio": float(np.median(turns)),
        "ratio_quartiles": np.quantile(turns, (0.25, 0.75)).tolist(),
        "ratio_with_risk": float(np.median(np.array(seconds["theirs"]) / np.array(seconds["ours_with_risk"]))),
    }


def our_steps(settings: Settings, seed: int) -> Callable[[int], None]:
    """A function that makes so many gradient steps on a full replay of linked rows."""
    rng = np.random.default_rng(seed)
    agent = make_agent(settings.hidden, settings.learning_rate, seed, risk_size=settings.risk_size)
    replay = ReplayBuffer(_ROWS, INPUT_COUNT, alpha=settings.alpha)
    previous = np.full(_CHAINS, NO_ROW, np.int64)
    for _ in range(_ROWS // _CHAINS):
        previous = replay.insert(_random_rows(_CHAINS, settings.gamma, rng), previous)

    def run(steps: int) -> None:
        for _ in range(0, steps, settings.updates_at_once):
            update(agent, replay, settings, rng, as_stored, settings.updates_at_once)

    return run


def _random_rows(count: int, gamma: float, rng: np.random.Generator) -> Rows:
    return Rows(
        states=rng.random((count, INPUT_COUNT), np.float32),
        next_states=rng.random((count, INPUT_COUNT), np.float32),
        actions=rng.integers(0, ACTION_COUNT, count).astype(np.uint8),
        next_masks=np.full(count, ALL_ACTIONS, np.uint8),
        rewards=rng.random(count, np.float32),
        discounts=np.full(count, gamma, np.float32),
        probabilities=np.ones(count, np.float32),
        sequences=np.zeros(count, np.int64),
    )


def _their_steps(module: Any, hidden: tuple[int, ...], batch: int, seed: int) -> Callable[[int], None]:
    settings = Settings()
    model = module.DQN(
        "MlpPolicy",
        _Shape(),
        policy_kwargs={"net_arch": list(hidden)},
        batch_size=batch,
        buffer_size=_ROWS,
        learning_rate=settings.learning_rate,
        gamma=settings.gamma,
        seed=seed,
        device="cpu",
    )
    model.set_logger(importlib.import_module("stable_baselines3.common.logger").Logger(None, []))
    rng = np.random.default_rng(seed)
    for _ in range(_ROWS):
        now, then = rng.random((2, 1, INPUT_COUNT), np.float32)
        model.replay_buffer.add(now, then, rng.integers(0, ACTION_COUNT, 1), rng.random(1), np.zeros(1), [{}])
    return lambda steps: model.train(gradient_steps=steps, batch_size=batch)


class _Shape(gymnasium.Env[Any, Any]):
    """Says how wide states are and how many actions there are; nothing is played."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.5, (INPUT_COUNT,), np.float32)
    action_space = gymnasium.spaces.Discrete(ACTION_COUNT)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(INPUT_COUNT, np.float32), {}


def _stable_baselines() -> Any:
    try:
        return importlib.import_module("stable_baselines3")
    except ImportError as error:
        raise UserError(
            f"bench gradient: Stable-Baselines3 is not importable ({error}). It is no dependency of Tidegate: make "
            "another environment with Tidegate in it, run `pip install stable-baselines3` there, and bench from it"
        ) from error
