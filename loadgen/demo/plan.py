"""From options to what is replayed: the workload, the fleet, load 1.0, and the tables of every worker."""

from __future__ import annotations

from pathlib import Path

import msgspec

from loadgen.demo.options import DemoOptions
from loadgen.engine.report import Summary
from loadgen.engine.specs import FleetConfig
from loadgen.load import UnitLoad, find_unit_load, tables_at
from loadgen.policies import policy_named, tidegate_mode, with_admission
from loadgen.replay import Run, replay
from loadgen.requests import RequestTable
from loadgen.workload import Workload, builtin
from schemas.classes import ServiceClass
from services.errors import UserError

TODAY = ("static", "vllm_recompute", "vllm_offload")
"""What operators run: first come, first served."""
OURS = ("fixed:1.6", "heuristic")
"""On engines with Tidegate's fast control."""
SAME_ADMISSION = "vllm_offload+fast"
"""vLLM with offload under Tidegate's admission: what it beats ``vllm_offload`` by is no merit of moving memory."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that depends on options and seed alone."""

    workload: Workload
    fleet: FleetConfig
    """All nodes' cards together: node k has card k."""
    unit: UnitLoad
    tables: list[RequestTable]
    """One a worker, node by node."""
    duration_s: float
    admission: str
    """Of Tidegate's rows; what operators run today is first come."""

    def node_fleet(self) -> FleetConfig:
        """The fleet of one node, on which candidates are judged too: one card, Tidegate's engines."""
        return msgspec.structs.replace(self.fleet, cards=1, mode=tidegate_mode(self.admission))

    def live_fleet(self) -> FleetConfig:
        """The same for the live node, whose sessions the actuator brings back ahead of their return."""
        fleet = self.node_fleet()
        return msgspec.structs.replace(fleet, mode=msgspec.structs.replace(fleet.mode, prefetch=False))

    def node_tables(self, node: int) -> list[RequestTable]:
        per_node = self.fleet.workers_per_card
        return self.tables[node * per_node : (node + 1) * per_node]

    def statement(self, options: DemoOptions) -> list[str]:
        """Lines that say what the comparison is about."""
        fleet, unit = self.fleet, self.unit
        classes = sorted({ServiceClass(c) for table in self.tables for c in table.service_class})
        reserved = ", ".join(f"{one.name.lower()} {fleet.limits[one].default_max_tokens}" for one in classes)
        return [
            *self.workload.statement(),
            f"{fleet.cards} x {fleet.card}, each with {fleet.workers_per_card} x {fleet.model}; "
            f"{self.duration_s:,.0f} simulated seconds",
            f"load {options.load:g} = {options.load * unit.factor:.3g} x the workload's own rate; load 1.0 = "
            f"{unit.factor:.3g} x, where vLLM-like with offload meets the SLO for {100 * unit.share:.0f} % of tokens",
            f"admission: {self.admission} of fixed, heuristic, loop and {SAME_ADMISSION}; fcfs of the others",
            f"a request that names no max_tokens reserves (tokens): {reserved}, or what finished requests let expect "
            "on Tidegate's engines; clients give up after twice their first-token limit",
        ]


def make_plan(options: DemoOptions) -> Plan:
    """Read or generate the workload, find load 1.0, deal requests out. UserError for what cannot be replayed."""
    fleet = FleetConfig(
        card=options.card, model=options.model, workers_per_card=options.workers_per_card, cards=options.nodes
    )
    fleet.kv_capacity_bytes()
    context = min(model.context_tokens for model in fleet.model_specs())
    workload = _workload(options).excerpt(options.duration_s).within_context(context)
    if len(workload) == 0:
        raise UserError(f"{workload.name}: no request is left within {context:,} tokens of context")
    unit = find_unit_load(fleet, workload, options.duration_s, options.seed)
    workers = fleet.cards * fleet.workers_per_card
    tables = tables_at(workload, unit.factor * options.load, workers, options.duration_s, options.seed)
    return Plan(
        workload=workload,
        fleet=fleet,
        unit=unit,
        tables=tables,
        duration_s=options.duration_s,
        admission=options.admission,
    )


def run_baselines(plan: Plan) -> dict[str, Run]:
    """Each baseline on the plan's requests, offline."""
    specs = {name: policy_named(name) for name in TODAY}
    if plan.admission != "fcfs":
        specs[SAME_ADMISSION] = with_admission(policy_named("vllm_offload"), plan.admission)
    specs |= {name: with_admission(policy_named(name), plan.admission) for name in OURS}
    return {name: replay(plan.fleet, plan.tables, spec, plan.duration_s) for name, spec in specs.items()}


def figures(summary: Summary) -> dict[str, float]:
    """The table's row of a replay."""
    return {
        "goodput_tokens_per_s": summary.goodput_tokens_per_s,
        "tokens_per_s": summary.tokens_per_s,
        "hbm_utilisation": summary.hbm_utilisation,
        "queue_wait_p99_s": summary.queue_wait_p99_s,
        "tpot_p99_ms": summary.tpot_p99_ms,
        "preemptions": float(summary.preemptions),
        "oom": float(summary.oom),
    }


def _workload(options: DemoOptions) -> Workload:
    kind = None
    if options.service_class is not None:
        known = {one.name.lower(): one for one in ServiceClass}
        if options.service_class not in known:
            raise UserError(f"--class: found {options.service_class!r}, expected one of {', '.join(known)}")
        kind = known[options.service_class]
    if options.trace is not None:
        from loadgen.traces import read

        return read(Path(options.trace), options.trace_format, options.skip_bad, seed=options.seed, service_class=kind)
    return builtin(
        options.workload,
        duration_s=options.duration_s,
        seed=options.seed,
        context_scale=options.context_scale if options.workload == "agent" else None,
        service_class=kind,
    )
