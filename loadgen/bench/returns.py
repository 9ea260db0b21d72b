"""``tidegate bench returns``: how well return times are estimated, on sessions that the estimator never saw.

The estimator learns kinds (service classes) from the training sessions, then walks the validation sessions and
is asked before each return what only the past tells: at idle ages from 0 to 10 min, will the session be back
within 10 s, 1 min, 10 min, and has it ended? Beside it the class alone: the same rates without the session's
history, the training median as the expected gap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.requests import NO_TURN
from loadgen.traces import read, session_split
from loadgen.workload import Workload, builtin
from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import HORIZON_S
from services.actuator.memory.returns import ReturnEstimator, ReturnSettings
from services.errors import UserError

F8 = NDArray[np.float64]

AGES_S: Final = (0.0, 5.0, 30.0, 120.0, 600.0)
WINDOWS_S: Final = (10.0, 60.0, 600.0)
BANDS: Final = 10
BUILTIN_S: Final = 4 * 3600.0
"""Of the built-in agent workload: some 60 sessions to examine."""
_SMALLEST: Final = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Wait:
    """One gap of a session: ``gap_s`` inf when no turn followed."""

    session: int
    kind: int
    gap_s: float


class Band(msgspec.Struct, frozen=True):
    """Predictions between two tenths: how many, what they said on average, what came true."""

    low: float
    high: float
    count: int
    predicted: float
    observed: float


class Question(msgspec.Struct, frozen=True):
    """One yes-or-no question asked many times. ``error``: mean distance of said and true over the bands,
    weighted by their counts; losses in nats an answer, the class's beside the estimator's."""

    name: str
    asked: int
    base_rate: float
    log_loss: float
    log_loss_class: float
    error: float
    error_class: float
    bands: tuple[Band, ...]


class ReturnReport(msgspec.Struct, frozen=True):
    """Calibration of the estimator on a session trace. Gap errors are medians over returns, of
    |estimate - gap| in seconds and of the factor between them (1.0 = exact)."""

    trace: str
    train_waits: int
    validate_waits: int
    validate_sessions: int
    questions: tuple[Question, ...]
    gap_error_s: float
    gap_error_class_s: float
    gap_factor: float
    gap_factor_class: float


def waits(workload: Workload) -> Iterator[Wait]:
    """The gaps of a workload, session by session, each in its order and ending with the last turn's (inf)."""
    table = workload.in_order().requests
    last = table.next_turn == NO_TURN
    gaps_s = np.where(last, np.inf, table.think_s)
    for session, kind, gap_s in zip(table.session.tolist(), table.service_class.tolist(), gaps_s.tolist(), strict=True):
        yield Wait(session, kind, gap_s)


def taught(waits_seen: Iterator[Wait], settings: ReturnSettings) -> tuple[ReturnEstimator, F8]:
    """An estimator that saw these waits, one session after another, and the gaps, float64 [returns]."""
    estimator = ReturnEstimator(settings)
    gaps_s = []
    for wait in waits_seen:
        estimator.finished(wait.session, wait.kind, 0.0)
        if wait.gap_s > HORIZON_S:
            estimator.closed(wait.session, HORIZON_S)
        else:
            estimator.returned(wait.session, wait.gap_s)
            gaps_s.append(wait.gap_s)
    return estimator, np.array(gaps_s)


def bench_returns(trace: Path | None = None, *, seed: int = 1) -> ReturnReport:
    """The report on a trace's sessions, or on the built-in agent workload's.

    The built-in one draws its gaps from one law for all sessions: there the class's own rates are the best answer
    and the estimator can at most come level. UserError (TraceError for the file) as :func:`return_report`.
    """
    return return_report(builtin("agent", BUILTIN_S, seed=seed) if trace is None else trace)


def return_report(
    trace: Path | str | Workload, settings: ReturnSettings | None = None, validate: Workload | None = None
) -> ReturnReport:
    """Learn on the training sessions of a session table and examine on the validation ones (session number % 5:
    0 to 2 and 3). With ``validate`` given, ``trace`` is a training workload. UserError when a part is empty or when
    nobody comes back."""
    settings = settings or ReturnSettings()
    whole = trace if isinstance(trace, Workload) else read(trace)
    train, held = session_split(whole) if validate is None else (whole, validate)
    for name, part in (("training", train), ("validation", held)):
        if not len(part):
            raise UserError(f"{whole.name}: found no {name} session, expected some")
    seen, gaps_s = taught(waits(train), settings)
    frozen = msgspec.structs.replace(settings, learn_kinds=False)
    full = seen.with_kinds_only(frozen)
    median_s = float(np.median(gaps_s)) if len(gaps_s) else 0.0
    asked, mine, kinds = list(waits(held)), [], []
    for wait in asked:
        full.finished(wait.session, wait.kind, 0.0)
        mine.append(full.waiting_rates(wait.session))
        kinds.append(full.kind_rates(wait.kind))
        if wait.gap_s > HORIZON_S:
            full.closed(wait.session, HORIZON_S)
        else:
            full.returned(wait.session, wait.gap_s)
    truth_s = np.array([wait.gap_s for wait in asked])
    rates = np.array(mine)
    back = truth_s <= HORIZON_S
    if not back.any():
        raise UserError(f"{whole.name}: found no validation session with a second turn, expected some")
    guess_s = return_rates.quantile(rates[back], np.zeros(int(back.sum())), 0.5)
    return ReturnReport(
        trace=whole.name,
        train_waits=len(train),
        validate_waits=len(asked),
        validate_sessions=len({wait.session for wait in asked}),
        questions=_questions(truth_s, rates, np.array(kinds)),
        gap_error_s=float(np.median(np.abs(guess_s - truth_s[back]))),
        gap_error_class_s=float(np.median(np.abs(median_s - truth_s[back]))),
        gap_factor=_factor(guess_s, truth_s[back]),
        gap_factor_class=_factor(np.full_like(guess_s, median_s), truth_s[back]),
    )


def render(report: ReturnReport) -> list[str]:
    """The report as lines: gap errors, each question with its losses, one reliability table."""
    lines = [
        f"return times on {report.trace}: {report.train_waits:,} waits learned, {report.validate_waits:,} of "
        f"{report.validate_sessions:,} other sessions examined",
        f"gap: median error {report.gap_error_s:.1f} s (factor {report.gap_factor:.2f}), class median "
        f"{report.gap_error_class_s:.1f} s (factor {report.gap_factor_class:.2f})",
        f"{'question':<30}{'asked':>8}{'true':>8}{'log-loss':>10}{'class':>8}{'error':>8}{'class':>8}",
    ]
    lines += [
        f"{one.name:<30}{one.asked:>8,}{one.base_rate:>8.3f}{one.log_loss:>10.4f}{one.log_loss_class:>8.4f}"
        f"{one.error:>8.4f}{one.error_class:>8.4f}"
        for one in report.questions
    ]
    for one in report.questions:
        lines.append(f"{one.name}: said / came true / count")
        lines += [f"  {b.low:.1f}-{b.high:.1f}: {b.predicted:.3f} / {b.observed:.3f} / {b.count:,}" for b in one.bands]
    return lines


def _questions(gaps_s: F8, rates: F8, kind_rates: F8) -> tuple[Question, ...]:
    """Put every question that can be put while the sessions are away. Gaps float64 [n], rates float64 [n, BINS]."""
    answers: dict[str, list[F8]] = {}
    for age_s in AGES_S:
        away = gaps_s > age_s
        ages_s = np.full(int(away.sum()), age_s)
        for window_s in WINDOWS_S:
            said = [return_rates.within(table[away], ages_s, np.full_like(ages_s, window_s))
                    for table in (rates, kind_rates)]  # fmt: skip
            truth = gaps_s[away] <= age_s + window_s
            answers.setdefault(f"back within {window_s:g} s", []).append(np.stack([*said, truth], axis=1))
        said = [return_rates.ended(table[away], ages_s) for table in (rates, kind_rates)]
        answers[f"ended, after {age_s:g} s"] = [np.stack([*said, gaps_s[away] > HORIZON_S], axis=1)]
    return tuple(_question(name, np.concatenate(parts)) for name, parts in answers.items() if sum(map(len, parts)))


def _factor(guess_s: F8, gap_s: F8) -> float:
    """Median factor between estimates and gaps; those below half a second count as half a second."""
    return float(np.exp(np.median(np.abs(np.log(np.maximum(guess_s, 0.5)) - np.log(np.maximum(gap_s, 0.5))))))


def _question(name: str, rows: F8) -> Question:
    """Figures of answers float64 [n, 3]: the estimator's chance, the class's, what came true."""
    truth = rows[:, 2]
    bands, error = _bands(rows[:, 0], truth)
    return Question(
        name=name,
        asked=len(rows),
        base_rate=float(truth.mean()),
        log_loss=_log_loss(rows[:, 0], truth),
        log_loss_class=_log_loss(rows[:, 1], truth),
        error=error,
        error_class=_bands(rows[:, 1], truth)[1],
        bands=bands,
    )


def _log_loss(said: F8, truth: F8) -> float:
    said = np.clip(said, _SMALLEST, 1 - _SMALLEST)
    return float(-(truth * np.log(said) + (1 - truth) * np.log1p(-said)).mean())


def _bands(said: F8, truth: F8) -> tuple[tuple[Band, ...], float]:
    place = np.minimum((said * BANDS).astype(np.int64), BANDS - 1)
    bands, distance = [], 0.0
    for band in np.unique(place).tolist():
        here = place == band
        predicted, observed = float(said[here].mean()), float(truth[here].mean())
        bands.append(Band(band / BANDS, (band + 1) / BANDS, int(here.sum()), predicted, observed))
        distance += float(here.sum()) * abs(predicted - observed)
    return tuple(bands), distance / len(said)
