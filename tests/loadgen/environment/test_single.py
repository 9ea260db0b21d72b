"""One worker's control as others' agents see it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from loadgen.engine.specs import FleetConfig
from loadgen.environment import ENV_ID, Episode, TidegateEnv, configured
from loadgen.workload import builtin
from schemas.actions import ACTION_COUNT, Action
from schemas.features import FEATURE, INPUT_COUNT
from schemas.transitions import REWARD_PARTS

CHAT: dict[str, Any] = {"workload": "chat", "rate": 1.0, "episode_s": 40.0}


def _episode(env: gymnasium.Env[Any, Any], seed: int, action: Action) -> list[tuple[Any, ...]]:
    env.reset(seed=seed)
    out = []
    while True:
        out.append(env.step(np.int64(action)))
        if out[-1][2] or out[-1][3]:
            return out


def test_gymnasium_finds_nothing_wrong_with_it() -> None:
    check_env(gymnasium.make(ENV_ID, **CHAT).unwrapped)


@pytest.mark.parametrize("objective", ["goodput", "article"])
def test_random_actions_through_gymnasiums_own_wrappers(objective: str) -> None:
    env = gymnasium.make(ENV_ID, objective=objective, **CHAT)
    observation, info = env.reset(seed=1)
    assert observation.shape == (INPUT_COUNT,)
    assert observation.dtype == np.float32
    env.action_space.seed(2)
    for step in range(20):
        action = env.action_space.sample(mask=info["action_mask"].astype(np.int8))
        observation, reward, terminated, truncated, info = env.step(action)
        assert env.observation_space.contains(observation), "normalised, and no NaN however little is known"
        assert reward == pytest.approx(info["raw_reward_parts"][objective])
        assert not info["invalid_action"], "an allowed action is executed"
        assert info["executed_action"] == action
        assert tuple(info["raw_reward_parts"]) == REWARD_PARTS
        assert not terminated
        assert truncated == (step == 19), "40 s are 20 steps"


def test_one_seed_gives_one_episode_and_another_seed_another() -> None:
    env = TidegateEnv(**CHAT)
    first, again, other = (_episode(env, seed, Action.WIDEN) for seed in (5, 5, 6))
    assert all((a[0] == b[0]).all() and a[1] == b[1] for a, b in zip(first, again, strict=True))
    assert any((a[0] != b[0]).any() for a, b in zip(first, other, strict=True))


def test_episodes_without_a_new_seed_differ() -> None:
    env = TidegateEnv(**CHAT)
    first, _ = env.reset(seed=5)
    second, _ = env.reset()
    assert (first != second).any()


def test_an_episode_begins_when_the_worker_may_act() -> None:
    _, info = TidegateEnv(**{**CHAT, "rate": 0.2}).reset(seed=1)
    assert not info["held"], "the minute in which the windows fill has passed"
    assert info["action_mask"].dtype == np.uint8
    assert info["action_mask"].shape == (ACTION_COUNT,)
    assert info["action_mask"][Action.HOLD] == 1, "hold is always allowed"
    assert info["action_mask"][Action.WIDEN] == 1, "a light load leaves room at rho 1.0"


def test_a_forbidden_action_is_executed_as_hold_and_told() -> None:
    env = TidegateEnv(**CHAT)
    _, info = env.reset(seed=1)
    assert info["action_mask"][Action.EVICT] == 0, "chat requests without sessions leave nothing idle"
    forbidden = env.step(np.int64(Action.EVICT))
    assert forbidden[4]["invalid_action"]
    assert forbidden[4]["executed_action"] == Action.HOLD
    env.reset(seed=1)
    held = env.step(np.int64(Action.HOLD))
    assert (forbidden[0] == held[0]).all()
    assert forbidden[1] == held[1], "the two actions did the same"


def test_what_is_no_action_is_a_mistake() -> None:
    env = TidegateEnv(**CHAT)
    with pytest.raises(RuntimeError, match="reset"):
        env.step(np.int64(0))
    env.reset(seed=1)
    with pytest.raises(ValueError, match="action 7"):
        env.step(np.int64(7))


def test_it_terminates_when_every_request_has_ended() -> None:
    def few(rng: np.random.Generator, duration_s: float) -> Episode:
        workload = builtin("chat", duration_s=30.0, seed=int(rng.integers(100)), rate_scale=0.2)
        return Episode(FleetConfig(), workload.assign(2, 0))

    last = _episode(TidegateEnv(few, episode_s=600.0), 0, Action.HOLD)
    assert last[-1][2], "nothing is left to serve"
    assert not last[-1][3]
    assert len(last) < 300


class _Configuration:
    """As ``loadgen.fleets`` has them: a name and a fleet."""

    fleet = FleetConfig(card="H100-80G", workers_per_card=3)


def test_it_runs_on_a_configuration_and_its_tables() -> None:
    asked: list[tuple[int, float]] = []

    def tables(seed: int, duration_s: float) -> Any:
        asked.append((seed, duration_s))
        return builtin("chat", duration_s=duration_s, seed=seed).assign(3, seed)

    env = TidegateEnv(configured(_Configuration(), tables), worker=2, episode_s=40.0)
    env.reset(seed=3)
    env.reset()
    assert [duration_s for _, duration_s in asked] == [100.0, 100.0], "40 s and the minute before them"
    assert asked[0][0] != asked[1][0]
    with pytest.raises(ValueError, match="the fleet has 3"):
        TidegateEnv(configured(_Configuration(), tables), worker=3).reset(seed=3)


def test_the_worker_may_be_drawn() -> None:
    env = TidegateEnv(fleet=FleetConfig(shares=(0.6, 0.4)), worker=None, **CHAT)
    shares = {round(float(env.reset(seed=seed)[0][FEATURE["q0_share"]]), 2) for seed in range(5)}
    assert shares == {0.6, 0.4}
