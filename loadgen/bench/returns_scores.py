"""Scores of chances of return: log-loss, Brier score and reliability of yes-or-no questions. Pure."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.returns_training import Waits
from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import HORIZON_S

F8 = NDArray[np.float64]

AGES_S: Final = (0.0, 5.0, 30.0, 120.0, 600.0)
WINDOWS_S: Final = (10.0, 60.0, 600.0)
BANDS: Final = 10
_SMALLEST: Final = 1e-6


class Reliability(msgspec.Struct, frozen=True):
    """Answers sorted by what was said and cut into tenths of equal count (fewer where many said the same)."""

    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    count: tuple[int, ...]


class Question(msgspec.Struct, frozen=True):
    """One yes-or-no question asked many times, answered by the estimator, by the class's rates and by the class's
    median. Losses in nats an answer, Brier scores as they are; ``error``: mean distance of said and true over the
    tenths, weighted by their counts. The oracle has 0 in all of them."""

    name: str
    asked: int
    base_rate: float
    log_loss: float
    log_loss_class: float
    log_loss_median: float
    brier: float
    brier_class: float
    brier_median: float
    error: float
    error_class: float
    reliability: Reliability


def questions(
    waits: Waits, rates: F8, kind_rates: F8, median_s: F8, *, asked_again: bool = True
) -> tuple[Question, ...]:
    """Put every question that can be put while the sessions are away and whose answer the trace is long enough to
    tell. Rates float64 [n, BINS]. Not ``asked_again``: those of idle sessions get the answer of their turn's end."""
    answers: dict[str, list[F8]] = {}
    for age_s in AGES_S:
        for window_s in WINDOWS_S:
            here = (waits.gap_s > age_s) & (waits.watched_s >= age_s + window_s)
            ages_s = np.full(int(here.sum()), age_s if asked_again else 0.0)
            said = [return_rates.within(table[here], ages_s, np.full_like(ages_s, window_s))
                    for table in (rates, kind_rates)]  # fmt: skip
            plain = 1.0 - 0.5 ** (window_s / np.maximum(median_s[here], 1e-3))
            truth = waits.gap_s[here] <= age_s + window_s
            answers.setdefault(f"back within {window_s:g} s", []).append(np.stack([*said, plain, truth], axis=1))
        here = (waits.gap_s > age_s) & (waits.watched_s >= HORIZON_S)
        ages_s = np.full(int(here.sum()), age_s if asked_again else 0.0)
        said = [return_rates.ended(table[here], ages_s) for table in (rates, kind_rates)]
        truth = waits.gap_s[here] > HORIZON_S
        answers[f"ended, after {age_s:g} s"] = [np.stack([*said, np.zeros_like(ages_s), truth], axis=1)]
    return tuple(_question(name, np.concatenate(parts)) for name, parts in answers.items() if sum(map(len, parts)))


def factor(guess_s: F8, gap_s: F8) -> float:
    """Median factor between estimates and gaps; those below half a second count as half a second."""
    return float(np.exp(np.median(np.abs(np.log(np.maximum(guess_s, 0.5)) - np.log(np.maximum(gap_s, 0.5))))))


def _question(name: str, rows: F8) -> Question:
    """Figures of answers float64 [n, 4]: the chances of estimator, class and median, what came true."""
    truth = rows[:, 3]
    losses = [_log_loss(rows[:, who], truth) for who in range(3)]
    scores = [float(((rows[:, who] - truth) ** 2).mean()) for who in range(3)]
    reliability, error = _reliability(rows[:, 0], truth)
    error_class = _reliability(rows[:, 1], truth)[1]
    return Question(
        name, len(rows), float(truth.mean()), losses[0], losses[1], losses[2], scores[0], scores[1], scores[2],
        error, error_class, reliability,
    )  # fmt: skip


def _log_loss(said: F8, truth: F8) -> float:
    said = np.clip(said, _SMALLEST, 1 - _SMALLEST)
    return float(-(truth * np.log(said) + (1 - truth) * np.log1p(-said)).mean())


def _reliability(said: F8, truth: F8) -> tuple[Reliability, float]:
    edges = np.unique(np.quantile(said, np.arange(1, BANDS) / BANDS))
    place = np.searchsorted(edges, said, side="right")
    count = np.bincount(place)
    kept = count > 0
    count = count[kept]
    predicted, observed = (np.bincount(place, values)[kept] / count for values in (said, truth))
    error = float((count * np.abs(predicted - observed)).sum() / len(said))
    return Reliability(tuple(predicted.tolist()), tuple(observed.tolist()), tuple(count.tolist())), error
