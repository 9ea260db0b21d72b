"""The validation return: goodput under SLO of the present network over the heuristic's, on fleets held back."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.control import Control, Seen
from loadgen.engine.fleet import Fleet
from loadgen.engine.report import summary
from loadgen.evaluate.entrants import Choose
from loadgen.evaluate.rows import HELD_S
from loadgen.train.scenarios import Scenario
from schemas.identity import STEP_S
from services.decision import heuristic


class Score(msgspec.Struct, frozen=True):
    """What a policy brought on every validation scenario."""

    ratio: float
    """Mean over scenarios of goodput over the heuristic's."""
    worst: float
    """The least of them."""
    ratios: list[float]


def goodputs(policy: Choose, scenarios: Sequence[Scenario]) -> list[float]:
    """Tokens per second within the SLO, after the windows filled, of each scenario."""
    return [_goodput(policy, scenario) for scenario in scenarios]


def score(found: Sequence[float], reference: Sequence[float]) -> Score:
    """``found`` over ``reference``; a scenario in which neither serves anything counts as equal."""
    ratios = [(a / b if b > 0 else 1.0 + (a > 0)) for a, b in zip(found, reference, strict=True)]
    return Score(float(np.mean(ratios)), min(ratios), ratios)


def by_rules(seen: Seen) -> NDArray[np.integer]:
    """The heuristic."""
    return heuristic.choose(seen.features, seen.mask, heuristic.HeuristicSettings())


def _goodput(policy: Choose, scenario: Scenario) -> float:
    fleet = Fleet(scenario.config, scenario.tables)
    control = Control(fleet, scenario.config, scenario.tables)
    for step in range(scenario.steps):
        seen = control.observe(step)
        control.act(policy(seen))
        fleet.advance(STEP_S)
    return summary(fleet.results(), HELD_S).goodput_tokens_per_s
