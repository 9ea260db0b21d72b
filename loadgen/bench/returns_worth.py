"""What knowing returns is worth in goodput: ``tidegate bench returns --goodput``.

The same tables of held-out configurations with agents or chats, whose sessions end silently, run three times under
each of two controls with deadline-aware admission: expecting the class's running median, expecting what the estimator
said at each turn's end (taught on other tables; it never sees a return before it happens), and knowing the truth. The
controls are the heuristic, and a fixed rho with the engine's own watermark: so what is known can be told from what the
slow control makes of it with its one action a step. Think times follow one law for all sessions of a class, as the
built-in workloads have it; given a session trace, agents take those of its validation sessions instead, and the
estimator learns from the training ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from loadgen.fleets import Configuration, held_out_configurations, tables_for, unit_factor
from loadgen.policies import PolicySpec, policy_named, with_admission
from loadgen.replay import replay
from loadgen.requests import RequestTable
from loadgen.returns_training import ENDED_CHANCE, Waits, told, waits_in, waits_of, walk, with_gaps_of
from loadgen.traces import read, session_split
from schemas.classes import ServiceClass
from services.actuator.memory.returns import ReturnEstimator


def _deadline(name: str, watermark: bool) -> PolicySpec:
    spec = with_admission(policy_named(name), "deadline")
    return msgspec.structs.replace(spec, mode=msgspec.structs.replace(spec.mode, watermark=watermark))


NAMES: Final = (
    "a100-2x8b-chat-agent",
    "a100-3x8b-small-host",
    "h100-2x14b-small-slow",
    "h200-3x8b-agents-slow",
)
SEEDS: Final = (11, 12, 13)
TEACHING_SEED: Final = 1_000_011
TEACHING_S: Final = 3600.0
DURATION_S: Final = 600.0
DRAWS: Final = 4000
Source = Literal["median", "table", "oracle"]
CONTROLS: Final = {"heuristic": _deadline("heuristic", False), "rho 1.3, watermark": _deadline("fixed:1.3", True)}
SOURCES: Final[tuple[Source, ...]] = ("median", "table", "oracle")


class Ratio(msgspec.Struct, frozen=True):
    """Geometric mean over pairs of runs on the same tables, with its 95 % interval (paired bootstrap)."""

    ratio: float
    ci95: tuple[float, float]


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """Goodput of the sources of expected returns on one configuration, or on all."""

    name: str
    pairs: int
    median_tokens_per_s: float
    table_tokens_per_s: float
    oracle_tokens_per_s: float
    table_over_median: Ratio
    oracle_over_median: Ratio
    told_ended: float
    """Share of turns after which the estimator took the session for ended."""
    wrongly_ended: float
    """Share of turns that were followed by another, among those."""


class ControlWorth(msgspec.Struct, frozen=True, kw_only=True):
    """Under one control. ``whole``: over all configurations and seeds."""

    control: str
    whole: Worth
    configurations: tuple[Worth, ...]


class WorthReport(msgspec.Struct, frozen=True, kw_only=True):
    """``gaps``: whose think times the agents have."""

    gaps: str
    duration_s: float
    seeds: tuple[int, ...]
    controls: tuple[ControlWorth, ...]


@dataclasses.dataclass(frozen=True)
class _Run:
    """``goodput`` by control and source."""

    goodput: dict[tuple[str, Source], float]
    turns: int
    ended: int
    wrongly: int


def returns_worth(
    trace: Path | None = None,
    *,
    seeds: Sequence[int] = SEEDS,
    duration_s: float = DURATION_S,
    names: Sequence[str] = NAMES,
    ended_chance: float = ENDED_CHANCE,
) -> WorthReport:
    """The comparison. UserError (TraceError) for the trace, as :func:`loadgen.traces.read`."""
    learned = held = None
    if trace is not None:
        learned, held = (_as_agents(waits_of(part)) for part in session_split(read(trace)))
    configurations = [one for one in held_out_configurations() if one.name in names]
    runs: dict[str, list[_Run]] = {}
    for configuration in configurations:
        estimator = _taught(configuration, learned)
        for seed in seeds:
            tables = _tables(configuration, seed, duration_s, held)
            runs.setdefault(configuration.name, []).append(
                _run(configuration, tables, estimator, duration_s, ended_chance)
            )
    return WorthReport(
        gaps="one law" if trace is None else trace.name,
        duration_s=duration_s,
        seeds=tuple(seeds),
        controls=tuple(
            ControlWorth(
                control=control,
                whole=_worth("all", control, [run for some in runs.values() for run in some]),
                configurations=tuple(_worth(name, control, some) for name, some in runs.items()),
            )
            for control in CONTROLS
        ),
    )


def _tables(configuration: Configuration, seed: int, duration_s: float, gaps: Waits | None) -> list[RequestTable]:
    tables = tables_for(configuration, seed, duration_s, unit_factor(configuration))
    if gaps is None:
        return tables
    agents = int(ServiceClass.AGENT)
    rng = np.random.default_rng([seed, 4])
    return [with_gaps_of(one, gaps, rng) if (one.service_class == agents).all() else one for one in tables]


def _as_agents(waits: Waits) -> Waits:
    """Whatever the trace's class, it is agents who take its gaps."""
    return dataclasses.replace(waits, kind=np.full(len(waits), int(ServiceClass.AGENT), dtype=np.int64))


def _taught(configuration: Configuration, learned: Waits | None) -> ReturnEstimator:
    """An estimator that saw an hour of the configuration's requests of another seed; agents' gaps from the trace's
    training sessions where there is one."""
    estimator = ReturnEstimator()
    parts = [waits_in(one, TEACHING_S) for one in _tables(configuration, TEACHING_SEED, TEACHING_S, None)]
    if learned is not None:
        parts = [one for one in parts if not (one.kind == int(ServiceClass.AGENT)).all()] + [learned]
    for part in parts:
        walk(estimator, part)
        estimator = estimator.with_kinds_only(estimator.settings)  # each part has sessions and a clock of its own
    return estimator


def _run(
    configuration: Configuration,
    tables: Sequence[RequestTable],
    taught: ReturnEstimator,
    duration_s: float,
    ended_chance: float,
) -> _Run:
    asked = [told(taught.with_kinds_only(taught.settings), one, ended_chance) for one in tables]
    goodput: dict[tuple[str, Source], float] = {}
    for control, spec in CONTROLS.items():
        for source in SOURCES:
            policy = msgspec.structs.replace(spec, mode=msgspec.structs.replace(spec.mode, returns=source))
            told_of = replay(configuration.fleet, asked, policy, duration_s).summary
            goodput[control, source] = told_of.goodput_tokens_per_s
    expected = [(one.expected_think_s, one.next_turn) for one in asked if one.expected_think_s is not None]
    ended = sum(int(np.isinf(said).sum()) for said, _ in expected)
    wrongly = sum(int((np.isinf(said) & (following >= 0)).sum()) for said, following in expected)
    return _Run(goodput, sum(map(len, asked)), ended, wrongly)


def _ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    logs = np.log(np.array(above) / np.array(below))
    drawn = np.random.default_rng(0).choice(logs, (DRAWS, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, (0.025, 0.975)))
    return Ratio(float(np.exp(logs.mean())), (float(low), float(high)))


def _worth(name: str, control: str, runs: Sequence[_Run]) -> Worth:
    goodput = {source: [run.goodput[control, source] for run in runs] for source in SOURCES}
    ended = sum(run.ended for run in runs)
    return Worth(
        name=name,
        pairs=len(runs),
        median_tokens_per_s=float(np.mean(goodput["median"])),
        table_tokens_per_s=float(np.mean(goodput["table"])),
        oracle_tokens_per_s=float(np.mean(goodput["oracle"])),
        table_over_median=_ratio(goodput["table"], goodput["median"]),
        oracle_over_median=_ratio(goodput["oracle"], goodput["median"]),
        told_ended=ended / max(sum(run.turns for run in runs), 1),
        wrongly_ended=sum(run.wrongly for run in runs) / max(ended, 1),
    )


def render(report: WorthReport) -> list[str]:
    """The comparison as lines."""
    lines = [
        f"worth in goodput: gaps of {report.gaps}, {len(report.seeds)} seeds x {report.duration_s:,.0f} s, "
        "deadline-aware admission, silent ends"
    ]
    for told_of in report.controls:
        lines.append(
            f"{told_of.control:<26}{'median tok/s':>13}{'estimator / median':>24}{'oracle / median':>24}"
            f"{'told ended':>12}{'wrongly':>9}"
        )
        for one in (*told_of.configurations, told_of.whole):
            lines.append(
                f"{one.name:<26}{one.median_tokens_per_s:>13,.0f}{_shown(one.table_over_median):>24}"
                f"{_shown(one.oracle_over_median):>24}{one.told_ended:>12.1%}{one.wrongly_ended:>9.1%}"
            )
    return lines


def _shown(ratio: Ratio) -> str:
    return f"{ratio.ratio:.3f} [{ratio.ci95[0]:.3f}, {ratio.ci95[1]:.3f}]"
