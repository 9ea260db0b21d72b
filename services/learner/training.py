"""The learner itself: rows in, gradient steps owed for them, candidates out. No bus, no thread, no clock.

One owner at a time: the service keeps it in one thread; training offline calls it directly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.features import FEATURE_HASH
from services.bus import Delivery
from services.errors import PolicyError
from services.learner import dqn
from services.learner.agent import Agent, make_agent, restore_agent, tensors_of, version_of
from services.learner.checkpoint import Checkpoint, Meta
from services.learner.intake import Intake, Taken
from services.learner.settings import Settings
from services.learner.update import update
from services.qnet import QNet, digest

_PROBE_ROWS = 256
_Q_SLACK = 2.0
"""A Q value may pass the largest discounted sum of believed rewards by this factor before it is absurd."""


class Learned(msgspec.Struct, frozen=True):
    """What the gradient steps after a fetch came to; the means are 0 without any."""

    updates: int = 0
    refused: int = 0
    """Steps not made because they were not finite."""
    forgiven: int = 0
    loss: float = 0.0
    td_error: float = 0.0
    """Mean absolute TD error."""
    q_mean: float = 0.0


class Candidate(msgspec.Struct, frozen=True):
    """Weights fit to be examined."""

    version: str
    data: bytes
    sha256: str
    parent: str
    transitions: int


class Trainer:
    """Replay, agent and the account of updates owed.

    ``start``: weights to begin with (the champion's), ``parent`` their version.
    """

    def __init__(self, settings: Settings, *, start: QNet | None = None, parent: str = "") -> None:
        self.settings = settings
        self.intake = Intake(settings)
        self.rng = np.random.Generator(np.random.PCG64(settings.seed))
        self.agent = self._fresh(start)
        self.transitions = 0
        """Fresh rows accepted since the first start."""
        self.parent = parent
        self.owed = 0.0
        """Gradient steps owed and not made yet."""
        self._candidate_at = 0
        self._sound = tensors_of(self.agent), 0

    def _fresh(self, start: QNet | None) -> Agent:
        settings = self.settings
        return make_agent(settings.hidden, settings.learning_rate, settings.seed, start, risk_size=settings.risk_size)

    @property
    def candidate_due(self) -> bool:
        return self.agent.updates - self._candidate_at >= self.settings.publish_updates

    def ingest(self, deliveries: Sequence[Delivery]) -> Taken:
        """Take in a fetch; its fresh rows owe gradient steps once the replay holds ``warmup_rows``."""
        taken = self.intake.ingest(deliveries)
        self.transitions += taken.fresh
        if self.intake.replay.size >= self.settings.warmup_rows:
            self.owed += taken.fresh * self.settings.updates_per_transition
        return taken

    def learn(self, stopping: Callable[[], bool] = lambda: False) -> Learned:
        """Make the gradient steps owed, at most ``max_updates_per_fetch``; what ``stopping`` leaves stays owed."""
        due = int(self.owed)
        steps = min(due, self.settings.max_updates_per_fetch)
        forgiven = due - steps
        self.owed -= forgiven
        found: list[tuple[float, float, float]] = []
        refused = 0
        while steps > 0 and not stopping():
            for step in self.update(min(steps, self.settings.updates_at_once)):
                steps -= 1
                self.owed -= 1
                refused += not step.applied
                if step.applied:
                    found.append((step.loss, float(np.abs(step.errors).mean()), step.q_mean))
        loss, td_error, q_mean = np.mean(found, axis=0).tolist() if found else (0.0, 0.0, 0.0)
        return Learned(len(found), refused, forgiven, loss, td_error, q_mean)

    def update(self, steps: int = 1) -> list[dqn.Step]:
        """Gradient steps on sampled batches; ValueError while the replay is empty."""
        return update(self.agent, self.intake.replay, self.settings, self.rng, steps=steps)

    def make_candidate(self) -> Candidate:
        """The present weights as a candidate. PolicyError when weights or their Q values are not fit to be
        judged: then the agent goes back to its last sound weights."""
        self._candidate_at = self.agent.updates
        try:
            self._check_q_values()
            version = version_of(self.agent, self.transitions)
            self.agent.online.version, self.agent.online.transitions = version, self.transitions
            data = self.agent.online.save()
        except PolicyError:
            tensors, updates = self._sound
            self.agent = self._fresh(self.agent.online)
            restore_agent(self.agent, tensors, updates)
            self._candidate_at = updates
            raise
        self._sound = tensors_of(self.agent), self.agent.updates
        candidate = Candidate(version, data, digest(data), self.parent, self.transitions)
        self.parent = version
        return candidate

    def _check_q_values(self) -> None:
        replay, settings = self.intake.replay, self.settings
        if not replay.size:
            return
        places = self.rng.integers(replay.size, size=min(_PROBE_ROWS, replay.size))
        q = self.agent.online.q_values(replay.states[places])
        low, high = (bound * _Q_SLACK / (1.0 - settings.gamma) for bound in (settings.reward_low, settings.reward_high))
        if not np.isfinite(q).all() or q.min() < min(low, -1.0) or q.max() > max(high, 1.0):
            raise PolicyError(f"candidate: Q values from {q.min():g} to {q.max():g}, believable {low:g} to {high:g}")

    def checkpoint(self, lineage: str) -> Checkpoint:
        """Everything that a new process needs to go on, as of the last fetch taken in."""
        intake, replay, settings = self.intake, self.intake.replay, self.settings
        arrays: dict[str, NDArray[np.generic]] = dict(tensors_of(self.agent))
        if settings.checkpoint_replay:
            arrays |= {f"replay.{name}": array for name, array in replay.contents().items()}
        sequence = max(intake.sequence, intake.learned_until)
        meta = Meta(
            feature_hash=FEATURE_HASH,
            objective=settings.objective,
            hidden=self.agent.online.sizes,
            lineage=lineage,
            sequence=sequence,
            replay_from=(replay.first_sequence or intake.sequence + 1),
            transitions=self.transitions,
            updates=self.agent.updates,
            owed=self.owed,
            candidate_at=self._candidate_at,
            parent=self.parent,
            rng=json.dumps(self.rng.bit_generator.state),
            capacity=replay.capacity,
            written=replay.written,
            max_priority=replay.max_priority,
            trajectories=intake.trajectories.dump() if settings.checkpoint_replay else None,
            origin=self.agent.online.origin,
        )
        return Checkpoint(meta, arrays)

    def restore(self, checkpoint: Checkpoint, lineage: str) -> int:
        """Go on from ``checkpoint``; the stream sequence to read from.

        With another ``lineage`` the weights are kept and the stream is read from its beginning. PolicyError
        when the checkpoint was made for another feature table, objective or network, or its arrays do not fit.
        """
        meta, settings = checkpoint.meta, self.settings
        for what, found, expected in (
            ("feature table", meta.feature_hash, FEATURE_HASH),
            ("objective", meta.objective, settings.objective),
            ("hidden sizes", str(meta.hidden), str(settings.hidden)),
        ):
            if found != expected:
                raise PolicyError(f"checkpoint: {what} {found}, expected {expected}")
        arrays = checkpoint.arrays
        replay_arrays = {n.removeprefix("replay."): a for n, a in arrays.items() if n.startswith("replay.")}
        tensors = {n: a.astype(np.float32) for n, a in arrays.items() if not n.startswith("replay.")}
        risk_size = len(tensors.get("online.risk_hidden.bias", ()))  # as it was: a champion may have had none
        self.agent = make_agent(settings.hidden, settings.learning_rate, settings.seed, risk_size=risk_size)
        restore_agent(self.agent, tensors, meta.updates)
        self.agent.online.origin = meta.origin
        self._sound = tensors, meta.updates
        self.transitions, self.parent = meta.transitions, meta.parent
        self.owed, self._candidate_at = meta.owed, meta.candidate_at
        try:
            self.rng.bit_generator.state = json.loads(meta.rng)
        except (ValueError, TypeError, KeyError) as error:
            raise PolicyError(f"checkpoint: state of the random generator: {error}") from error
        if meta.lineage != lineage:
            return 1
        intake = self.intake
        intake.learned_until = meta.sequence
        if meta.trajectories is not None and meta.capacity == settings.capacity_rows and replay_arrays:
            try:
                intake.replay.restore(replay_arrays, meta.written, meta.max_priority)
                intake.trajectories.restore(meta.trajectories)
            except (ValueError, KeyError, IndexError) as error:
                raise PolicyError(f"checkpoint: replay: {error}") from error
            intake.sequence = meta.sequence
            return meta.sequence + 1
        intake.sequence = meta.replay_from - 1
        return meta.replay_from
