"""Every worker of one or several fleets as the sub-environments of a ``gymnasium.vector.VectorEnv``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from loadgen.control import Controls, Objective
from loadgen.engine.specs import FleetConfig
from loadgen.environment.scenario import DEFAULT_RATE, DEFAULT_WORKLOAD, Scenario, generated
from loadgen.environment.world import World, action_space, duration_s, observation_space, steps_of
from schemas.actions import ACTION_COUNT
from schemas.features import INPUT_COUNT
from schemas.transitions import REWARD_PARTS

F4 = NDArray[np.float32]
Array = NDArray[Any]
Told = dict[str, Any]


class _Group:
    """The sub-environments of one fleet: they begin and end together."""

    def __init__(self, scenario: Scenario, workers: int, start: int) -> None:
        self.rows = slice(start, start + workers)
        self.rng, _ = seeding.np_random()
        self.step = 0
        self.over = False
        self._scenario = scenario
        self._workers = workers
        self._world: World | None = None

    @property
    def world(self) -> World:
        if self._world is None:
            raise RuntimeError("call reset before step")
        return self._world

    def begin(self, duration_s: float, controls: Controls) -> None:
        """The next episode. ValueError when it has another number of workers."""
        world = World(self._scenario(self.rng, duration_s), controls)
        if world.workers != self._workers:
            raise ValueError(f"a scenario of {self._workers} workers drew a fleet of {world.workers}")
        self._world, self.step, self.over = world, 0, False


class TidegateVectorEnv(VectorEnv[F4, NDArray[np.int64], Array]):
    """All workers act at once; nobody follows the heuristic. As ``TidegateEnv`` in all that is not said here.

    A fleet's sub-environments end together, and begin anew in the step after (``AutoresetMode.NEXT_STEP``: its
    actions are not looked at, its rewards are 0). Larger fleets are faster: the control's fixed cost is shared.
    """

    metadata: ClassVar[dict[str, Any]] = {  # type: ignore[misc]  # gymnasium leaves it unmarked
        "autoreset_mode": AutoresetMode.NEXT_STEP,
        "render_modes": [],
    }

    def __init__(
        self,
        scenarios: Sequence[Scenario] | None = None,
        *,
        num_envs: int | None = None,
        fleet: FleetConfig | None = None,
        workload: str = DEFAULT_WORKLOAD,
        rate: float = DEFAULT_RATE,
        objective: Objective = "goodput",
        episode_s: float = 600.0,
        controls: Controls | None = None,
        render_mode: None = None,
    ) -> None:
        """One fleet for each of ``scenarios``, which must keep its number of workers; without them one fleet like
        ``fleet``, with as many cards as ``num_envs`` workers need where that is given.

        ValueError when ``num_envs`` is not what the fleets have.
        """
        self.render_mode = render_mode
        self._controls = controls or Controls()
        self._objective: Objective = objective
        self._steps = steps_of(episode_s)
        self._duration_s = duration_s(episode_s, self._controls)
        if scenarios is None:
            scenarios = [generated(_fleet_of(num_envs, fleet or FleetConfig()), workload, rate)]
        self._groups: list[_Group] = []
        self.num_envs = 0
        for scenario in scenarios:
            # Only an episode tells how many workers a scenario has.
            example = scenario(np.random.default_rng(0), self._duration_s)
            self._groups.append(_Group(scenario, len(example.tables), self.num_envs))
            self.num_envs += len(example.tables)
        if num_envs not in (None, self.num_envs):
            raise ValueError(f"num_envs {num_envs}: the scenarios' fleets have {self.num_envs} workers")
        self.single_observation_space = observation_space()
        self.single_action_space = action_space()
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[F4, Told]:
        """New episodes of all fleets. Of ``seed`` (sub-environment i has seed + i, or the i-th of a sequence) each
        fleet takes its first worker's."""
        seeds = _seeds(seed, self.num_envs)
        for group in self._groups:
            first = seeds[group.rows.start]
            if first is not None:
                group.rng, _ = seeding.np_random(first)
            group.begin(self._duration_s, self._controls)
        return self._observed(), self._told()

    def step(self, actions: NDArray[np.int64]) -> tuple[F4, Array, Array, Array, Told]:
        """Let 2 s pass in every fleet under ``actions`` int [n]. ValueError for what is no action."""
        asked = np.asarray(actions)
        if asked.shape != (self.num_envs,):
            raise ValueError(f"actions of shape {asked.shape}: expected [{self.num_envs}]")
        executed = np.zeros(self.num_envs, np.int64)
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated, begun = (np.zeros(self.num_envs, np.bool_) for _ in range(3))
        for group in self._groups:
            rows = group.rows
            if group.over:
                group.begin(self._duration_s, self._controls)
                begun[rows] = True
                continue
            executed[rows] = group.world.advance(asked[rows])
            group.step += 1
            rewards[rows] = group.world.rewards(self._objective)
            terminated[rows] = group.world.done
            truncated[rows] = group.step >= self._steps
            group.over = group.world.done or group.step >= self._steps
        told = self._told()
        acted = ~begun
        parts = [group.world.parts() for group in self._groups]
        raw: Told = {}
        for name in REWARD_PARTS:
            raw[name] = np.where(acted, np.concatenate([one[name] for one in parts]), np.float32(0))
            raw[f"_{name}"] = acted.copy()
        for key, values in (
            ("executed_action", executed),
            ("invalid_action", acted & (executed != asked)),
            ("raw_reward_parts", raw),
        ):
            told[key], told[f"_{key}"] = values, acted.copy()
        return self._observed(), rewards, terminated, truncated, told

    def _observed(self) -> F4:
        out = np.empty((self.num_envs, INPUT_COUNT), np.float32)
        for group in self._groups:
            out[group.rows] = group.world.observations()
        return out

    def _told(self) -> Told:
        masks = np.empty((self.num_envs, ACTION_COUNT), np.uint8)
        held = np.empty(self.num_envs, np.bool_)
        for group in self._groups:
            masks[group.rows] = group.world.action_masks()
            held[group.rows] = group.world.seen.holds != 0
        everybody = np.ones(self.num_envs, np.bool_)
        return {"action_mask": masks, "_action_mask": everybody, "held": held, "_held": everybody.copy()}


def _seeds(seed: int | Sequence[int | None] | None, count: int) -> list[int | None]:
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(count)]
    if len(seed) != count:
        raise ValueError(f"{len(seed)} seeds for {count} sub-environments")
    return list(seed)


def _fleet_of(num_envs: int | None, fleet: FleetConfig) -> FleetConfig:
    if num_envs is None:
        return fleet
    cards, over = divmod(num_envs, fleet.workers_per_card)
    if over or cards < 1:
        raise ValueError(f"num_envs {num_envs}: expected a multiple of the {fleet.workers_per_card} workers a card")
    return msgspec.structs.replace(fleet, cards=cards)
