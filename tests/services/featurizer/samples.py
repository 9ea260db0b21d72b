"""Samples with round numbers, so that features can be computed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.identity import SCHEMA_VERSION, STEP_NS, action_id
from schemas.metrics import COLUMN, METRICS, Kind
from schemas.outcomes import OutcomeBatch, WorkerOutcome, outcome_batch
from schemas.telemetry import NodeSample, pack_metrics

GB = 1e9
PLAIN: Mapping[str, float] = {
    "hbm_bytes": 80 * GB, "card_kv_capacity_bytes": 40 * GB, "q0_bytes": 20 * GB, "weights_bytes": 16 * GB,
    "block_bytes": 2 * 2**20, "page_group_bytes": 128 * 2**20, "kv_bytes_per_token": 131072.0,
    "floor_bytes": 1 * GB, "host_capacity_bytes": 80 * GB, "link_bytes_per_s": 20 * GB,
    "reference_tokens_per_s": 5000.0, "kv_bytes": 10 * GB, "kv_idle_bytes": 2 * GB, "kv_mapped_bytes": 12 * GB,
    "kv_reserved_bytes": 15 * GB, "activation_bytes": 1 * GB, "card_free_bytes": 8 * GB, "frag": 0.25,
    "waiting": 6.0, "waiting_for_memory": 3.0, "running": 8.0, "prefilling": 2.0, "swapped": 1.0,
    "idle_sessions": 2.0, "idle_return_s": 30.0, "host_used_bytes": 20 * GB, "link_used_bytes_per_s": 5 * GB,
    "iteration_s": 0.025, "generation": 3.0, "rho": 1.2, "quota_soft_bytes": 24 * GB, "quota_hard_bytes": 30 * GB,
    "max_running": 256.0, "running_cap": 128.0, "starting": 0.0,
}  # fmt: skip


def row(**changes: float) -> NDArray[np.float64]:
    """One worker's metrics: PLAIN, counters and histograms 0, then ``changes``."""
    values = np.zeros(len(METRICS))
    for name, value in {**PLAIN, **changes}.items():
        values[COLUMN[name]] = value
    return values


def sample(
    step: int,
    rows: Sequence[NDArray[np.float64]],
    *,
    node: str = "n0",
    boot_id: int = 1,
    t_ns: int | None = None,
    workers: Sequence[str] | None = None,
    cards: Sequence[int] | None = None,
    classes: Sequence[int] | None = None,
) -> NodeSample:
    """A sample of two workers a card unless told otherwise."""
    count = len(rows)
    matrix = np.array(rows).reshape(count, len(METRICS))
    return NodeSample(
        node=node,
        boot_id=boot_id,
        step=step,
        schema_version=SCHEMA_VERSION,
        t_ns=step * STEP_NS if t_ns is None else t_ns,
        workers=tuple(workers or [f"{node}/{k // 2}/w{k}" for k in range(count)]),
        cards=tuple(cards or [k // 2 for k in range(count)]),
        classes=tuple(classes or [0] * count),
        metrics=pack_metrics(matrix),
    )


def counting(step: int, **per_step: float) -> NDArray[np.float64]:
    """A row whose counters have grown by ``per_step`` in each of ``step`` steps."""
    kinds = {metric.name: metric.kind for metric in METRICS}
    assert all(kinds[name] is Kind.COUNTER for name in per_step), "only counters count"
    return row(**{name: 1000.0 + value * step for name, value in per_step.items()})


def outcome(
    step: int,
    workers: Sequence[str] = ("n0/0/w0", "n0/0/w1"),
    *,
    node: str = "n0",
    boot_id: int = 1,
    action: int = 1,
    mask: int = 31,
    policy: str = "heuristic",
    kind: int = 0,
    probability: float = 1.0,
) -> OutcomeBatch:
    said_step = step - 1 if kind else step
    rows = [
        WorkerOutcome(
            worker=worker,
            action_id=action_id(worker, boot_id, said_step),
            kind=kind,
            status=0,
            requested_action=action,
            executed_action=action,
            refusal=0,
            requested_rho=1.1,
            effective_rho=1.1,
            effective_generation=2,
            effective_max_running=256,
            policy=policy,
            probability=probability,
            mask=mask,
        )
        for worker in workers
    ]
    return outcome_batch(node, boot_id, step, step * STEP_NS, rows)
