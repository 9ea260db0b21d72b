"""A training run: demonstrations, gradient steps on them, then acting, learning and validating until enough is seen.

every turn      one fleet's step: its transitions go into the replay and owe gradient steps
every so often  a line of progress; a validation, whose best network becomes the policy file; a checkpoint
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from loadgen.control import Seen
from loadgen.evaluate.entrants import by_network
from loadgen.train import checkpoint, validation
from loadgen.train.checkpoint import Checkpoint, Meta, Point
from loadgen.train.collector import Chosen, Collector
from loadgen.train.progress import Progress
from loadgen.train.scenarios import Scenario, Scenarios
from loadgen.train.settings import TrainSettings
from schemas.features import INPUT_COUNT
from services import qweights
from services.decision import heuristic
from services.decision.shield import ALLOWED
from services.learner.agent import make_agent, restore_agent, tensors_of, version_of
from services.learner.checkpoint import write
from services.learner.replay_buffer import ReplayBuffer
from services.learner.update import as_stored, update

_MOST_UPDATES_A_TURN: Final = 64
_MARGIN_STAGES: Final = 100
"""In so many stages the weight of imitation falls."""


class Training:
    """One run. ``tell`` gets lines of progress, ``command`` is what the policy file says made it.

    Given settings (and scenarios) every number of it repeats, but for what a resumed run meets anew.
    """

    def __init__(
        self,
        settings: TrainSettings,
        policy_file: Path,
        folder: Path,
        *,
        tell: Callable[[str], None],
        command: str = "",
        clock: Callable[[], float] = time.monotonic,
        scenarios: Scenarios | None = None,
    ) -> None:
        self.settings = settings
        self.policy_file, self.folder, self.command = policy_file, folder, command
        learner = settings.learner
        self.agent = make_agent(learner.hidden, learner.learning_rate, settings.seed, risk_size=learner.risk_size)
        self.replay = ReplayBuffer(learner.capacity_rows, INPUT_COUNT, alpha=learner.alpha)
        self.transitions = 0
        self.curve: list[Point] = []
        self.best = float("-inf")
        self._sampling = np.random.default_rng([settings.seed, 1])
        self._exploring = np.random.default_rng([settings.seed, 2])
        self._scenarios = scenarios or Scenarios(settings)
        self._held_back: list[Scenario] | None = None
        self._reference: list[float] | None = None
        self._owed = 0.0
        self._acting: int | None = None
        self._episodes = 0
        self._tell, self._clock = tell, clock
        self._seconds_before = 0.0
        self._began = clock()
        self._progress = Progress(clock)

    @property
    def live(self) -> qweights.Weights:
        """The online network as NumPy reads it: its arrays are the network's own, and change with every step."""
        net = self.agent.online
        tensors = {name: tensor.detach().numpy() for name, tensor in net.state_dict().items()}
        return qweights.Weights(tensors, net.sizes, risk_size=net.risk_size)

    @property
    def epsilon(self) -> float:
        """Exploration now."""
        s = self.settings
        since = 0 if self._acting is None else self.transitions - self._acting
        return s.epsilon_start + (s.epsilon_end - s.epsilon_start) * min(1.0, since / s.epsilon_transitions)

    def run(self) -> None:
        """Train until ``transitions`` are done, validate once more and write the last checkpoint. An interrupt
        writes a checkpoint too."""
        torch.set_num_threads(1)  # the fleets have the other core
        # Moments of weights behind dead units fade into numbers that are slow. The switch is the whole process's, in
        # which zero then equals the smallest number: it goes back whatever happens.
        torch.set_flush_denormal(True)
        try:
            self._train()
        finally:
            torch.set_flush_denormal(False)

    def _train(self) -> None:
        settings = self.settings
        demonstrating = round(settings.demonstration_share * settings.cards)
        self._progress.start(self.transitions, self.agent.updates)
        next_checkpoint = self._clock() + settings.checkpoint_every_s
        validate_at = self.agent.updates + settings.validate_every
        with ThreadPoolExecutor(1, thread_name_prefix="fleets") as executor:
            collector = Collector(
                self._scenarios.episode, settings.fleets, demonstrating, executor, episodes=self._episodes
            )
            try:
                while self.transitions < settings.transitions:
                    fresh = collector.turn(
                        self._choose, self.replay, settings.learner, all_demonstrate=self._acting is None
                    )
                    self._episodes = collector.episodes
                    self.transitions += fresh
                    self._learn(fresh)
                    if self._progress.due(settings.report_every_s):
                        self._tell(self._progress.line(self.transitions, self.agent.updates, self.epsilon))
                    if self.agent.updates >= validate_at:
                        validate_at = self.agent.updates + settings.validate_every
                        self.validate()
                    if self._clock() >= next_checkpoint:
                        self.save()
                        next_checkpoint = self._clock() + settings.checkpoint_every_s
            except KeyboardInterrupt:
                self.save()
                raise
        self.validate()
        self.save()

    def _choose(self, seen: Seen, inputs: NDArray[np.float32], demonstrating: NDArray[np.bool_]) -> Chosen:
        settings = self.settings
        shown = heuristic.choose(seen.features, seen.mask, heuristic.HeuristicSettings())
        if demonstrating.all():
            return Chosen(shown, np.ones(len(shown)), shown)
        allowed = ALLOWED[seen.mask]
        own = qweights.best(self._values(inputs), allowed, settings.veto)
        lucky = self._exploring.random(len(own)) < self.epsilon
        tried = np.where(lucky, heuristic.random_masked(seen.mask, self._exploring), own)
        uniform = self.epsilon / allowed.sum(axis=1)
        probabilities = uniform + np.where(tried == own, 1.0 - self.epsilon, 0.0)
        return Chosen(np.where(demonstrating, shown, tried), np.where(demonstrating, 1.0, probabilities), shown)

    @torch.no_grad()
    def _values(self, inputs: NDArray[np.float32]) -> qweights.Values:
        net, tensor = self.agent.net, torch.from_numpy(inputs)
        risks = net.risks(tensor) if self.settings.veto < 1.0 else None
        return qweights.Values(net.q(tensor).numpy(), None if risks is None else risks.numpy())

    def _learn(self, fresh: int) -> None:
        """Gradient steps owed for ``fresh`` transitions; at the end of the demonstrations, those on them."""
        settings = self.settings
        if self._acting is None:
            if self.transitions < settings.demonstrations:
                return
            self._update(settings.pretraining)
            self._acting = self.transitions
            return
        if self.replay.size < settings.learner.warmup_rows:
            return
        self._owed = min(self._owed + fresh * settings.learner.updates_per_transition, _MOST_UPDATES_A_TURN)
        at_once = settings.learner.updates_at_once
        due = int(self._owed) // at_once * at_once
        self._owed -= due
        self._update(due)

    def _update(self, steps: int) -> None:
        learner = self.settings.learner
        for done in range(0, steps, learner.updates_at_once):
            stage = _MARGIN_STAGES - min(
                _MARGIN_STAGES, self.agent.updates * _MARGIN_STAGES // self.settings.margin_updates
            )
            weight = self.settings.learner.margin_weight * stage / _MARGIN_STAGES
            if weight != learner.margin_weight:
                learner = msgspec.structs.replace(learner, margin_weight=weight)
            count = min(learner.updates_at_once, steps - done)
            for step in update(self.agent, self.replay, learner, self._sampling, as_stored, count):
                self._progress.note(step)

    def validate(self) -> validation.Score:
        """Validate the present network; when it is the best so far, it becomes the policy file."""
        if self._held_back is None:
            self._held_back = self._scenarios.validation()
        if self._reference is None:
            self._reference = validation.goodputs(validation.by_rules, self._held_back)
        policy = by_network(self.live, self.settings.veto)
        found = validation.score(validation.goodputs(policy, self._held_back), self._reference)
        self.curve.append(
            Point(self.agent.updates, self.transitions, self.seconds, found.ratio, found.worst, found.ratios)
        )
        better = found.ratio > self.best
        if better:
            self.best = found.ratio
            write(self.policy_file, self.policy())
        self._tell(
            f"validation: {found.ratio:.4f} of the heuristic's goodput, worst {found.worst:.4f}, best so far "
            f"{self.best:.4f}{' (written)' if better else ''}"
        )
        return found

    def policy(self) -> bytes:
        """The present network as a policy file; PolicyError when it is not sound."""
        net = self.agent.online
        net.version, net.transitions = version_of(self.agent, self.transitions), self.transitions
        net.origin = qweights.Origin(self.settings.seed, self.command, msgspec.to_builtins(self.settings))
        return net.save()

    @property
    def seconds(self) -> float:
        """Seconds of training, those of resumed runs included."""
        return self._seconds_before + self._clock() - self._began

    def save(self) -> None:
        """Write a checkpoint."""
        arrays: dict[str, NDArray[np.generic]] = dict(tensors_of(self.agent))
        arrays |= {f"replay.{name}": array for name, array in self.replay.contents().items()}
        meta = Meta(
            settings=self.settings,
            transitions=self.transitions,
            updates=self.agent.updates,
            owed=self._owed,
            acting=self._acting,
            seconds=self.seconds,
            episodes=self._episodes,
            sampling=json.dumps(self._sampling.bit_generator.state),
            exploring=json.dumps(self._exploring.bit_generator.state),
            written=self.replay.written,
            max_priority=self.replay.max_priority,
            factors=self._scenarios.factors,
            reference=self._reference,
            best=self.best if self.curve else 0.0,
            curve=self.curve,
        )
        checkpoint.save(self.folder, Checkpoint(meta, arrays))

    def restore(self, saved: Checkpoint) -> None:
        """Go on from ``saved``, a checkpoint of these settings."""
        meta = saved.meta
        tensors = {
            name: np.asarray(array, np.float32)
            for name, array in saved.arrays.items()
            if not name.startswith("replay.")
        }
        restore_agent(self.agent, tensors, meta.updates)
        self.replay.restore(saved.part("replay"), meta.written, meta.max_priority)
        self._sampling.bit_generator.state = json.loads(meta.sampling)
        self._exploring.bit_generator.state = json.loads(meta.exploring)
        self.transitions, self._owed, self._acting = meta.transitions, meta.owed, meta.acting
        self._episodes, self._seconds_before = meta.episodes, meta.seconds
        self._scenarios.factors.update(meta.factors)
        self._reference, self.curve = meta.reference, list(meta.curve)
        self.best = meta.best if meta.curve else float("-inf")


def differing(one: TrainSettings, other: TrainSettings) -> Sequence[str]:
    """Names of the settings in which two runs differ, but for how long they are and how often they report."""
    free = ("transitions", "report_every_s", "checkpoint_every_s", "validate_every")
    return [n for n in TrainSettings.__struct_fields__ if n not in free and getattr(one, n) != getattr(other, n)]
