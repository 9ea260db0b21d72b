"""What is run: which policies under which admissions, and how many traces of how many configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from loadgen.evaluate.entrants import FIXED_RHOS, MAX_TOKENS, VARIANTS, Entrant, entrant
from loadgen.evaluate.rows import HELD_S
from loadgen.evaluate.runs import Block, Cell
from loadgen.fleets import Configuration, held_out_configurations, unit_factor
from loadgen.policies import ADMISSIONS

SYSTEM_ADMISSION: Final = "deadline_cap_shed"
WITHOUT_CAP: Final = "deadline_shed"
BASELINE: Final = "vllm_offload"
MAIN_ADMISSIONS: Final = ("fcfs", "deadline", WITHOUT_CAP, SYSTEM_ADMISSION)
"""Under which everybody runs; the core policies run under all eight."""
CORE: Final = ("static", "rho_1.0", BASELINE, "heuristic")
OTHERS: Final = (
    "vllm_recompute", "one_line", "random",
    *(f"fixed:{rho}" for rho in FIXED_RHOS), *(f"heuristic:{name}" for name in VARIANTS),
)  # fmt: skip
_LEFT_OUT_QUICKLY: Final = (
    "fixed:1.2",
    "fixed:1.4",
    "heuristic:late",
    "heuristic:never",
    "heuristic:shy",
    "heuristic:eager_early",
    "heuristic:eager_late",
)
_QUICK_ADMISSIONS: Final = ("fcfs", SYSTEM_ADMISSION)
FIRST_SEED: Final = 3_000_001
"""Training draws below 2^20 (``loadgen.train``), the search for load 1.0 uses others still."""
GROUP_WORKERS: Final = 400
QUICK_CONFIGURATIONS: Final = ("a100-3x8b-small-host", "h100-14b-8b-overload", "h100-8b-agent-light")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How much is simulated."""

    traces: int = 8
    """Of each configuration."""
    seconds: float = 600.0
    """Counted in each, after the minute in which nobody decides: a day of the built-in diurnal swing."""
    quick: bool = False

    @property
    def duration_s(self) -> float:
        """Simulated of each trace."""
        return self.seconds + HELD_S


QUICK: Final = Plan(traces=2, seconds=60.0, quick=True)


def configurations(plan: Plan) -> tuple[Configuration, ...]:
    """Those held out; of a quick look the first few of QUICK_CONFIGURATIONS that exist."""
    every = held_out_configurations()
    if not plan.quick:
        return every
    return tuple(one for one in every if one.name in QUICK_CONFIGURATIONS) or every[:3]


def blocks(plan: Plan) -> list[tuple[Block, ...]]:
    """All traces, in groups that run side by side."""
    groups: list[tuple[Block, ...]] = []
    group: list[Block] = []
    for configuration in configurations(plan):
        factor = unit_factor(configuration)
        group.append(Block.of(configuration, factor, FIRST_SEED, plan.traces, plan.duration_s))
        if sum(b.configuration.fleet.cards * b.configuration.fleet.workers_per_card for b in group) >= GROUP_WORKERS:
            groups.append(tuple(group))
            group = []
    return [*groups, tuple(group)] if group else groups


def cells(plan: Plan, policies: Sequence[Path], extra: Sequence[str] = ()) -> list[Cell]:
    """Every policy under every admission that it is examined under. ``policies``: network files, the first is the
    one that ships, the others are other training seeds of it; ``extra``: names of ablations."""
    first = policies[0] if policies else None
    core = [*CORE, *(["dqn"] if first else [])]
    others = [name for name in OTHERS if not plan.quick or name not in _LEFT_OUT_QUICKLY]
    found = [
        Cell(entrant=_entrant(name, first), admission=admission)
        for name in core
        for admission in (MAIN_ADMISSIONS if plan.quick else ADMISSIONS)
    ]
    found += [
        Cell(entrant=entrant(name), admission=admission)
        for name in others
        for admission in (_QUICK_ADMISSIONS if plan.quick else MAIN_ADMISSIONS)
    ]
    for number, path in enumerate(policies[1:], 2):
        one = entrant(f"dqn:{number}", path)
        found += [Cell(entrant=one, admission=admission) for admission in (WITHOUT_CAP, SYSTEM_ADMISSION)]
    promises = [f"{name}-{one}" for name in ("static", "rho_1.0", "heuristic") for one in MAX_TOKENS]
    extra = [*([] if plan.quick else promises), *extra]
    found += [Cell(entrant=_entrant(name, first), admission=SYSTEM_ADMISSION) for name in dict.fromkeys(extra)]
    without = [(BASELINE, "fcfs"), *((name, SYSTEM_ADMISSION) for name in core if name in ("heuristic", "dqn"))]
    found += [Cell(entrant=_entrant(name, first), admission=a, timeouts=False) for name, a in without]
    return found


def _entrant(name: str, path: Path | None) -> Entrant:
    return entrant(name, path if name.startswith("dqn") else None)
