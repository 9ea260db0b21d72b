"""`tidegate bench reclaim`: how fast memory goes from one tenant to another, and what is lost on the way.

Unlike tenants share one emulated card; which of them is the busy one shifts, and the next busy one is to have 10 GB
more. Every method meets the same demand, over two allocation orders, beside static shares and perfect packing, where
single blocks go to whoever needs them at no cost. Loads, rules and the static shares were tuned on TUNING_SEEDS; the
figures are of other seeds, pooled. Emulated in Python over real pools and plans; the times are those of the card's
clocks, not of this machine.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from loadgen.bench.reclaim_methods import METHODS, Want
from loadgen.bench.reclaim_run import CARD, GIVEN_BYTES, MODEL, Run, Setup, run_method, run_reference
from loadgen.bench.reclaim_tenants import TENANTS, Demand, demand
from services.errors import UserError

F8 = NDArray[np.float64]

ORDERS: Final = ("lifo", "fullest")
FIRST_BYTES: Final = 1e9
PERIOD_S: Final = 20.0
LOAD: Final = {2: 0.9, 3: 0.8, 4: 0.45}
"""Factor of the tenants' rates by their number: the GPU keeps up, memory is what is short."""
RESERVE_GROUPS: Final = 8
"""Mapped ahead in each tenant: 1.07 GB."""
SHARE_STEP: Final = 0.08
"""The tuning of static shares tries to give this much of the card from one tenant to another."""
TUNING_SEEDS: Final = (0, 1, 2)
REPORTING_SEEDS: Final = (201, 202, 203)
SECONDS: Final = 240.0
SHORTEST_S: Final = 200.0
"""In less hardly anybody comes to want the 10 GB."""
CHECK_EVERY: Final = 200
JUDGED: Final = ("fullest", "compaction_eviction")

Shares = tuple[float, ...]
Runs = dict[tuple[str, str], Run]
"""By (allocation order, method); the references under ("", name)."""
REFERENCES: Final = ("static", "static_hindsight", "perfect")
"""Static shares tuned on TUNING_SEEDS, the same tuned on the very demand they are tried on, perfect packing."""


def bench_reclaim(
    tenants: Sequence[int] = tuple(LOAD),
    seeds: Sequence[int] = REPORTING_SEEDS,
    seconds: float = SECONDS,
    processes: int | None = None,
) -> dict[str, Any]:
    """The figures of ``seeds`` for each number of ``tenants``; UserError for impossible numbers.

    ``cases`` by number of tenants: ``methods`` by allocation order and method, ``static`` and ``perfect`` beside
    them, ``numbers``: what compaction + eviction over page-aware allocation reaches of what is asked. ``processes``
    run side by side, by default one per core.
    """
    for count in tenants:
        if count not in LOAD:
            raise UserError(f"--tenants: found {count}, expected {min(LOAD)} to {max(LOAD)}")
    if not SHORTEST_S <= seconds <= 86_400:
        raise UserError(f"--seconds: found {seconds:g}, expected {SHORTEST_S:g} to 86400")
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds) or set(seeds) & set(TUNING_SEEDS):
        found, tuned = " ".join(map(str, seeds)), " ".join(map(str, TUNING_SEEDS))
        raise UserError(f"--seeds: found {found or 'none'}, expected distinct ones of 0 or more and none of {tuned}")
    began = time.perf_counter()
    cases = [(count, seed) for count in tenants for seed in seeds]
    workers = min(processes or os.cpu_count() or 1, len(cases))
    if workers == 1:
        shares = {count: tuned_shares(count, TUNING_SEEDS, seconds) for count in tenants}
        runs = [run_seed(count, seed, seconds, shares[count]) for count, seed in cases]
    else:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
            tuning = {count: pool.submit(tuned_shares, count, TUNING_SEEDS, seconds) for count in tenants}
            shares = {count: own.result() for count, own in tuning.items()}
            tasks = [pool.submit(run_seed, count, seed, seconds, shares[count]) for count, seed in cases]
            runs = [task.result() for task in tasks]
    by_case = dict(zip(cases, runs, strict=True))
    return {
        "card": CARD,
        "model": MODEL,
        "seconds": seconds,
        "seeds": {"tuning": list(TUNING_SEEDS), "reporting": list(seeds)},
        "cases": {
            str(count): _case(Setup(TENANTS[:count], RESERVE_GROUPS), [by_case[count, s] for s in seeds], seconds)
            | {"load": LOAD[count], "static_shares": [round(share, 3) for share in shares[count]]}
            for count in tenants
        },
        "took_s": round(time.perf_counter() - began, 1),
    }


def _asked(setup: Setup, seconds: float, seed: int) -> Demand:
    backlog_tokens = GIVEN_BYTES / setup.model.kv_bytes_per_token
    return demand(setup.specs, seconds, PERIOD_S, backlog_tokens, LOAD[len(setup.specs)], seed)


def run_seed(tenants: int, seed: int, seconds: float, shares: Shares) -> Runs:
    """All methods and references on one demand."""
    setup = Setup(TENANTS[:tenants], RESERVE_GROUPS)
    asked = _asked(setup, seconds, seed)
    runs = {
        ("", "static"): run_reference(setup, asked, shares, seconds),
        ("", "static_hindsight"): run_reference(setup, asked, tuned_shares(tenants, (seed,), seconds), seconds),
        ("", "perfect"): run_reference(setup, asked, None, seconds),
    }
    for order in ORDERS:
        for method in METHODS:
            runs[order, method.name] = run_method(setup, asked, method, order, seconds, CHECK_EVERY)
    return runs


def tuned_shares(tenants: int, seeds: Sequence[int], seconds: float) -> Shares:
    """The static shares of the most goodput over the demands of ``seeds``.

    From the best of equal shares and shares by the tenants' prompts (plain and damped), one tenant after another
    gives SHARE_STEP to each other one as long as that helps.
    """
    setup = Setup(TENANTS[:tenants], RESERVE_GROUPS)
    demands = [_asked(setup, seconds, seed) for seed in seeds]
    prompts = [
        sum(turn.prompt_tokens for asked in demands for session in asked.sessions[tenant] for turn in session.turns)
        for tenant in range(tenants)
    ]
    tried: dict[Shares, float] = {}

    def score(shares: Shares) -> float:
        if shares not in tried:
            tried[shares] = sum(
                own.good_tokens for asked in demands for own in run_reference(setup, asked, shares, seconds).results
            )
        return tried[shares]

    best = max((_normal([float(max(count, 1)) ** power for count in prompts]) for power in (0.0, 0.5, 1.0)), key=score)
    for giver in range(tenants):
        for taker in range(tenants):
            moved = list(best)
            moved[giver] -= SHARE_STEP
            moved[taker] += SHARE_STEP
            if giver != taker and moved[giver] > 0.5 * SHARE_STEP:
                best = max(best, tuple(moved), key=score)
    return best


def _normal(weights: list[float]) -> Shares:
    return tuple(weight / sum(weights) for weight in weights)


def _case(setup: Setup, seeds: list[Runs], seconds: float) -> dict[str, Any]:
    """Of one number of tenants, pooled over the seeds' runs."""
    pooled = {key: [runs[key] for runs in seeds] for key in seeds[0]}
    static, perfect = pooled["", "static"], pooled["", "perfect"]
    methods: dict[str, dict[str, Any]] = {order: {} for order in ORDERS}
    for (order, name), runs in pooled.items():
        if order:
            over = [_good(run) / max(_good(other), 1.0) for run, other in zip(runs, static, strict=True)]
            methods[order][name] = (
                _memory(runs, setup, seconds)
                | _service(runs, seconds)
                | {
                    "goodput_over_static": _ratio(sum(map(_good, runs)), sum(map(_good, static))),
                    "goodput_over_static_by_seed": [_round(ratio) for ratio in over],
                    "goodput_over_perfect": _ratio(sum(map(_good, runs)), sum(map(_good, perfect))),
                }
            )
    order, name = JUDGED
    return {
        "tenants": [spec.name for spec in setup.specs],
        "capacity_groups": setup.capacity_groups,
        "group_bytes": setup.model.group_bytes,
        "reserve_groups": setup.reserve_groups,
        "ceiling_s": _ceiling_s(setup),
        "methods": methods,
        **{name: _service(pooled["", name], seconds) for name in REFERENCES},
        "numbers": _numbers(methods[order][name]) if name in methods.get(order, {}) else {},
    }


def _good(run: Run) -> float:
    return float(sum(own.good_tokens for own in run.results))


def _service(runs: list[Run], seconds: float) -> dict[str, Any]:
    """What the clients had of it; a request that never got in counts with its wait so far."""
    results = [own for run in runs for own in run.results]
    all_s = seconds * len(runs)
    return {
        "goodput_tokens_per_s": round(sum(own.good_tokens for own in results) / all_s, 1),
        "tokens_per_s": round(sum(own.tokens for own in results) / all_s, 1),
        "wait_s": _spread(np.concatenate([np.array(own.waits_s, np.float64) for own in results])),
        "finished": sum(own.finished for own in results),
        "met": sum(own.met for own in results),
        "gave_up": sum(own.gave_up for own in results),
        "preemptions": sum(own.preemptions for own in results),
    }


def _memory(runs: list[Run], setup: Setup, seconds: float) -> dict[str, Any]:
    """What a method did with the memory.

    Wants that the card's free groups could meet are not counted; one that is still open counts with its time so far.
    Freed is what donors gave for somebody, not what a tenant gave back unasked.
    """
    first = -(-int(FIRST_BYTES) // setup.model.group_bytes)
    wants = [want for run in runs for want in run.wants if want.scarce]
    below = [want for want in wants if want.givable]
    saturated = [want for want in wants if not want.givable]
    freed_groups = sum(run.account.freed_groups for run in runs)
    blocks = freed_groups * setup.blocks_per_group
    return {
        "stranded_share": _round(float(np.concatenate([run.stranded for run in runs]).mean())),
        "footprint": _spread(np.concatenate([run.mapped for run in runs])),
        "footprint_less_reserve": _spread(np.concatenate([run.unreserved for run in runs])),
        "footprint_in_use": _spread(np.concatenate([run.in_use for run in runs])),
        "give_10gb_s": _spread(np.array([_seconds(want, want.groups, seconds) for want in below])),
        "give_10gb_saturated_s": _spread(np.array([_seconds(want, want.groups, seconds) for want in saturated])),
        "first_1gb_s": _spread(np.array([_seconds(want, first, seconds) for want in below])),
        "wants_from_neighbours": len(wants),
        "wants_below_saturation": len(below),
        "wants_open": sum(len(want.ready_s) < want.groups for want in wants),
        "freed_bytes": freed_groups * setup.model.group_bytes,
        "moved_per_byte_freed": _ratio(sum(run.account.moved_blocks for run in runs), blocks),
        "evicted_per_byte_freed": _ratio(sum(run.account.evicted_blocks for run in runs), blocks),
        "mapping_busy": _round(sum(run.mapping_s for run in runs) / (seconds * len(runs))),
    }


def _seconds(want: Want, groups: int, end_s: float) -> float:
    """From the asking until so many groups were usable."""
    ready = sorted(want.ready_s)
    return ready[groups - 1] - want.asked_s if len(ready) >= groups else end_s - want.asked_s


def _ceiling_s(setup: Setup) -> dict[str, float]:
    """What no method can beat: the serial mapping of 10 GB, without and with what the reserve has ready."""
    groups = -(-int(GIVEN_BYTES) // setup.model.group_bytes)
    each_s = setup.costs.map_group_s
    return {
        "map_10gb": _round(groups * each_s),
        "map_10gb_less_reserve": _round((groups - setup.reserve_groups) * each_s),
        "swap_10gb": _round(GIVEN_BYTES / setup.costs.link_bytes_per_s),
        "move_10gb": _round(GIVEN_BYTES / setup.costs.copy_bytes_per_s),
    }


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    """What is asked of the reclaim, found against limit. Footprint counts all that is mapped: groups in use, empty
    ones, those a taker was just given and has not filled yet, and every tenant's reserve."""
    found = {
        "footprint_mean": (row["footprint"]["mean"], 1.05),
        "footprint_p99": (row["footprint"]["p99"], 1.10),
        "footprint_less_reserve_mean": (row["footprint_less_reserve"]["mean"], 1.05),
        "footprint_less_reserve_p99": (row["footprint_less_reserve"]["p99"], 1.10),
        "give_10gb_p50_s": (row["give_10gb_s"]["p50"], 1.4),
        "give_10gb_p99_s": (row["give_10gb_s"]["p99"], 3.0),
        "first_1gb_p50_s": (row["first_1gb_s"]["p50"], 0.1),
        "moved_per_byte_freed": (row["moved_per_byte_freed"], 0.4),
    }
    return {
        name: {"found": value, "limit": limit, "met": value is not None and value <= limit}
        for name, (value, limit) in found.items()
    }


def table(result: dict[str, Any]) -> str:
    """The report as lines of up to 80 columns."""
    seeds = {kind: " ".join(map(str, own)) for kind, own in result["seeds"].items()}
    lines = [
        f"{result['card']}, {result['model']}, {result['seconds']:g} s each; emulated, A100 mapping costs",
        f"tuned on seeds {seeds['tuning']}; figures of seeds {seeds['reporting']}, pooled",
        "footprint: all mapped groups, reserves included, over the packed floor",
        "10 GB, 1 GB: seconds until a neighbour has them, n times, below saturation",
        "moved, evict: per byte freed; good: goodput over the tuned static shares'",
    ]
    for case in result["cases"].values():
        lines += [
            "",
            f"{len(case['tenants'])} tenants: {', '.join(case['tenants'])}",
            f"{'':19}{'lost':>6}{'footprint':>12}{'10 GB':>10}{'':16}{'1 GB':>5}{'':6}{'wait':>6}",
            f"{'':19}{'share':>6}{'mean':>6}{'p99':>6}{'p50':>5}{'p99':>5}{'n':>4}"
            f"{'moved':>6}{'evict':>6}{'p50':>5}{'good':>6}{'p99':>6}",
        ]
        for order, rows in case["methods"].items():
            lines.append(order)
            lines += [_line(name, row) for name, row in rows.items()]
        for name in REFERENCES:
            good = _ratio(case[name]["goodput_tokens_per_s"], case["static"]["goodput_tokens_per_s"])
            lines.append(f"{name:68}{_cell(good, 6, 3)}{_cell(case[name]['wait_s']['p99'], 6, 2)}")
        missed = [
            f"{name} {'unmeasured' if number['found'] is None else number['found']} (asked {number['limit']})"
            for name, number in case["numbers"].items()
            if not number["met"]
        ]
        lines += [f"not met by {JUDGED[1]}: {each}" for each in missed]
    return "\n".join([*lines, "", f"took {result['took_s']:g} s"])


def _line(name: str, row: dict[str, Any]) -> str:
    footprint, given = row["footprint"], row["give_10gb_s"]
    return "".join((
        f"{name:19}",
        *(_cell(value, 6, 3) for value in (row["stranded_share"], footprint["mean"], footprint["p99"])),
        *(_cell(value, 5, 2) for value in (given["p50"], given["p99"])),
        f"{row['wants_below_saturation']:4}",
        *(_cell(row[key], 6, 2) for key in ("moved_per_byte_freed", "evicted_per_byte_freed")),
        _cell(row["first_1gb_s"]["p50"], 5, 2),
        _cell(row["goodput_over_static"], 6, 3),
        _cell(row["wait_s"]["p99"], 6, 2),
    ))  # fmt: skip


def _cell(value: float | None, width: int, decimals: int) -> str:
    return f"{'-' if value is None else f'{value:.{decimals if value < 10 else 1}f}':>{width}}"


def _spread(values: F8) -> dict[str, float | None]:
    if not values.size:
        return {"mean": None, "p50": None, "p99": None}
    return {
        "mean": _round(float(values.mean())),
        "p50": _round(float(np.percentile(values, 50))),
        "p99": _round(float(np.percentile(values, 99))),
    }


def _ratio(part: float, whole: float) -> float | None:
    return _round(part / whole) if whole else None


def _round(value: float) -> float:
    return round(value, 4)
