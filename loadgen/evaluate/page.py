"""The examination as one self-contained page: plots inline, captions made from the numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import numpy as np
from numpy.typing import NDArray

from loadgen.bench.returns_scores import Question
from loadgen.evaluate import plots, text
from loadgen.evaluate.bootstrap import Ratio
from loadgen.evaluate.examination import Examination
from loadgen.evaluate.matrix import BASELINE, MAIN_ADMISSIONS, SYSTEM_ADMISSION
from loadgen.evaluate.records import Curve
from loadgen.evaluate.result import Figures, Result, Worst, by_configuration, plain
from loadgen.evaluate.table import CHOSEN, Name, Table

_HEAD: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Tidegate: TITLE</title><style>
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-size:13px;margin:1rem 0}th,td{padding:2px 9px;text-align:right}
th{border-bottom:1px solid #888}td:first-child,th:first-child,td.l,th.l{text-align:left}
tr:nth-child(even){background:#f5f5f5}figure{margin:1.5rem 0}figcaption{color:#444}dt{font-weight:600}
</style></head><body>
"""


def html(found: Examination, learned: Sequence[Curve], questions: Sequence[Question]) -> str:
    """The page."""
    result, table = found.result, found.table
    system = Name(result.system.policy, SYSTEM_ADMISSION)
    parts = [
        _verdicts(result), _about(result),
        "<h2>Goodput under SLO</h2>", _figure(plots.goodput_bars(result, _there(result)), _goodput_words(result)),
        _policies(result), "<h2>By configuration</h2>", _by_regime(table),
        "<h2>Tail latency</h2>", _tails(result, system), "<h2>What was done</h2>", _mix(table),
        "<h2>Where it loses</h2>", _losing(table, system),
    ]  # fmt: skip
    if learned:
        parts += ["<h2>Learning</h2>", _figure(plots.learning(learned), _learning_words(learned))]
    if questions:
        words = f"{sum(q.asked for q in questions):,} answers to {len(questions)} questions. " + " ".join(
            f"{escape(q.name)}: log-loss {q.log_loss:.3f}, of class figures {q.log_loss_class:.3f}, mean distance "
            f"from the diagonal {q.error:.3f}." for q in questions
        )  # fmt: skip
        parts += ["<h2>When sessions come back</h2>", _figure(plots.diagram(questions), words)]
    return document("Examination", parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of these parts, which are HTML."""
    return "\n".join([_HEAD.replace("TITLE", title), f"<h1>{title}</h1>", *parts, "</body></html>\n"])


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{caption}</figcaption></figure>"


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table of plain text."""
    top = "".join(f"<th>{escape(one)}</th>" for one in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(one)}</td>" for one in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _verdicts(result: Result) -> str:
    rows = [[name, *_cells(one)] for name, one in text.comparisons(result)]
    said = _terms(text.meanings(result))
    return "<h2>Comparisons</h2>" + grid(["", "ratio", "95 % interval", "configuration", "reads"], rows) + said


def _cells(one: Ratio | Worst) -> list[str]:
    low, high = one.ci95
    reads = "better" if low > 1 else "worse" if high < 1 else "no difference shown"
    where = one.configuration if isinstance(one, Worst) else ""
    return [f"{one.ratio:.3f}", f"{low:.3f} to {high:.3f}", where, reads]


def _about(result: Result) -> str:
    return "<h2>What was run</h2>" + _terms(result.about)


def _terms(told: Mapping[str, str]) -> str:
    return (
        "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in told.items()) + "</dl>"
    )


def _policies(result: Result) -> str:
    rows = []
    for policy, admissions in result.policies.items():
        for admission, one in admissions.items():
            more = result.more[policy][admission]
            rows.append([
                policy, admission, f"{one.goodput_tokens_per_s:,.1f}", f"{one.ci95[0]:,.1f} to {one.ci95[1]:,.1f}",
                f"{more.tokens_per_s:,.1f}", f"{100 * more.slo_token_share:.1f}", f"{100 * one.hbm_utilisation:.1f}",
                _number(one.queue_wait_p99_s, ".2f"), _number(one.tpot_p99_ms, ".0f"), f"{one.preemptions:,}",
                f"{one.oom}", f"{one.oom_upper_bound_per_week:.2f}", _number(more.cost, ".0f"), f"{more.shed:,}",
            ])  # fmt: skip
    head = ["policy", "admission", "goodput tokens/s a card", "95 %", "tokens/s", "SLO tokens %", "HBM %",
            "wait P99 s", "TPOT P99 ms", "preempted", "OOM", "OOM a week <", "cost", "shed"]  # fmt: skip
    return grid(head, rows)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _there(result: Result) -> list[str]:
    return [a for a in MAIN_ADMISSIONS if any(a in admissions for admissions in result.policies.values())]


def _goodput_words(result: Result) -> str:
    found = [
        (one.goodput_tokens_per_s, policy, admission)
        for policy, admissions in result.policies.items()
        for admission, one in admissions.items()
        if "-" not in policy and policy not in CHOSEN
    ]
    best, policy, admission = max(found)
    base = result.policies[BASELINE]["fcfs"].goodput_tokens_per_s
    return (
        f"The best mean is {escape(policy)} under {admission}: {best:,.0f} tokens/s a card; {BASELINE} first-come "
        f"brings {base:,.0f}. Means weigh large cards more; the ratios above weigh all configurations alike."
    )


def _by_regime(table: Table) -> str:
    theirs = Name(BASELINE, "fcfs")
    names = [n for n in table.names if n.timeouts and n.admission in ("fcfs", SYSTEM_ADMISSION) and plain(n.policy)]
    base = table.values(theirs).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.array([np.nan_to_num(table.values(name).sum(axis=1) / base, nan=1.0, posinf=4.0) for name in names])
    lost = int((ratios < 0.98).sum())
    words = (
        f"Goodput over {BASELINE} first-come, sums over traces. {lost} of {ratios.size} cells are below 0.98; the "
        f"range is {ratios.min():.2f} to {ratios.max():.2f}."
    )
    labels = [f"{name.policy}, {name.admission}" for name in names]
    return _figure(plots.ratio_map(ratios, labels, table.configurations, f"{BASELINE}, fcfs"), words)


def _tails(result: Result, system: Name) -> str:
    entries = [("static", "fcfs"), (BASELINE, "fcfs"), (BASELINE, SYSTEM_ADMISSION), (system.policy, system.admission)]
    better = sum(
        _below(regime.policies[system.policy][system.admission], regime.policies[BASELINE]["fcfs"])
        for regime in result.regimes
    )
    words = (
        f"P99 over all requests of a configuration; who never got in counts with the wait until it was refused. "
        f"{system.policy}, {system.admission} has the shorter queue wait P99 than {BASELINE} first-come on {better} of "
        f"{len(result.regimes)} configurations."
    )
    return _figure(plots.tails(result, entries), words)


def _below(ours: Figures, theirs: Figures) -> bool:
    a, b = ours.queue_wait_p99_s, theirs.queue_wait_p99_s
    return a is not None and b is not None and a < b


def _mix(table: Table) -> str:
    mixes: dict[str, NDArray[np.float64]] = {}
    for policy in ("heuristic", "dqn"):
        name = Name(policy, SYSTEM_ADMISSION)
        if name in table.names:
            counts = np.array([np.sum([row.actions for row in line], axis=0) for line in table.rows(name)], float)
            mixes[policy] = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1.0)
    words = []
    for policy, found in mixes.items():
        means = zip(plots.ACTIONS, found.mean(axis=0), strict=True)
        words.append(f"{policy}: " + ", ".join(f"{100 * share:.1f} % {action}" for action, share in means) + ".")
    caption = f"Under {SYSTEM_ADMISSION}, mean over configurations. {' '.join(words)}"
    return _figure(plots.action_mix(mixes, table.configurations), caption)


def _losing(table: Table, system: Name) -> str:
    pairs = [(system, Name(BASELINE, "fcfs")), (system, Name(BASELINE, SYSTEM_ADMISSION))]
    if Name("dqn", SYSTEM_ADMISSION) in table.names:
        pairs.append((Name("dqn", SYSTEM_ADMISSION), Name("heuristic", SYSTEM_ADMISSION)))
    parts = []
    for ours, theirs in pairs:
        found = by_configuration(table, ours, theirs)
        behind = [one.configuration for one in found if one.ci95[1] < 1.0]
        over = f"{theirs.policy}, {theirs.admission}"
        words = f"{ours.policy}, {ours.admission}: "
        words += f"behind for certain on {', '.join(behind)}." if behind else "on no configuration behind for certain."
        below = sorted((one for one in found if one.ratio < 1.0), key=lambda one: one.ratio)
        lowest = ", ".join(f"{one.configuration} {one.ratio:.3f}" for one in below[:3])
        words += f" Below 1 on {len(below)} of {len(found)}" + (f", lowest {lowest}." if below else ".")
        parts.append(_figure(plots.losses(found, over), escape(words)))
    return "".join(parts)


def _learning_words(learned: Sequence[Curve]) -> str:
    ends = ", ".join(f"{escape(one.name)} {max(p.ratio for p in one.points):.3f}" for one in learned)
    return f"Validation goodput over the heuristic's (dashed: the worst scenario). Best of each run: {ends}."
