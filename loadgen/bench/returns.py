"""``tidegate bench returns``: how well return times are estimated, on what the estimator never saw.

Twice: on *other sessions* (kinds are learned from the training sessions, the validation sessions are walked), and
*later* (kinds are learned from the first part of the trace's time, the rest is examined; sessions that go on keep
their history). The estimator is asked as each wait begins what only the past tells: at idle ages from 0 to 10 min,
will the session be back within 10 s, 1 min, 10 min, and has it ended? Beside it the class's own rates without
history, and the class's median with the plainest law that has it (exponential, nobody ends). The oracle knows: its
losses are 0. Where the trace says how turns ended, the same sessions are examined without that too, and in the other
ways of ``Variant``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from loadgen.bench.returns_examined import Examined, examined
from loadgen.bench.returns_scores import Question
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
from schemas.endings import Ending
from services.actuator.memory.returns import ReturnEstimator, ReturnSettings
from services.errors import UserError

BUILTIN_S: Final = 4 * 3600.0
"""Of the built-in agent workload: some 60 sessions to examine."""
CLIENT_DAYS: Final = 6.0
CLIENT_RATE_PER_S: Final = 0.1


class Variant(msgspec.Struct, frozen=True):
    """The other sessions examined in another way; tuples go with ``returns_scores.WINDOWS_S``. ``top_said`` and
    ``top_true``: what was said in the surest tenth of the answers, and how often it came true."""

    name: str
    log_loss: tuple[float, ...]
    error: tuple[float, ...]
    top_said: tuple[float, ...]
    top_true: tuple[float, ...]


class ReturnReport(Examined, frozen=True, kw_only=True):
    """Calibration of the estimator on a session trace: other sessions at the top, the later part beside it."""

    trace: str
    later: Examined | None = None
    variants: tuple[Variant, ...] = ()
    """Empty where nobody asked, or where the trace does not say how turns ended."""


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
    return return_report(trace, variants=True)


def return_report(
    trace: Path | str | Workload, settings: ReturnSettings | None = None, *, variants: bool = False
) -> ReturnReport:
    """Examine on other sessions (number % 5: 0 to 2 teach, 3 is asked about) and on the later part of the time of
    both; other sessions in all ``variants`` if wanted. UserError when a part is empty or when nobody comes back."""
    settings = settings or ReturnSettings()
    whole = trace if isinstance(trace, Workload) else read(trace)
    train, held = session_split(whole)
    for name, part in (("training", train), ("validation", held)):
        if not len(part):
            raise UserError(f"{whole.name}: found no {name} session, expected some")
    learned, asked = waits_of(train), waits_of(held)
    unseen = _of_others(whole.name, settings, learned, asked)
    return ReturnReport(
        trace=whole.name,
        later=later_report(whole.name, waits_of(teaching_sessions(whole)), settings),
        variants=_variants(whole.name, settings, learned, asked, unseen) if variants else (),
        **{name: getattr(unseen, name) for name in Examined.__struct_fields__},
    )


def _of_others(
    name: str, settings: ReturnSettings, learned: Waits, asked: Waits, *, asked_again: bool = True
) -> Examined:
    seen = ReturnEstimator(settings)
    walk(seen, learned)
    others = seen.with_kinds_only(msgspec.structs.replace(settings, learn_kinds=False))
    from_s = float(asked.at_s.min())
    return examined(f"{name}: validation", "other sessions", others, learned, asked, from_s, asked_again=asked_again)


def _variants(
    name: str, settings: ReturnSettings, learned: Waits, asked: Waits, whole: Examined
) -> tuple[Variant, ...]:
    if learned.ending is None or asked.ending is None:
        return ()
    bare, bare_asked = learned.without_endings(), asked.without_endings()
    plain = msgspec.structs.replace(settings, quick_trust=1.0)
    # Where some turns lack it, that can be telling too; but only of this recorder, so nothing else is told so.
    own, own_asked = (
        dataclasses.replace(waits, ending=np.where(told == Ending.UNKNOWN, Ending.CUT, told).astype(np.uint8))
        for waits, told in ((learned, learned.ending), (asked, asked.ending))
    )
    return (
        _variant("no endings, quick ones at their word", _of_others(name, plain, bare, bare_asked)),
        _variant("no endings", _of_others(name, settings, bare, bare_asked)),
        _variant("endings, quick ones at their word", _of_others(name, plain, learned, asked)),
        _variant("endings", whole),
        _variant(
            "endings, asked at the turn's end only", _of_others(name, settings, learned, asked, asked_again=False)
        ),
        _variant("endings, an empty cell as one of them", _of_others(name, settings, own, own_asked)),
    )


def _variant(name: str, one: Examined) -> Variant:
    asked = _back_within(one)
    return Variant(
        name,
        tuple(question.log_loss for question in asked),
        tuple(question.error for question in asked),
        tuple(question.reliability.predicted[-1] for question in asked),
        tuple(question.reliability.observed[-1] for question in asked),
    )


def later_report(name: str, waits: Waits, settings: ReturnSettings) -> Examined:
    """Learn on the first part of the time, examine on the rest. UserError when nobody comes back in it."""
    cut_s = cut_of(waits)
    estimator = ReturnEstimator(settings)
    walk(estimator, waits, until_s=cut_s)
    estimator.freeze_kinds()
    learned = dataclasses.replace(waits.take(np.flatnonzero(waits.at_s < cut_s)), end_s=cut_s)
    return examined(f"{name}: later", "later", estimator, learned, waits, cut_s)


def client_report(path: Path, seed: int = 1) -> ReturnReport:
    """The report on calls drawn from clients' recorded rates, later days only; with the gain that the hours bring."""
    waits = client_waits(path, CLIENT_DAYS, CLIENT_RATE_PER_S, seed)
    told = later_report(path.name, waits, ReturnSettings())
    plain = later_report(path.name, waits, ReturnSettings(hours=False))
    fields = {name: getattr(told, name) for name in Examined.__struct_fields__}
    fields |= {"log_loss_with_hours": _mean_loss(told), "log_loss_without_hours": _mean_loss(plain)}
    return ReturnReport(trace=path.name, **fields)


def _back_within(one: Examined) -> list[Question]:
    return [question for question in one.questions if question.name.startswith("back within")]


def _mean_loss(one: Examined) -> float:
    return float(np.mean([question.log_loss for question in _back_within(one)]))


def render(report: ReturnReport) -> list[str]:
    """The report as lines: for each split gap errors, each question with its losses, one reliability line."""
    lines = [f"return times on {report.trace}"]
    for part in (report, report.later):
        lines += [] if part is None else _rendered(part)
    if report.variants:
        lines.append("other sessions, back within 10 / 60 / 600 s: log-loss, calibration error, the surest tenth")
    for one in report.variants:
        tops = zip(one.top_said, one.top_true, strict=True)
        lines.append(
            f"  {one.name:<38}{_slashed(one.log_loss)}   {_slashed(one.error)}   "
            + "  ".join(f"{said:.2f}->{true:.2f}" for said, true in tops)
        )
    return lines


def _slashed(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)


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
