"""The comparison at the end: one table for people, the same as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Table

from loadgen.outputs import write_atomically

FIGURES: Final = (
    "goodput_tokens_per_s",
    "tokens_per_s",
    "hbm_utilisation",
    "queue_wait_p99_s",
    "tpot_p99_ms",
    "preemptions",
    "oom",
)
"""Keys of a policy's row, in the order of the table."""

_HEADINGS: Final = (
    "policy", "goodput\ntokens/s", "of vLLM\n+offload", "tokens/s", "HBM\nused", "wait\nP99 s", "TPOT\nP99 ms",
    "preemp-\ntions", "OOM",
)  # fmt: skip

REFERENCE: Final = "vllm_offload"


class MemoryFigures(msgspec.Struct, kw_only=True):
    """What the live nodes' bytes did, in the model's bytes: ``scale`` times what was really moved."""

    scale: int
    packed_bytes: int
    """By relocation within the card."""
    out_bytes: int
    """To the host tier."""
    back_bytes: int
    checks: int
    """Comparisons of a block with a checksum kept apart."""
    wrong_blocks: int
    unshared_workers: int
    """Whose arena is no shared memory, for want of room or because it was lost: there the engine copies."""

    def told(self) -> str:
        """One line for people."""
        return (
            f"memory: {self.packed_bytes / 1e9:,.1f} GB of KV packed within cards, {self.out_bytes / 1e9:,.1f} GB "
            f"moved to host memory, {self.back_bytes / 1e9:,.1f} GB brought back; kept as real bytes at "
            f"1/{self.scale} of that, {self.checks:,} block checks by checksum, {self.wrong_blocks} wrong"
            + (f"; {self.unshared_workers} workers without shared memory" if self.unshared_workers else "")
        )


class LoopFigures(msgspec.Struct, kw_only=True):
    """What the live loop itself did; latencies are wall time from a node's sample to its last command."""

    steps: int
    missed_steps: int
    latency_p50_ms: float
    latency_p99_ms: float
    policy_versions: list[str]
    dropped: int
    candidates: list[str]
    """Networks that the gate judged."""
    promoted: list[str]
    best_candidate_ratio: float
    """Best candidate's goodput over the heuristic's on the gate's workloads; NaN without one."""
    memory: MemoryFigures
    heuristic_goodput_share: float = math.nan
    """Live goodput over that of the heuristic offline: how far the loop's own cost shows."""


def comparison(rows: Mapping[str, Mapping[str, float]]) -> Table:
    """A rich table of policies x figures; the best goodput is bold."""
    table = Table(
        title="The same requests under each policy",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, heading in enumerate(_HEADINGS):
        table.add_column(heading, justify="left" if i == 0 else "right", no_wrap=True)
    reference = rows.get(REFERENCE, {}).get("goodput_tokens_per_s", math.nan)
    best = max(row["goodput_tokens_per_s"] for row in rows.values())
    for name, row in rows.items():
        goodput = row["goodput_tokens_per_s"]
        table.add_row(
            name,
            f"{goodput:,.1f}",
            _ratio(goodput, reference),
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * row['hbm_utilisation']:.1f} %",
            f"{row['queue_wait_p99_s']:.2f}",
            f"{row['tpot_p99_ms']:.1f}",
            f"{row['preemptions']:,.0f}",
            f"{row['oom']:.0f}",
            style="bold" if goodput == best else None,
        )
    return table


def _ratio(value: float, reference: float) -> str:
    return f"{value / reference:.3f}" if reference > 0 else "-"


def as_json(rows: Mapping[str, Mapping[str, float]], loop: LoopFigures, context: Mapping[str, Any]) -> dict[str, Any]:
    """The object that ``--json`` writes: ``policies``, ``loop`` and what was replayed."""
    policies = {name: {key: _number(row[key]) for key in FIGURES} for name, row in rows.items()}
    return {
        "policies": policies,
        "loop": {key: _number(value) for key, value in msgspec.to_builtins(loop).items()},
        **context,
    }


def _number(value: Any) -> Any:
    """JSON has no NaN: what could not be measured is null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(document, indent=2, allow_nan=False) + "\n")
