"""Two-worker fleets under a light chat load: scenarios that cost a moment."""

from __future__ import annotations

import numpy as np

from loadgen.bench.engine import chat_table
from loadgen.engine.specs import FleetConfig
from loadgen.train.scenarios import Scenario
from loadgen.train.settings import LEARNER, TrainSettings
from services.learner.settings import Settings as Learner

STEPS = 60


class Scene:
    """What ``Scenarios`` gives, small."""

    def __init__(self) -> None:
        self.factors: dict[str, float] = {}

    def episode(self, number: int) -> Scenario:
        rng = np.random.default_rng(number)
        config = FleetConfig(cards=2, workers_per_card=1)
        return Scenario(f"scene-{number}", config, [chat_table(2.0, STEPS * 2.0, rng) for _ in range(2)], STEPS)

    def validation(self) -> list[Scenario]:
        return [self.episode(1_000)]


def settings(**changes: object) -> TrainSettings:
    learner = {"hidden": (16,), "batch": 16, "capacity_rows": 4096, "warmup_rows": 32, "risk_size": 4}
    values = {name: getattr(LEARNER, name) for name in LEARNER.__struct_fields__} | learner
    small = {
        "learner": Learner(**values), "transitions": 400, "fleets": 2, "cards": 2, "demonstrations": 100,
        "pretraining": 16, "demonstration_share": 0.5, "epsilon_transitions": 300, "validate_every": 10,
        "report_every_s": 1e6, "checkpoint_every_s": 1e6,
    }  # fmt: skip
    return TrainSettings(**small | changes)
