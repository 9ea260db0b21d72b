"""One fleet during one episode, and what the environments tell of it."""

from __future__ import annotations

from typing import Final, cast

import gymnasium
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Control, Controls, Objective, Seen
from loadgen.engine.fleet import Fleet
from loadgen.environment.scenario import Episode
from schemas.actions import ACTION_COUNT
from schemas.features import FEATURE, INPUT_COUNT, normalise
from schemas.identity import STEP_S
from schemas.transitions import REWARD_PARTS
from services.decision.shield import ALLOWED

OBSERVATION_LOW: Final = -1.0
OBSERVATION_HIGH: Final = 1.5
"""To where ``schemas.features.normalise`` clips."""
_BUSY: Final = [FEATURE["running"], FEATURE["l_queue"]]


def observation_space() -> gymnasium.Space[NDArray[np.float32]]:
    """Box [INPUT_COUNT] of float32."""
    box = gymnasium.spaces.Box(OBSERVATION_LOW, OBSERVATION_HIGH, (INPUT_COUNT,), np.float32)
    return cast("gymnasium.Space[NDArray[np.float32]]", box)  # Box is typed for every number at once


def action_space() -> gymnasium.Space[np.int64]:
    """Discrete(5): the numbers of ``schemas.actions.Action``."""
    return gymnasium.spaces.Discrete(ACTION_COUNT)


def steps_of(episode_s: float) -> int:
    """Control steps of ``episode_s`` seconds; ValueError below one."""
    steps = round(episode_s / STEP_S)
    if steps < 1:
        raise ValueError(f"episode_s {episode_s}: expected {STEP_S} s, a control step, or more")
    return steps


def duration_s(episode_s: float, controls: Controls) -> float:
    """For how long an episode needs requests: its warm-up and itself."""
    return controls.tracker.window_steps * STEP_S + episode_s


class World:
    """A fleet under control, ready to act: the time in which its workers' windows fill has passed.

    In that time every worker holds, as it does live.
    """

    def __init__(self, episode: Episode, controls: Controls) -> None:
        self._fleet = Fleet(episode.fleet, episode.tables)
        self._control = Control(self._fleet, episode.fleet, episode.tables, controls)
        self.workers = self._fleet.workers
        self._step = 0
        self.done = False
        """Every request has ended."""
        self.seen: Seen = self._control.observe(0)
        for _ in range(controls.tracker.window_steps):
            self.advance(np.zeros(self.workers, np.int64))

    def advance(self, actions: NDArray[np.integer]) -> NDArray[np.int64]:
        """Act on all workers and let a step pass; the actions that were executed."""
        executed = self._control.act(actions)
        self._fleet.advance(STEP_S)
        self._step += 1
        self.seen = self._control.observe(self._step)
        # Asking all requests takes as long as emulating them: only where nobody has any.
        self.done = not (self.seen.features[:, _BUSY] > 0).any() and self._fleet.done
        return executed

    def rewards(self, objective: Objective) -> NDArray[np.float32]:
        """float32 [n], never NaN: what nobody could judge (a restarting engine's silence) is worth nothing."""
        rewards = self._control.rewards(objective)
        return np.where(np.isnan(rewards), np.float32(0), rewards)

    def observations(self) -> NDArray[np.float32]:
        """float32 [n, INPUT_COUNT]: what Tidegate's own network sees."""
        return normalise(self.seen.features)

    def action_masks(self) -> NDArray[np.uint8]:
        """uint8 [n, 5]: 1 where the action is allowed."""
        return ALLOWED[self.seen.mask].astype(np.uint8)

    def parts(self) -> dict[str, NDArray[np.float32]]:
        """Each of REWARD_PARTS as float32 [n], NaN where unknown."""
        return {name: self.seen.parts[:, place].copy() for place, name in enumerate(REWARD_PARTS)}
