"""All workers of fleets at once."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from loadgen.engine.specs import FleetConfig
from loadgen.environment import ENV_ID, Episode, TidegateEnv, TidegateVectorEnv, generated
from loadgen.workload import builtin
from schemas.actions import Action
from schemas.features import INPUT_COUNT
from schemas.transitions import REWARD_PARTS

CHAT: dict[str, Any] = {"workload": "chat", "rate": 1.0, "episode_s": 20.0}


def test_gymnasium_makes_it() -> None:
    envs = gymnasium.make_vec(ENV_ID, num_envs=6, **CHAT)
    assert isinstance(envs.unwrapped, TidegateVectorEnv)
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    observations, infos = envs.reset(seed=1)
    assert observations.shape == (6, INPUT_COUNT)
    assert envs.observation_space.contains(observations)
    assert infos["action_mask"].shape == (6, 5)
    envs.action_space.seed(1)
    for _ in range(12):
        observations, rewards, terminated, truncated, infos = envs.step(envs.action_space.sample())
        assert envs.observation_space.contains(observations)
        assert {rewards.dtype, terminated.dtype, truncated.dtype} == {np.dtype(np.float64), np.dtype(np.bool_)}
        assert np.isfinite(rewards).all()
        assert set(infos["raw_reward_parts"]) == {*REWARD_PARTS, *(f"_{name}" for name in REWARD_PARTS)}


def test_gymnasiums_sync_vector_of_single_environments_works_too() -> None:
    envs = gymnasium.make_vec(ENV_ID, num_envs=2, vectorization_mode="sync", **CHAT)
    envs.reset(seed=1)
    *_, infos = envs.step(np.array([0, 0]))
    assert infos["action_mask"].shape == (2, 5)


def test_a_fleet_ends_together_and_begins_anew_in_the_next_step() -> None:
    envs = TidegateVectorEnv(num_envs=2, **CHAT)
    first, _ = envs.reset(seed=1)
    for step in range(10):
        last, _, terminated, truncated, infos = envs.step(np.zeros(2, np.int64))
        assert truncated.tolist() == [step == 9] * 2, "20 s are 10 steps"
        assert not terminated.any()
        assert infos["_raw_reward_parts"].all()
    again, rewards, _, truncated, infos = envs.step(np.full(2, Action.WIDEN))
    assert not truncated.any()
    assert rewards.tolist() == [0, 0], "a step that resets earns nothing"
    assert not infos["_executed_action"].any()
    assert infos["_action_mask"].all(), "whose masks are those of the new episode"
    assert (again != last).any()
    assert (again != first).any(), "another episode than the first"
    assert envs.step(np.zeros(2, np.int64))[4]["_executed_action"].all()


def test_one_seed_gives_one_run_over_resets() -> None:
    def run() -> list[Any]:
        envs = TidegateVectorEnv(num_envs=4, **CHAT)
        envs.reset(seed=7)
        rng = np.random.default_rng(0)
        return [envs.step(rng.integers(0, 5, 4))[:2] for _ in range(25)]

    for (states, rewards), (states_again, rewards_again) in zip(run(), run(), strict=True):
        assert (states == states_again).all()
        assert (rewards == rewards_again).all()


def test_fleets_of_different_shape_and_length_in_one_vector() -> None:
    def short(rng: np.random.Generator, duration_s: float) -> Episode:
        return Episode(FleetConfig(), builtin("chat", duration_s=60.0, seed=1, rate_scale=0.05).assign(2, 0))

    large = generated(FleetConfig(card="H200-141G", workers_per_card=3), "chat")
    envs = TidegateVectorEnv([short, large], episode_s=20.0)
    assert envs.num_envs == 5
    envs.reset(seed=[1, None, 3, None, None])
    *_, terminated, truncated, infos = envs.step(np.zeros(5, np.int64))
    assert terminated.tolist() == [True, True, False, False, False], "the first fleet has nothing left to do"
    assert not truncated.any()
    *_, terminated, _, infos = envs.step(np.zeros(5, np.int64))
    assert infos["_executed_action"].tolist() == [False, False, True, True, True]


def test_its_worker_sees_and_earns_what_the_single_environment_tells() -> None:
    light = {**CHAT, "rate": 0.2}
    env, envs = TidegateEnv(worker=0, **light), TidegateVectorEnv(**light)
    observation, _ = env.reset(seed=4)
    observations, _ = envs.reset(seed=4)
    assert (observations[0] == observation).all(), "the same seed, the same requests"
    observation, reward, *_, info = env.step(np.int64(Action.WIDEN))
    # The single one's neighbour follows the heuristic, which holds here.
    observations, rewards, *_, infos = envs.step(np.array([Action.WIDEN, Action.HOLD]))
    assert (observations[0] == observation).all()
    assert rewards[0] == reward
    assert rewards[1] == reward, "both are credited with their card's reward"
    assert infos["executed_action"].tolist() == [info["executed_action"], 0]


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="multiple of the 2"):
        TidegateVectorEnv(num_envs=3)
    with pytest.raises(ValueError, match="have 2 workers"):
        TidegateVectorEnv([generated(workload="chat")], num_envs=4)
    envs = TidegateVectorEnv(num_envs=2, **CHAT)
    with pytest.raises(RuntimeError, match="reset"):
        envs.step(np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="3 seeds"):
        envs.reset(seed=[1, 2, 3])
    envs.reset(seed=1)
    with pytest.raises(ValueError, match="shape"):
        envs.step(np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="0 to 4"):
        envs.step(np.array([0, 5]))
