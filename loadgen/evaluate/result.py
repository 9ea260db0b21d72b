"""The examination's result: the figures by policy and admission, and the comparisons that the project claims.

Every comparison is paired over traces. ``dqn`` stands against the heuristic under the *same* admission, so that what
admission order, cap and shedding bring is not credited to learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from loadgen.evaluate import bootstrap
from loadgen.evaluate.bootstrap import Ratio
from loadgen.evaluate.matrix import BASELINE, SYSTEM_ADMISSION, WITHOUT_CAP
from loadgen.evaluate.rows import HELD_S, Row, pooled_percentile
from loadgen.evaluate.table import Name, Table

T = TypeVar("T")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One policy under one admission."""

    goodput_tokens_per_s: float
    """Of a card: tokens of requests that met their limits."""
    ci95: tuple[float, float]
    hbm_utilisation: float
    queue_wait_p99_s: float | None
    """Over all requests of all its runs; None: there were none."""
    tpot_p99_ms: float | None
    preemptions: int
    oom: int
    oom_upper_bound_per_week: float
    """95 % bound on crashes a week of one worker."""


class More(msgspec.Struct, frozen=True, kw_only=True):
    """What the report says beside :class:`Figures`."""

    tokens_per_s: float
    slo_token_share: float
    cost: float | None
    """Card-seconds per token within the SLO, static first-come = 100."""
    shed: int
    actions: list[int]
    worker_steps: int


class Regime(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration."""

    configuration: str
    load: float
    policies: dict[str, dict[str, Figures]]


class Worst(msgspec.Struct, frozen=True):
    """The configuration of the lowest ratio; the interval is that of its own ratio."""

    ratio: float
    ci95: tuple[float, float]
    configuration: str


class System(msgspec.Struct, frozen=True, kw_only=True):
    """The whole of Tidegate over vLLM-like with offload."""

    vs_vllm_offload_fcfs: Ratio
    """Clients wait for ever, on both sides."""
    vs_vllm_offload_timeouts: Ratio
    """Clients give up, on both sides."""
    vs_vllm_offload_equal_admission: Ratio
    """The baseline has Tidegate's order, cap and shedding too."""
    worst_configuration: Worst
    """With client timeouts."""
    policy: str


class OfSeed(msgspec.Struct, frozen=True):
    """A training seed's network over the universal heuristic with cap."""

    ratio: float
    ci95: tuple[float, float]
    seed: int | None


class Dqn(msgspec.Struct, frozen=True, kw_only=True):
    """The learned policy over its references, each under the same admission."""

    seeds: list[OfSeed]
    vs_universal: Ratio
    """Both with deadline order and shedding, without the running cap."""
    vs_universal_with_cap: Ratio
    worst_configuration: Worst
    """Over the universal heuristic with cap."""
    vs_tuned_per_configuration: Ratio
    vs_hindsight: Ratio


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What ``tidegate evaluate --json`` writes."""

    policies: dict[str, dict[str, Figures]]
    system: System
    dqn: Dqn | None
    """None: no network was examined."""
    regimes: list[Regime]
    about: dict[str, str]
    """What was sampled, and how to read it."""
    more: dict[str, dict[str, More]]
    ablations: dict[str, Ratio]
    """Each over the policy that it was taken from."""


def result(table: Table, loads: dict[str, float], about: dict[str, str], seeds: Sequence[int | None] = ()) -> Result:
    """The result of a table; ``loads`` of its configurations, training ``seeds`` of the networks, the first first."""
    names = [name for name in table.names if name.timeouts]
    system = _system(table)
    return Result(
        policies=_nested({name: _figures(_flat(table, name), table, name) for name in names}),
        system=system,
        dqn=_dqn(table, seeds) if Name("dqn", SYSTEM_ADMISSION) in table.names else None,
        regimes=[
            _regime(table, c, loads, [name for name in names if plain(name.policy)])
            for c in range(len(table.configurations))
        ],
        about=about,
        more=_nested({name: _more(table, name) for name in names}),
        ablations={
            name.policy: ratio_of(table, name, Name(name.policy.partition("-")[0], name.admission))
            for name in names
            if "-" in name.policy
        },
    )


def plain(policy: str) -> bool:
    """Not one of the grids that others are chosen from, nor an ablation: those stand in the table of all alone."""
    return ":" not in policy and "-" not in policy


def ratio_of(table: Table, ours: Name, theirs: Name) -> Ratio:
    """Goodput of one over another, over all configurations."""
    return bootstrap.ratio(table.values(ours), table.values(theirs))


def by_configuration(table: Table, ours: Name, theirs: Name) -> list[Worst]:
    """The same for each configuration by itself, in the table's order."""
    a, b = table.values(ours), table.values(theirs)
    found = [bootstrap.ratio(a[c : c + 1], b[c : c + 1]) for c in range(len(a))]
    return [Worst(one.ratio, one.ci95, name) for one, name in zip(found, table.configurations, strict=True)]


def system_policy(table: Table) -> str:
    """What ships: the network where its interval over the universal heuristic with cap lies above 1, else the
    heuristic."""
    ours, rules = Name("dqn", SYSTEM_ADMISSION), Name("heuristic", SYSTEM_ADMISSION)
    return "dqn" if ours in table.names and ratio_of(table, ours, rules).ci95[0] > 1.0 else "heuristic"


def _system(table: Table) -> System:
    policy = system_policy(table)
    ours, theirs = Name(policy, SYSTEM_ADMISSION), Name(BASELINE, "fcfs")
    return System(
        vs_vllm_offload_fcfs=ratio_of(table, ours._replace(timeouts=False), theirs._replace(timeouts=False)),
        vs_vllm_offload_timeouts=ratio_of(table, ours, theirs),
        vs_vllm_offload_equal_admission=ratio_of(table, ours, Name(BASELINE, SYSTEM_ADMISSION)),
        worst_configuration=_worst(by_configuration(table, ours, theirs)),
        policy=policy,
    )


def _dqn(table: Table, seeds: Sequence[int | None]) -> Dqn:
    ours, rules = Name("dqn", SYSTEM_ADMISSION), Name("heuristic", SYSTEM_ADMISSION)
    networks = [ours, *(Name(f"dqn:{k}", SYSTEM_ADMISSION) for k in range(2, len(seeds) + 1))]
    found = [(ratio_of(table, one, rules), seed) for one, seed in zip(networks, seeds or [None], strict=True)]
    return Dqn(
        seeds=[OfSeed(one.ratio, one.ci95, seed) for one, seed in found],
        vs_universal=ratio_of(table, Name("dqn", WITHOUT_CAP), Name("heuristic", WITHOUT_CAP)),
        vs_universal_with_cap=ratio_of(table, ours, rules),
        worst_configuration=_worst(by_configuration(table, ours, rules)),
        vs_tuned_per_configuration=ratio_of(table, ours, Name("heuristic_tuned", SYSTEM_ADMISSION)),
        vs_hindsight=ratio_of(table, ours, Name("hindsight", SYSTEM_ADMISSION)),
    )


def _worst(found: list[Worst]) -> Worst:
    return min(found, key=lambda one: one.ratio)


def _regime(table: Table, c: int, loads: dict[str, float], names: Sequence[Name]) -> Regime:
    figures = {name: _figures(table.rows(name)[c], table, name, c) for name in names}
    configuration = table.configurations[c]
    return Regime(configuration=configuration, load=loads[configuration], policies=_nested(figures))


def _figures(rows: list[Row], table: Table, name: Name, c: int | None = None) -> Figures:
    goodput = table.values(name)
    mean = bootstrap.mean(goodput if c is None else goodput[c : c + 1])
    oom = sum(row.oom for row in rows)
    exposure_weeks = sum(row.workers * (row.seconds + HELD_S) for row in rows) / bootstrap.WEEK_S
    return Figures(
        goodput_tokens_per_s=_short(mean.ratio),
        ci95=(_short(mean.ci95[0]), _short(mean.ci95[1])),
        hbm_utilisation=_short(sum(row.hbm_utilisation for row in rows) / len(rows)),
        queue_wait_p99_s=_known(pooled_percentile((row.waits for row in rows), 99.0)),
        tpot_p99_ms=_known(1e3 * pooled_percentile((row.tpots for row in rows), 99.0)),
        preemptions=sum(row.preemptions for row in rows),
        oom=oom,
        oom_upper_bound_per_week=_short(bootstrap.upper_rate(oom, exposure_weeks)),
    )


def _more(table: Table, name: Name) -> More:
    rows = _flat(table, name)
    static = Name("static", "fcfs")
    goodput, offered = (sum(getattr(row, f"{what}_tokens_per_s") for row in rows) for what in ("goodput", "offered"))
    reference = table.values(static).sum() if static in table.names else 0.0
    return More(
        tokens_per_s=_short(sum(row.tokens_per_s for row in rows) / len(rows)),
        slo_token_share=_short(goodput / offered if offered else 1.0),
        cost=_short(100.0 * float(reference) / goodput) if goodput and reference else None,
        shed=sum(row.shed for row in rows),
        actions=[sum(row.actions[k] for row in rows) for k in range(5)],
        worker_steps=sum(row.worker_steps for row in rows),
    )


def _flat(table: Table, name: Name) -> list[Row]:
    return [row for line in table.rows(name) for row in line]


def _known(value: float) -> float | None:
    return None if math.isnan(value) else _short(value)


def _short(value: float) -> float:
    """Six digits: more are noise, and the file is committed."""
    return float(f"{value:.6g}")


def _nested(found: dict[Name, T]) -> dict[str, dict[str, T]]:
    nested: dict[str, dict[str, T]] = {}
    for name, value in found.items():
        nested.setdefault(name.policy, {})[name.admission] = value
    return nested
