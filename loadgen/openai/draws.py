"""Distributions as a user writes them: ``128``, ``64:256``, ``lognormal:128:600``, ``exp:20``.

Pure. One syntax for token counts and seconds; whole numbers are made by whoever draws.
"""

from __future__ import annotations

import math
from typing import Final

import msgspec
import numpy as np

from services.errors import UserError

SYNTAX: Final = "N, LOW:HIGH (uniform), exp:MEAN or lognormal:P50:P99"
_Z99: Final = 2.3263478740408408
_LONGEST: Final = 1e8


class Draw(msgspec.Struct, frozen=True):
    """A distribution of non-negative numbers; ``kind`` decides what ``a`` and ``b`` mean."""

    kind: str
    """``uniform`` (a to b, both included), ``exp`` (mean a) or ``lognormal`` (median a, P99 b)."""
    a: float
    b: float

    @property
    def least(self) -> float:
        """No draw is below it."""
        return self.a if self.kind == "uniform" else 0.0

    def value(self, rng: np.random.Generator) -> float:
        """One draw."""
        if self.kind == "exp":
            return float(rng.exponential(self.a))
        if self.kind == "lognormal":
            return float(rng.lognormal(math.log(self.a), math.log(self.b / self.a) / _Z99))
        return float(rng.uniform(self.a, self.b)) if self.a < self.b else self.a

    def whole(self, rng: np.random.Generator, least: int = 1) -> int:
        """One draw as a count, at least ``least``; a uniform one has its two ends as likely as the rest."""
        if self.kind == "uniform" and self.a < self.b:
            return max(int(rng.integers(math.ceil(self.a), math.floor(self.b), endpoint=True)), least)
        return max(round(self.value(rng)), least)


def draw_of(option: str, text: str, least: float = 0.0) -> Draw:
    """The distribution that ``text``, given as ``option``, names; UserError with what was expected otherwise.

    ``least``: no number in it may be below (1 for counts). A P50 and a mean must be above 0 in any case.
    """
    kind, *rest = text.strip().split(":")
    named = kind in ("exp", "lognormal")
    try:
        numbers = [float(part) for part in (rest if named else [kind, *rest])]
    except ValueError:
        numbers = []
    wanted = {"exp": (1,), "lognormal": (2,)}.get(kind, (1, 2))
    if len(numbers) not in wanted or not all(max(least, 0.0) <= number <= _LONGEST for number in numbers):
        raise UserError(f"{option}: found {text!r}, expected {SYNTAX}, numbers from {least:g} on")
    a, b = numbers[0], numbers[-1]
    if (kind == "lognormal" and not 0 < a < b) or (kind == "exp" and a <= 0):
        raise UserError(f"{option}: found {text!r}, expected {SYNTAX}, above 0 and P50 below P99")
    if not named and (a > b or (least >= 1 and math.ceil(a) > math.floor(b))):
        raise UserError(f"{option}: found {text!r}, expected LOW not above HIGH, with a whole number between them")
    return Draw(kind if named else "uniform", a, b)
