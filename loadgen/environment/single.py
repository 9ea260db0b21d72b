"""One worker's control as a ``gymnasium.Env``; its card's other workers follow the heuristic."""

from __future__ import annotations

from typing import Any, ClassVar, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Controls, Objective
from loadgen.engine.specs import FleetConfig
from loadgen.environment.scenario import DEFAULT_RATE, DEFAULT_WORKLOAD, Scenario, generated
from loadgen.environment.world import World, action_space, duration_s, observation_space, steps_of
from schemas.actions import Action
from services.decision import heuristic

F4 = NDArray[np.float32]


class TidegateEnv(gymnasium.Env[F4, np.int64]):
    """Every 2 s of simulated time one of five actions for one worker (``docs/environment.md``).

    The observation is the input of Tidegate's network, the reward that of ``objective``. An action that the shield
    forbids is executed as hold. ``terminated``: every request has ended; ``truncated``: ``episode_s`` have passed.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]  # gymnasium leaves it unmarked

    def __init__(
        self,
        scenario: Scenario | None = None,
        *,
        fleet: FleetConfig | None = None,
        workload: str = DEFAULT_WORKLOAD,
        rate: float = DEFAULT_RATE,
        worker: int | None = 0,
        objective: Objective = "goodput",
        episode_s: float = 600.0,
        controls: Controls | None = None,
        render_mode: None = None,
    ) -> None:
        """``scenario`` draws each episode; without one ``fleet`` serves the built-in ``workload`` at ``rate``.

        ``worker``: which of the fleet's workers is controlled, None: one drawn at each reset.
        """
        self.render_mode = render_mode
        self.observation_space = observation_space()
        self.action_space = action_space()
        self._scenario = scenario or generated(fleet, workload, rate)
        self._worker = worker
        self._at = 0
        self._objective: Objective = objective
        self._steps = steps_of(episode_s)
        self._controls = controls or Controls()
        self._duration_s = duration_s(episode_s, self._controls)
        self._world: World | None = None
        self._step = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[F4, dict[str, Any]]:
        """A new episode, at the end of its first minute: until then nobody knows enough to act."""
        super().reset(seed=seed)
        world = World(self._scenario(self.np_random, self._duration_s), self._controls)
        at = int(self.np_random.integers(world.workers)) if self._worker is None else self._worker
        if not 0 <= at < world.workers:
            raise ValueError(f"worker {at}: the fleet has {world.workers}, numbered from 0")
        self._world, self._at, self._step = world, at, 0
        return self._observed(world), self._told(world)

    def step(self, action: np.int64) -> tuple[F4, SupportsFloat, bool, bool, dict[str, Any]]:
        """Let 2 s pass under ``action``. RuntimeError before ``reset``, ValueError for no action."""
        world = self._world
        if world is None:
            raise RuntimeError("call reset before step")
        if not self.action_space.contains(action):
            raise ValueError(f"action {action}: expected one of {[int(one) for one in Action]}")
        seen, at = world.seen, self._at
        actions = heuristic.choose(seen.features, seen.mask, self._controls.heuristic).astype(np.int64)
        actions[at] = int(action)
        executed = int(world.advance(actions)[at])
        self._step += 1
        info = self._told(world)
        info["executed_action"] = executed
        info["invalid_action"] = executed != int(action)
        info["raw_reward_parts"] = {name: float(values[at]) for name, values in world.parts().items()}
        reward = float(world.rewards(self._objective)[at])
        return self._observed(world), reward, world.done, self._step >= self._steps, info

    def close(self) -> None:
        self._world = None

    def _observed(self, world: World) -> F4:
        observation: F4 = world.observations()[self._at].copy()
        return observation

    def _told(self, world: World) -> dict[str, Any]:
        return {
            "action_mask": world.action_masks()[self._at].copy(),
            "held": bool(world.seen.holds[self._at]),
        }
