"""Settings of a training run: all of them stand in its checkpoints and in the policy that comes out."""

from __future__ import annotations

from typing import Annotated

import msgspec

from loadgen.policies import ADMISSIONS
from services.learner.settings import Settings as Learner

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]

LEARNER = Learner(
    updates_per_transition=1 / 32,
    batch=128,
    margin=0.1,
    margin_weight=0.3,
    capacity_rows=200_000,
    beta_updates=50_000,
    warmup_rows=2_000,
)
"""The learner's settings that differ here: rows are cheap, and there are demonstrations."""


class TrainSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained, on what, and how long."""

    learner: Learner = LEARNER
    """Network, targets, replay and imitation; what it says of streams and checkpoints is not used here."""
    seed: Count = 0
    """Of the first weights, of sampling, of exploration, and of which fleets and requests are met."""
    transitions: Positive = 3_000_000
    """Transitions to learn from, demonstrations among them."""
    configurations: Positive = 64
    """Fleets that are drawn to train on (``loadgen.fleets.training_configurations``); episodes take one at random."""
    fleets: Positive = 4
    """Fleets stepped in turn. While one is decided for and learned from, the others' time passes in a thread."""
    cards: Positive = 32
    """Cards of each: the forward pass is as wide as their workers."""
    episode_s: Seconds = 600.0
    """Simulated length of an episode, after the minute in which windows fill."""
    admissions: tuple[str, ...] = ("deadline_cap_shed", "deadline_shed", "deadline", "fcfs")
    """How engines admit; episodes take one at random."""
    demonstrations: Count = 100_000
    """Transitions of the heuristic alone before anything else."""
    pretraining: Count = 2_000
    """Gradient steps on them before the network acts."""
    demonstration_share: Share = 0.125
    """Share of every fleet's cards that the heuristic controls all along, so that the replay never lacks it."""
    margin_updates: Positive = 40_000
    """Gradient steps over which the weight of imitation falls to 0 on a straight line: the network may become
    better than whom it imitates."""
    epsilon_start: Share = 0.2
    """Exploration: probability of a random allowed action when the network begins to act."""
    epsilon_end: Share = 0.02
    epsilon_transitions: Positive = 1_000_000
    """Transitions over which it falls, on a straight line."""
    veto: Share = 1.0
    """Risk above which an action loses against a safer one, when acting and in validation; 1: never."""
    validation_configurations: Positive = 6
    """Fleets held back, drawn with a seed that no training uses; the examination's are others still."""
    validation_cards: Positive = 4
    validation_s: Seconds = 400.0
    validate_every: Positive = 4_000
    """Gradient steps between validations."""
    report_every_s: Seconds = 10.0
    checkpoint_every_s: Seconds = 60.0

    def __post_init__(self) -> None:
        unknown = [name for name in self.admissions if name not in ADMISSIONS]
        if unknown or not self.admissions:
            raise ValueError(f"admissions {self.admissions}: expected some of {', '.join(ADMISSIONS)}")
        if self.learner.capacity_rows < 16 * self.fleets * self.cards:
            raise ValueError(f"learner.capacity_rows {self.learner.capacity_rows}: too few for {self.fleets} fleets")
