"""Transitions from several emulated fleets stepped in turn.

One fleet's turn: see its state, store what its last step brought, choose for all its workers in one forward pass,
command, and let its next two seconds pass in a thread, meanwhile the other fleets have their turns and the learner
learns. Whatever the thread's pace, the order of turns and with it every number is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadgen.control import Control, Seen
from loadgen.engine.fleet import Fleet
from loadgen.train.scenarios import Scenario
from schemas.features import normalise
from schemas.identity import STEP_S
from schemas.transitions import REWARD_PARTS
from services.learner import risk
from services.learner.replay_buffer import NO_ROW, NOTHING_SHOWN, ReplayBuffer, Rows
from services.learner.settings import Settings as Learner


class Chosen(NamedTuple):
    """Actions int [n], the probability float [n] of each under who chose it, and what the heuristic would do."""

    actions: NDArray[np.integer]
    probabilities: NDArray[np.float64]
    shown: NDArray[np.integer]
    """int [n]."""


Choose = Callable[[Seen, NDArray[np.float32], NDArray[np.bool_]], Chosen]
"""(what is seen of n workers, its normalised states [n, inputs], bool [n]: the heuristic is to choose) -> what is
done."""


class Seat:
    """One fleet with its control, for one episode."""

    def __init__(self, scenario: Scenario, demonstrating_cards: int) -> None:
        self.scenario = scenario
        self.fleet = Fleet(scenario.config, scenario.tables)
        self.control = Control(self.fleet, scenario.config, scenario.tables)
        self.demonstrating: NDArray[np.bool_] = self.fleet.card_of < demonstrating_cards
        self.step = 0
        self._shown = np.full(self.fleet.workers, NOTHING_SHOWN, np.uint8)
        self._serials = np.full(self.fleet.workers, NO_ROW, np.int64)
        self._probabilities = np.ones(self.fleet.workers)
        self._passing: Future[None] | None = None
        self._inputs = self._inputs_before = np.empty((0, 0), np.float32)

    @property
    def over(self) -> bool:
        return self.step >= self.scenario.steps

    def observe(self) -> tuple[Seen, NDArray[np.float32]]:
        """Wait for the step under way, if any, and see what it came to; and the states, normalised."""
        if self._passing is not None:
            self._passing.result()
            self._passing = None
        seen = self.control.observe(self.step)
        self._inputs_before, self._inputs = self._inputs, normalise(seen.features)
        return seen, self._inputs

    def act(self, chosen: Chosen, executor: Executor) -> None:
        """Command, and let the step pass in ``executor``."""
        self.control.act(chosen.actions)
        self._probabilities, self._shown = chosen.probabilities, chosen.shown.astype(np.uint8)
        self._passing = executor.submit(self.fleet.advance, STEP_S)
        self.step += 1

    def store(self, replay: ReplayBuffer, learner: Learner) -> int:
        """Put what the last step brought into ``replay``; the number of rows."""
        found = self.control.transitions()
        if found is None:
            return 0
        whole = found.whole
        rewards = found.rewards[whole, REWARD_PARTS.index(learner.objective)]
        rows = Rows(
            states=self._inputs_before[whole],
            next_states=self._inputs[whole],
            actions=found.actions[whole],
            next_masks=found.next_masks[whole],
            # What lies outside is cut to what is believed; from the stream such a row is refused.
            rewards=np.clip(rewards, learner.reward_low, learner.reward_high),
            discounts=found.discounts[whole] * np.float32(learner.gamma),
            probabilities=self._probabilities[whole].astype(np.float32),
            sequences=np.zeros(len(rewards), np.int64),
        )
        serials = replay.insert(
            rows,
            self._serials[whole],
            masks=found.masks[whole],
            shown=self._shown[whole],
            exhausted=risk.exhausted(
                found.states[whole][:, risk.RISK_COLUMNS], found.next_states[whole][:, risk.RISK_COLUMNS]
            ),
        )
        self._serials[:] = NO_ROW
        self._serials[whole] = np.where(rows.discounts > 0, serials, NO_ROW)
        return len(serials)


class Collector:
    """``fleets`` seats; ``scenario(number)`` gives episode after episode. ``episodes`` is the next number."""

    def __init__(
        self,
        scenario: Callable[[int], Scenario],
        fleets: int,
        demonstrating_cards: int,
        executor: Executor,
        episodes: int = 0,
    ) -> None:
        self.episodes = episodes
        self._scenario, self._demonstrating_cards, self._executor = scenario, demonstrating_cards, executor
        self._fleets = fleets
        self._seats: list[Seat] = []
        self._turn = 0

    def turn(self, choose: Choose, replay: ReplayBuffer, learner: Learner, *, all_demonstrate: bool) -> int:
        """The next fleet's turn; the number of transitions that it brought."""
        place = self._turn
        self._turn = (place + 1) % self._fleets
        if place == len(self._seats):
            self._seats.append(self._fresh())
        seat = self._seats[place]
        seen, inputs = seat.observe()
        stored = seat.store(replay, learner)
        if seat.over:
            seat = self._seats[place] = self._fresh()
            seen, inputs = seat.observe()
        demonstrating = np.ones_like(seat.demonstrating) if all_demonstrate else seat.demonstrating
        seat.act(choose(seen, inputs, demonstrating), self._executor)
        return stored

    def _fresh(self) -> Seat:
        seat = Seat(self._scenario(self.episodes), self._demonstrating_cards)
        self.episodes += 1
        return seat
