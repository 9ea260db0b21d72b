"""Small workloads made by hand."""

from __future__ import annotations

import numpy as np

from loadgen.requests import RequestTable, default_max_tokens
from loadgen.workload import Workload


def workload(
    arrival_s: list[float],
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    next_turn: list[int] | None = None,
    think_s: list[float] | None = None,
    cached: list[int] | None = None,
    group: list[int] | None = None,
    duration_s: float = 100.0,
) -> Workload:
    """NaN arrivals are later turns; sessions follow from ``next_turn``."""
    count = len(arrival_s)
    following = np.array(next_turn or [-1] * count, dtype=np.int64)
    session = np.arange(count, dtype=np.int64)
    for row, after in enumerate(following):
        if after >= 0:
            session[after] = session[row]
    prompts = np.array(prompt or [100] * count, dtype=np.int64)
    outputs = np.array(output or [10] * count, dtype=np.int64)
    classes = np.zeros(count, dtype=np.uint8)
    table = RequestTable(
        arrival_s=np.array(arrival_s, dtype=np.float64),
        prompt_tokens=prompts,
        cached_tokens=np.array(cached or [0] * count, dtype=np.int64),
        output_tokens=outputs,
        max_tokens=default_max_tokens(classes, prompts, outputs),
        service_class=classes,
        session=session,
        next_turn=following,
        think_s=np.array(think_s or [0.0] * count, dtype=np.float64),
    )
    groups = session if group is None else np.array(group, dtype=np.int64)
    return Workload(name="by hand", source="test", requests=table, group=groups, duration_s=duration_s).check()
