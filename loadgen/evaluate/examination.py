"""The examination of DESIGN section 7 from beginning to end: plan, runs, result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from loadgen.evaluate import matrix, pool
from loadgen.evaluate.cache import Cache
from loadgen.evaluate.entrants import loaded
from loadgen.evaluate.matrix import Plan
from loadgen.evaluate.pool import Cost, Tell
from loadgen.evaluate.result import Result, result
from loadgen.evaluate.runs import Cell
from loadgen.evaluate.table import Table


class Examination(NamedTuple):
    """The result, and what it was made of."""

    result: Result
    table: Table
    cost: Cost


def examine(
    plan: Plan, policies: Sequence[Path], extra: Sequence[str] = (), *, cache: Path | None, jobs: int, tell: Tell
) -> Examination:
    """Run what ``plan`` says. UserError for names and files that do not exist, PolicyError for a bad network."""
    cells = matrix.cells(plan, policies, extra)
    groups = matrix.blocks(plan)
    kept = Cache(cache)
    if known := kept.load():
        tell(f"going on from {known:,} rows in {kept.path}")
    steps = len(cells) * sum(pool.steps_of(block) for blocks in groups for block in blocks)
    tell(f"{len(cells)} policies and admissions, {_size(plan)}: {steps:,} worker-steps")
    rows, cost = pool.run_all(cells, groups, kept, jobs, tell)
    table = Table(rows)
    networks = [loaded(str(path.absolute()))[0] for path in policies]
    loads = {block.configuration.name: block.configuration.load for blocks in groups for block in blocks}
    seeds = [network.origin.seed for network in networks]
    return Examination(result(table, loads, _about(plan, cells, policies, cost), seeds), table, cost)


def _size(plan: Plan) -> str:
    return (
        f"{len(matrix.configurations(plan))} configurations x {plan.traces} traces of {plan.seconds:g} s "
        f"(and {plan.duration_s - plan.seconds:g} s before, in which nobody decides)"
    )


def _about(plan: Plan, cells: Sequence[Cell], policies: Sequence[Path], cost: Cost) -> dict[str, str]:
    found = {
        "sample": _size(plan),
        "cells": f"{len(cells)}: the core policies {', '.join(matrix.CORE)} and dqn under "
        f"{'the main' if plan.quick else 'all eight'} admissions, the others under "
        f"{', '.join(matrix.MAIN_ADMISSIONS)}" + (" or fewer (a quick look)" if plan.quick else ""),
        "load": "1.0 is where vLLM-like with offload, first-come, meets the SLO for 85 % of offered tokens",
        "max_tokens": "a request that names none is taken to ask for 4096 (code completion 512), never less than it "
        "truly produces; static and rho_1.0 reserve that, Tidegate's engines the output to be expected, at most that; "
        "<policy>-max_1024 and -max_8192 are the same with another default",
        "intervals": "95 %, paired bootstrap over traces within each configuration; ratios are geometric means over "
        "configurations of the ratio of sums over traces",
        "heuristic_tuned": "for each trace the variant that was best on all other traces of its configuration",
        "hindsight": "the best of all that is not learned on each trace, luck included",
        "system": "deadline_cap_shed with the network where its interval over the heuristic lies above 1, else with "
        "the heuristic",
        "dqn": "against others under the same admission: vs_universal both without the cap (deadline_shed), the rest "
        "both with it (deadline_cap_shed)",
        "cost": cost.line(),
    }
    for number, path in enumerate(policies, 1):
        weights = loaded(str(path.absolute()))[0]
        found[f"dqn:{number}" if number > 1 else "dqn_file"] = (
            f"{path.name}, {weights.version}, {weights.transitions:,} transitions, {weights.origin.command}"
        )
    return found
