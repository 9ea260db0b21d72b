"""The result as lines for a terminal."""

from __future__ import annotations

from loadgen.evaluate.bootstrap import Ratio
from loadgen.evaluate.matrix import BASELINE, SYSTEM_ADMISSION, WITHOUT_CAP
from loadgen.evaluate.result import Figures, Result, Worst


def lines(result: Result) -> list[str]:
    """Figures by policy and admission, then every comparison."""
    found = [
        f"{'policy':<28}{'admission':<20}{'goodput/card':>13}{'95 %':>18}{'HBM':>6}{'wait P99':>10}{'TPOT P99':>10}"
        f"{'preempted':>10}{'OOM':>5}{'cost':>7}"
    ]
    for policy, admissions in result.policies.items():
        for admission, one in admissions.items():
            found.append(_line(policy, admission, one, result.more[policy][admission].cost))
    found += ["", *[f"{name:<52}{told(one)}" for name, one in comparisons(result)]]
    found += ["", *[f"{name}: {meaning}" for name, meaning in meanings(result).items()]]
    return [*found, "", *[f"{name}: {text}" for name, text in result.about.items()]]


def meanings(result: Result) -> dict[str, str]:
    """What columns and comparisons stand for, by their names."""
    ours = f"{result.system.policy} {SYSTEM_ADMISSION}"
    found = {
        "cost (column)": "card-seconds a token within the SLO, static first-come = 100",
        "OOM a week": "the 95 % bound on crashes a week of one worker; it falls with what was simulated",
        "system.vs_vllm_offload_fcfs": f"{ours} over {BASELINE} fcfs, clients wait for ever on both sides",
        "system.vs_vllm_offload_timeouts": "the same, clients give up on both sides, as in the table",
        "system.vs_vllm_offload_equal_admission": f"{ours} over {BASELINE} {SYSTEM_ADMISSION}",
        "system.worst_configuration": "the lowest of vs_vllm_offload_timeouts, one configuration at a time",
        "ablation <policy>-<what is missing>": f"over the policy itself, both {SYSTEM_ADMISSION}",
    }
    if result.dqn is not None:
        found |= {
            "dqn.vs_universal": f"the network over the heuristic, both {WITHOUT_CAP}",
            "dqn.vs_universal_with_cap": f"the same, both {SYSTEM_ADMISSION}; so are all that follow",
            "dqn.worst_configuration": "the lowest of vs_universal_with_cap, one configuration at a time",
        }
    return found


def comparisons(result: Result) -> list[tuple[str, Ratio | Worst]]:
    """Every ratio by the name that it has in the JSON."""
    system = result.system
    found: list[tuple[str, Ratio | Worst]] = [
        ("system.vs_vllm_offload_fcfs", system.vs_vllm_offload_fcfs),
        ("system.vs_vllm_offload_timeouts", system.vs_vllm_offload_timeouts),
        ("system.vs_vllm_offload_equal_admission", system.vs_vllm_offload_equal_admission),
        ("system.worst_configuration", system.worst_configuration),
    ]
    if result.dqn is not None:
        dqn = result.dqn
        found += [
            ("dqn.vs_universal", dqn.vs_universal),
            ("dqn.vs_universal_with_cap", dqn.vs_universal_with_cap),
            ("dqn.worst_configuration", dqn.worst_configuration),
            ("dqn.vs_tuned_per_configuration", dqn.vs_tuned_per_configuration),
            ("dqn.vs_hindsight", dqn.vs_hindsight),
        ]
        found += [
            (f"dqn.seeds[{k}] (training seed {one.seed})", Ratio(one.ratio, one.ci95))
            for k, one in enumerate(dqn.seeds)
        ]
    return [*found, *((f"ablation {name} ({SYSTEM_ADMISSION})", one) for name, one in result.ablations.items())]


def told(one: Ratio | Worst) -> str:
    """A ratio with its interval."""
    where = f"  {one.configuration}" if isinstance(one, Worst) else ""
    return f"{one.ratio:.3f}  [{one.ci95[0]:.3f}, {one.ci95[1]:.3f}]{where}"


def _line(policy: str, admission: str, one: Figures, cost: float | None) -> str:
    interval = f"{one.ci95[0]:,.0f} to {one.ci95[1]:,.0f}"
    wait = "-" if one.queue_wait_p99_s is None else f"{one.queue_wait_p99_s:.2f} s"
    tpot = "-" if one.tpot_p99_ms is None else f"{one.tpot_p99_ms:.0f} ms"
    return (
        f"{policy:<28}{admission:<20}{one.goodput_tokens_per_s:>13,.1f}{interval:>18}{100 * one.hbm_utilisation:>5.0f}%"
        f"{wait:>10}{tpot:>10}{one.preemptions:>10,}{one.oom:>5}{'-' if cost is None else f'{cost:.0f}':>7}"
    )
