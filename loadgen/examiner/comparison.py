"""Candidate against champion on the same traces: paired ratios with their bootstrap interval. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray


class Compared(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput over the champion's."""

    ratio: float
    """Mean over trials."""
    low: float
    """Bounds of its paired bootstrap interval."""
    high: float
    worst: float
    """Of the configurations: goodput summed over a configuration's trials, over the champion's."""
    worst_name: str


def compare(
    candidate: NDArray[np.float64],
    champion: NDArray[np.float64],
    groups: Sequence[str],
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    draws: int = 2000,
) -> Compared:
    """Of goodputs [trials] on equal trials of these configurations. ValueError when there are none.

    A trial in which the champion serves nothing counts 1, or 2 where the candidate serves something.
    """
    if not len(groups) or candidate.shape != champion.shape or len(groups) != len(candidate):
        raise ValueError(f"{candidate.shape} and {champion.shape} goodputs of {len(groups)} trials: expected as many")
    ratios = _ratios(candidate, champion)
    picked = rng.integers(len(ratios), size=(draws, len(ratios)))
    means = ratios[picked].mean(axis=1)
    tail = (1.0 - confidence) / 2.0
    by_group = {
        name: float(_ratios(*[np.array([side[_of(groups, name)].sum()]) for side in (candidate, champion)])[0])
        for name in dict.fromkeys(groups)
    }
    worst_name = min(by_group, key=lambda name: by_group[name])
    low, high = np.quantile(means, [tail, 1.0 - tail]).tolist()
    return Compared(ratio=float(ratios.mean()), low=low, high=high, worst=by_group[worst_name], worst_name=worst_name)


def _of(groups: Sequence[str], name: str) -> list[int]:
    return [place for place, group in enumerate(groups) if group == name]


def _ratios(candidate: NDArray[np.float64], champion: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(champion > 0.0, candidate / np.where(champion > 0.0, champion, 1.0), 1.0 + (candidate > 0.0))
