"""Which fleet under which requests an episode meets: drawn by its number, so that a resumed run meets new ones."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec
import numpy as np

from loadgen.engine.specs import FleetConfig
from loadgen.evaluate.rows import HELD_S
from loadgen.fleets import Configuration, tables_for, training_configurations, unit_factor
from loadgen.policies import tidegate_mode
from loadgen.requests import RequestTable
from loadgen.train.settings import TrainSettings
from schemas.identity import STEP_S
from services.errors import UserError

VALIDATION_SEED: Final = 0x5EED_0FF
"""Of configurations that no training run draws, whose seed is another."""


class Scenario(NamedTuple):
    """A fleet and its requests."""

    name: str
    config: FleetConfig
    tables: list[RequestTable]
    steps: int


class Scenarios:
    """Scenarios by number. ``factors`` keeps where load 1.0 of each configuration was found, which takes a second
    or more each: a checkpoint keeps it."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.factors: dict[str, float] = {}
        self._training = training_configurations(settings.seed, settings.configurations)
        self._validation = training_configurations(VALIDATION_SEED, settings.validation_configurations)

    def episode(self, number: int) -> Scenario:
        """Training scenario ``number``, 0, 1, ..."""
        settings = self.settings
        rng = np.random.default_rng([settings.seed, 0xEB, number])
        admission = str(rng.choice(settings.admissions))
        for place in rng.permutation(len(self._training)):
            configuration = self._training[int(place)]
            factor = self._factor(configuration)
            if factor > 0:
                seed = int(rng.integers(1, 2**20))
                return _scenario(configuration, factor, admission, settings.cards, settings.episode_s, seed)
        raise UserError("train: none of the configurations drawn can be pressed or relieved to load 1.0")

    def validation(self) -> list[Scenario]:
        """The scenarios held back, the same for every run with these settings, admissions in turn."""
        settings = self.settings
        return [
            _scenario(
                configuration, factor, settings.admissions[k % len(settings.admissions)],
                settings.validation_cards, settings.validation_s, VALIDATION_SEED % 2**20 + k,
            )
            for k, configuration in enumerate(self._validation)
            if (factor := self._factor(configuration)) > 0
        ]  # fmt: skip

    def _factor(self, configuration: Configuration) -> float:
        """Nominal rates times this are load 1.0; 0 where there is no such load."""
        known = self.factors.get(configuration.name)
        if known is None:
            try:
                known = unit_factor(configuration)
            except UserError:
                known = 0.0
            self.factors[configuration.name] = known
        return known


def _scenario(
    configuration: Configuration, factor: float, admission: str, cards: int, seconds: float, seed: int
) -> Scenario:
    fleet = msgspec.structs.replace(configuration.fleet, cards=cards, mode=tidegate_mode(admission))
    wide = msgspec.structs.replace(configuration, fleet=fleet)
    duration_s = HELD_S + seconds
    tables = tables_for(wide, seed, duration_s, factor)
    return Scenario(f"{configuration.name}/{admission}", fleet, tables, round(duration_s / STEP_S))
