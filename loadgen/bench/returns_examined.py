"""The return estimator on one split of a trace: walked along what it never saw, asked as each wait begins."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.bench.returns_scores import Question, factor, questions
from loadgen.returns_training import Waits, walk
from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import HORIZON_S
from services.actuator.memory.returns import ReturnEstimator
from services.errors import UserError

F8 = NDArray[np.float64]


class Examined(msgspec.Struct, frozen=True, kw_only=True):
    """The estimator on one split. Gap errors are medians over returns, of |estimate - gap| in seconds and of the
    factor between them (1.0 = exact)."""

    split: str
    train_waits: int
    validate_waits: int
    validate_sessions: int
    questions: tuple[Question, ...]
    gap_error_s: float
    gap_error_class_s: float
    gap_factor: float
    gap_factor_class: float
    log_loss_without_hours: float | None = None
    """Mean over the questions of those "back within"; beside ``log_loss_with_hours``."""
    log_loss_with_hours: float | None = None
    hour_factors: tuple[float, ...] = ()
    """Of the class with the most waits, by hour of the day; empty where no hour shows an effect."""


def examined(
    what: str,
    split: str,
    estimator: ReturnEstimator,
    learned: Waits,
    waits: Waits,
    from_s: float,
    *,
    asked_again: bool = True,
) -> Examined:
    """Walk the waits that begin at ``from_s`` or later and put the questions, each with what is known when it is put;
    not ``asked_again``: with what was known at the turn's end. UserError when nobody comes back."""
    medians = _medians(learned)
    rows: list[int] = []
    mine: list[F8] = []
    kinds = {kind: estimator.kind_rates(kind) for kind in np.unique(waits.kind).tolist()}  # they are frozen

    def ask(row: int) -> None:
        rows.append(row)
        mine.append(estimator.waiting_rates(int(waits.session[row])))

    walk(estimator, waits, from_s=from_s, ask=ask)
    here = np.array(rows, dtype=np.int64)
    asked = waits.take(here)
    back = (asked.gap_s <= HORIZON_S) & (asked.gap_s <= asked.watched_s)
    if not back.any():
        raise UserError(f"{what}: found no validation session with a second turn, expected some")
    median_s = np.array([medians.get(kind, 60.0) for kind in asked.kind.tolist()])
    rates = np.array(mine)
    guess_s = return_rates.quantile(rates[back], np.zeros(int(back.sum())), 0.5)
    busiest = int(np.bincount(asked.kind).argmax())
    hours = estimator.hour_factors(busiest)
    return Examined(
        split=split,
        train_waits=len(learned),
        validate_waits=len(asked),
        validate_sessions=len(np.unique(asked.session)),
        questions=questions(
            asked,
            rates,
            np.array([kinds[kind] for kind in asked.kind.tolist()]),
            median_s,
            asked_again=asked_again,
        ),
        gap_error_s=float(np.median(np.abs(guess_s - asked.gap_s[back]))),
        gap_error_class_s=float(np.median(np.abs(median_s[back] - asked.gap_s[back]))),
        gap_factor=factor(guess_s, asked.gap_s[back]),
        gap_factor_class=factor(median_s[back], asked.gap_s[back]),
        hour_factors=tuple(hours.tolist()) if (hours != 1.0).any() else (),
    )


def _medians(waits: Waits) -> dict[int, float]:
    """Median gap by kind, of returns within the horizon and the trace."""
    back = (waits.gap_s <= HORIZON_S) & (waits.gap_s <= waits.watched_s)
    kinds = np.unique(waits.kind[back]).tolist()
    return {kind: float(np.median(waits.gap_s[back & (waits.kind == kind)])) for kind in kinds}
