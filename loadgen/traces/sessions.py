"""Session tables with the columns of the Weka agentic coding set.

Required: trace_id, t_s, prompt_tokens, output_tokens. Used where present: subagent, think_time_s (client delay
before the call), api_time_s, prefix_hit_blocks64, stop or finish_reason. The sessions have no common clock, so a
seeded Poisson process starts them in the file's order; within a session the file's order is kept.

A subagent runs beside its parent with a context of its own: it becomes a session that starts as long after the
parent's start as recorded, in the parent's group (same worker, thinned together). The parent's own think time
spans it, as recorded.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Final

import numpy as np

from loadgen.requests import F8, I8, NO_TURN
from loadgen.traces.assembly import MIN_DURATION_S, Columns, served, workload
from loadgen.traces.errors import BadLines, MalformedLine
from loadgen.traces.fields import Header, maybe_seconds, seconds, whole
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass
from schemas.endings import ending_of

REQUIRED: Final = ("trace_id", "t_s", "prompt_tokens", "output_tokens")
HIT_BLOCK_TOKENS: Final = 64

DEFAULT_SESSION_RATE_PER_S: Final = 0.05
"""One new session every 20 s: the file does not say; ``Workload.scaled`` sets the load that is wanted."""


def read_sessions(
    lines: Iterable[tuple[int, str]],
    header: Header,
    bad: BadLines,
    service_class: ServiceClass = ServiceClass.AGENT,
    seed: int = 0,
    session_rate_per_s: float = DEFAULT_SESSION_RATE_PER_S,
) -> Workload:
    """Sessions with think time and prefix reuse."""
    place = header.place
    trace_at, t_at, prompt_at, output_at = (place[name] for name in REQUIRED)
    sub_at, think_at, api_at = place.get("subagent"), place.get("think_time_s"), place.get("api_time_s")
    hit_at = place.get("prefix_hit_blocks64")
    stop_at = place.get("stop", place.get("finish_reason"))
    chains: dict[tuple[str, str], int] = {}
    traces: dict[str, int] = {}
    rows: list[tuple[int, int, float, int, int, int, float, float, int]] = []
    for number, text in lines:
        try:
            cells = header.cells(text)
            name = cells[trace_at].strip()
            if not name:
                raise MalformedLine("trace_id", "an empty cell", "a session's name")
            t_s = seconds("t_s", cells[t_at])
            prompt = whole("prompt_tokens", cells[prompt_at])
            output = whole("output_tokens", cells[output_at])
            think_s = math.nan if think_at is None else maybe_seconds("think_time_s", cells[think_at])
            api_s = math.nan if api_at is None else maybe_seconds("api_time_s", cells[api_at])
            hit = -1 if hit_at is None else whole("prefix_hit_blocks64", cells[hit_at]) * HIT_BLOCK_TOKENS
        except MalformedLine as problem:
            bad.add(number, problem)
            continue
        sub = "" if sub_at is None else cells[sub_at].strip()
        chain = chains.setdefault((name, sub), len(chains))
        trace = traces.setdefault(name, len(traces))
        ending = ending_of(None if stop_at is None else cells[stop_at])
        rows.append((chain, trace, t_s, prompt, output, hit, think_s, api_s, ending))
    numbers: F8 = np.array(rows, dtype=np.float64).reshape(len(rows), 9)
    whole_numbers: I8 = numbers[:, :6].astype(np.int64)
    kept, left_out = served(whole_numbers[:, 3], whole_numbers[:, 4], bad)
    kept = kept[np.argsort(whole_numbers[kept, 0], kind="stable")]  # chain after chain, each in file order
    columns, duration_s = _chained(
        numbers[kept], whole_numbers[kept], _group_numbers(list(traces)), seed, session_rate_per_s
    )
    if stop_at is None:
        columns = dataclasses.replace(columns, ending=None)
    source = f"session table; seed {seed}"
    notes = [*bad.notes(), f"sessions started at random, {session_rate_per_s:g}/s (the file has no common clock)"]
    subagents = sum(1 for _, sub in chains if sub)
    if subagents:
        notes.append(f"{subagents:,} subagents replayed as sessions of their own beside their parents")
    made = workload(bad.path, source, columns, service_class, duration_s, left_out, notes)
    return dataclasses.replace(made, warm_start_s=duration_s / 2)  # by then about as many end as begin


def _chained(numbers: F8, whole_numbers: I8, group_of_trace: I8, seed: int, rate_per_s: float) -> tuple[Columns, float]:
    """Rows sorted by chain, with columns chain, trace, t_s, prompt, output, hit, think, api, ending."""
    chain, trace, prompt, output, hit = (whole_numbers[:, index] for index in (0, 1, 3, 4, 5))
    t_s, think_before_s, api_s = numbers[:, 2], numbers[:, 6], numbers[:, 7]
    count = len(chain)
    follows = np.zeros(count, dtype=bool)
    follows[1:] = chain[1:] == chain[:-1]
    later = np.flatnonzero(follows)
    before = later - 1
    context = prompt[before] + output[before]
    # Without a measured hit: a growing prompt holds the context before it, a shorter one was rewritten.
    guessed = np.where(prompt[later] >= prompt[before], context, 0)
    shared = np.where(hit[later] >= 0, hit[later], guessed)
    cached = np.zeros(count, dtype=np.int64)
    cached[later] = np.minimum(np.minimum(shared, context), prompt[later] - 1)
    gap_s = np.maximum(t_s[later] - t_s[before] - np.nan_to_num(api_s[before]), 0.0)
    think_s = np.zeros(count)
    think_s[before] = np.where(np.isnan(think_before_s[later]), gap_s, think_before_s[later])
    next_turn = np.full(count, NO_TURN, dtype=np.int64)
    next_turn[before] = later

    present, member = np.unique(trace, return_inverse=True)
    gaps_s = np.random.default_rng(seed).exponential(1.0 / rate_per_s, len(present))
    starts_s = np.cumsum(gaps_s)
    origin_s = np.full(len(present), np.inf)
    np.minimum.at(origin_s, member, t_s)
    arrival_s = np.where(follows, np.nan, starts_s[member] + t_s - origin_s[member])
    columns = Columns(
        arrival_s=arrival_s,
        prompt_tokens=prompt.copy(),
        output_tokens=output.copy(),
        cached_tokens=cached,
        session=chain.copy(),
        group=group_of_trace[trace],
        next_turn=next_turn,
        think_s=think_s,
        ending=numbers[:, 8].astype(np.uint8),
    )
    return columns, max(float(starts_s[-1]), MIN_DURATION_S)


def _group_numbers(names: list[str]) -> I8:
    """The number in each name (``trace_0042`` is 42) where those are all unlike, otherwise its place."""
    found = [re.search(r"(\d{1,15})$", name, re.ASCII) for name in names]
    numbers = [int(match[1]) for match in found if match]
    if len(numbers) == len(names) and len(set(numbers)) == len(numbers):
        return np.array(numbers, dtype=np.int64)
    return np.arange(len(names), dtype=np.int64)
