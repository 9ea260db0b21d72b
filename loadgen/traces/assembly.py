"""From columns of numbers to a Workload; what all readers share.

Pure. Rows without prompt or output tokens (failed or cancelled calls) are left out and counted.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Final

import numpy as np

from loadgen.requests import F8, I8, NO_TURN, U1, RequestTable, default_max_tokens
from loadgen.traces.errors import BadLines, TraceError
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass

MALFORMED: Final = "malformed lines"
WITHOUT_OUTPUT: Final = "calls without output tokens (failed or cancelled)"
WITHOUT_PROMPT: Final = "calls without prompt tokens"
MIN_DURATION_S: Final = 1.0


@dataclasses.dataclass(frozen=True, eq=False)
class Columns:
    """What a reader found; arrays ``(n,)`` as in RequestTable, chains in order."""

    arrival_s: F8
    prompt_tokens: I8
    output_tokens: I8
    cached_tokens: I8
    session: I8
    group: I8
    next_turn: I8
    think_s: F8
    ending: U1 | None = None
    """None: the format does not say."""


def single_calls(arrival_s: F8, prompt_tokens: I8, output_tokens: I8) -> Columns:
    """Requests that stand alone: each its own session."""
    count = len(arrival_s)
    alone = np.arange(count, dtype=np.int64)
    return Columns(
        arrival_s=arrival_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=np.zeros(count, dtype=np.int64),
        session=alone,
        group=alone,
        next_turn=np.full(count, NO_TURN, dtype=np.int64),
        think_s=np.zeros(count),
    )


def served(prompt_tokens: I8, output_tokens: I8, bad: BadLines) -> tuple[I8, dict[str, int]]:
    """Rows of calls that have both, and why the others (and malformed lines) are left out.

    TraceError when nothing is left.
    """
    no_prompt = prompt_tokens == 0
    no_output = (output_tokens == 0) & ~no_prompt
    left_out = {
        MALFORMED: bad.count,
        WITHOUT_PROMPT: int(no_prompt.sum()),
        WITHOUT_OUTPUT: int(no_output.sum()),
    }
    rows = np.flatnonzero(~no_prompt & ~no_output).astype(np.int64)
    if not len(rows):
        told = ", ".join(f"{count:,} {why}" for why, count in left_out.items() if count)
        found = "no usable request" + (f" ({told}; {bad.first[0]})" if bad.first else f" ({told})" if told else "")
        raise TraceError(bad.path, found, "at least one")
    return rows, {why: count for why, count in left_out.items() if count}


def duration_of(arrival_s: F8) -> float:
    """From the first to one mean gap after the last arrival, so that a repetition keeps the rate."""
    span_s = float(arrival_s.max() - arrival_s.min())
    count = len(arrival_s)
    return max(span_s * count / (count - 1) if count > 1 else 0.0, MIN_DURATION_S)


def workload(
    path: Path,
    source: str,
    columns: Columns,
    service_class: ServiceClass,
    duration_s: float,
    left_out: dict[str, int],
    notes: list[str],
) -> Workload:
    """The checked Workload of these columns."""
    classes = np.full(len(columns.arrival_s), int(service_class), dtype=np.uint8)
    table = RequestTable(
        arrival_s=columns.arrival_s,
        prompt_tokens=columns.prompt_tokens,
        cached_tokens=columns.cached_tokens,
        output_tokens=columns.output_tokens,
        max_tokens=default_max_tokens(classes, columns.prompt_tokens, columns.output_tokens),
        service_class=classes,
        session=columns.session,
        next_turn=columns.next_turn,
        think_s=columns.think_s,
        ending=columns.ending,
    )
    made = Workload(
        name=path.name,
        source=source,
        requests=table,
        group=columns.group,
        duration_s=duration_s,
        left_out=left_out,
        notes=tuple(notes),
    )
    return made.in_order().check()
