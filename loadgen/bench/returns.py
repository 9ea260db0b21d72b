"""``tidegate bench returns``: how well return times are estimated, on what the estimator never saw.

Twice: on *other sessions* (kinds are learned from the training sessions, the validation sessions are walked), and
*later* (kinds are learned from the first part of the trace's time, the rest is examined; sessions that go on keep
their history). The estimator is asked as each wait begins what only the past tells: at idle ages from 0 to 10 min,
will the session be back within 10 s, 1 min, 10 min, and has it ended? Beside it the class's own rates without
history, and the class's median with the plainest law that has it (exponential, nobody ends). The oracle knows: its
losses are 0.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.bench.returns_scores import Question, factor, questions
from loadgen.returns_training import (
    Waits,
    client_waits,
    cut_of,
    is_client_rates,
    teaching_sessions,
    waits_of,
    walk,
)
from loadgen.traces import read, session_split
from loadgen.workload import Workload, builtin
from services.actuator.memory import return_rates
from services.actuator.memory.return_rates import HORIZON_S
from services.actuator.memory.returns import ReturnEstimator, ReturnSettings
from services.errors import UserError

F8 = NDArray[np.float64]

BUILTIN_S: Final = 4 * 3600.0
"""Of the built-in agent workload: some 60 sessions to examine."""
CLIENT_DAYS: Final = 6.0
CLIENT_RATE_PER_S: Final = 0.1


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


class ReturnReport(Examined, frozen=True, kw_only=True):
    """Calibration of the estimator on a session trace: other sessions at the top, the later part beside it."""

    trace: str
    later: Examined | None = None


def bench_returns(trace: Path | None = None, *, seed: int = 1) -> ReturnReport:
    """The report on a trace's sessions, or on the built-in agent workload's, or on calls drawn from a table of
    clients' rates (which has days, so that the hours of the day can show).

    The built-in one draws its gaps from one law for all sessions: there the class's own rates are the best answer
    and the estimator can at most come level. UserError (TraceError for the file) as :func:`return_report`.
    """
    if trace is None:
        return return_report(builtin("agent", BUILTIN_S, seed=seed))
    if is_client_rates(trace):
        return client_report(trace, seed=seed)
    return return_report(trace)


def return_report(trace: Path | str | Workload, settings: ReturnSettings | None = None) -> ReturnReport:
    """Examine on other sessions (number % 5: 0 to 2 teach, 3 is asked about) and on the later part of the time of
    both. UserError when a part is empty or when nobody comes back."""
    settings = settings or ReturnSettings()
    whole = trace if isinstance(trace, Workload) else read(trace)
    train, held = session_split(whole)
    for name, part in (("training", train), ("validation", held)):
        if not len(part):
            raise UserError(f"{whole.name}: found no {name} session, expected some")
    learned, asked = waits_of(train), waits_of(held)
    seen = ReturnEstimator(settings)
    walk(seen, learned)
    others = seen.with_kinds_only(msgspec.structs.replace(settings, learn_kinds=False))
    unseen = _examined(f"{whole.name}: validation", "other sessions", others, learned, asked, asked.at_s.min())
    return ReturnReport(
        trace=whole.name,
        later=later_report(whole.name, waits_of(teaching_sessions(whole)), settings),
        **{name: getattr(unseen, name) for name in Examined.__struct_fields__},
    )


def later_report(name: str, waits: Waits, settings: ReturnSettings) -> Examined:
    """Learn on the first part of the time, examine on the rest. UserError when nobody comes back in it."""
    cut_s = cut_of(waits)
    estimator = ReturnEstimator(settings)
    walk(estimator, waits, until_s=cut_s)
    estimator.freeze_kinds()
    learned = dataclasses.replace(waits.take(np.flatnonzero(waits.at_s < cut_s)), end_s=cut_s)
    return _examined(f"{name}: later", "later", estimator, learned, waits, cut_s)


def client_report(path: Path, seed: int = 1) -> ReturnReport:
    """The report on calls drawn from clients' recorded rates, later days only; with the gain that the hours bring."""
    waits = client_waits(path, CLIENT_DAYS, CLIENT_RATE_PER_S, seed)
    told = later_report(path.name, waits, ReturnSettings())
    plain = later_report(path.name, waits, ReturnSettings(hours=False))
    fields = {name: getattr(told, name) for name in Examined.__struct_fields__}
    fields |= {"log_loss_with_hours": _mean_loss(told), "log_loss_without_hours": _mean_loss(plain)}
    return ReturnReport(trace=path.name, **fields)


def _mean_loss(examined: Examined) -> float:
    return float(np.mean([one.log_loss for one in examined.questions if one.name.startswith("back within")]))


def _examined(
    what: str, split: str, estimator: ReturnEstimator, learned: Waits, waits: Waits, from_s: float
) -> Examined:
    """Walk the waits that begin at ``from_s`` or later and put the questions."""
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
        questions=questions(asked, rates, np.array([kinds[kind] for kind in asked.kind.tolist()]), median_s),
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


def render(report: ReturnReport) -> list[str]:
    """The report as lines: for each split gap errors, each question with its losses, one reliability line."""
    lines = [f"return times on {report.trace}"]
    for part in (report, report.later):
        lines += [] if part is None else _rendered(part)
    return lines


def _rendered(part: Examined) -> list[str]:
    lines = [
        f"{part.split}: {part.train_waits:,} waits learned, {part.validate_waits:,} of {part.validate_sessions:,} "
        "sessions examined",
        f"gap: median error {part.gap_error_s:.1f} s (factor {part.gap_factor:.2f}), class median "
        f"{part.gap_error_class_s:.1f} s (factor {part.gap_factor_class:.2f}), oracle 0",
        f"{'':<20}{'':>8}{'':>7} | {'log-loss (oracle 0)':^26} | {'Brier (oracle 0)':^26} | {'calibration':>15}",
        f"{'question':<20}{'asked':>8}{'true':>7} | {'estimator':>10}{'class':>8}{'median':>8} | {'estimator':>10}"
        f"{'class':>8}{'median':>8} | {'error':>7}{'class':>8}",
    ]
    lines += [
        f"{one.name:<20}{one.asked:>8,}{one.base_rate:>7.3f} | {one.log_loss:>10.4f}{one.log_loss_class:>8.4f}"
        f"{one.log_loss_median:>8.3f} | {one.brier:>10.4f}{one.brier_class:>8.4f}{one.brier_median:>8.4f} | "
        f"{one.error:>7.4f}{one.error_class:>8.4f}"
        for one in part.questions
    ]
    if part.log_loss_with_hours is not None and part.log_loss_without_hours is not None:
        lines.append(
            f"mean log-loss with the hour of the day {part.log_loss_with_hours:.4f}, "
            f"without {part.log_loss_without_hours:.4f}"
        )
    if part.hour_factors:
        lines.append("hour of the day, factors: " + " ".join(f"{factor:.2f}" for factor in part.hour_factors))
    else:
        lines.append("hour of the day: no effect that the data shows")
    lines.append("reliability, tenths of the answers, said -> came true")
    for one in part.questions:
        pairs = zip(one.reliability.predicted, one.reliability.observed, strict=True)
        lines.append(f"  {one.name:<20}" + "  ".join(f"{said:.2f}->{true:.2f}" for said, true in pairs))
    return lines
