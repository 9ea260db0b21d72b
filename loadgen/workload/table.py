"""A workload: requests of all clients, before they are shared out to workers.

Pure. Everything here returns a new workload; arrays are never changed in place. What was left out is counted
and goes along, because every report states it.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from loadgen.requests import I8, NO_TURN, RequestTable, concatenated, default_max_tokens
from loadgen.workload import scaling
from loadgen.workload.chains import start_times, turns
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass

TOO_LONG: Final = "calls longer than the context"
AFTER_TOO_LONG: Final = "later calls of those sessions"


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """Requests (``requests``, n rows) with where they come from and what was left out."""

    name: str
    """What a report calls it: a file's name or ``built-in chat``."""
    source: str
    """The format it was read from or the generator's parameters; one line."""
    requests: RequestTable
    """All requests; arrivals in seconds from the workload's start."""
    group: I8
    """int64 ``(n,)``: sessions of one user (an agent and its subagents) share a group: they start together,
    go to one worker and are thinned together."""
    duration_s: float
    """Length of the stretch in which first turns arrive, seconds, > 0; later turns may come after it."""
    left_out: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Why requests of the source are not here, and how many."""
    warm_start_s: float = 0.0
    """Where an excerpt begins, seconds: a session table starts with no session open, so its load is in balance
    only later. 0 where it is from the start."""
    notes: tuple[str, ...] = ()
    """Lines that a report repeats: assumptions made, repairs done, scales applied."""

    def __len__(self) -> int:
        return len(self.requests)

    def check(self) -> Workload:
        """This workload after its promises were verified; ValueError as ``RequestTable.check``."""
        self.requests.check()
        if self.group.dtype != np.int64 or self.group.shape != (len(self),):
            raise ValueError(f"group: {self.group.dtype} {self.group.shape}, expected int64 {(len(self),)}")
        if not 0 < self.duration_s < float("inf"):
            raise ValueError(f"duration_s: {self.duration_s}, expected positive and finite")
        return self

    def statement(self) -> list[str]:
        """Lines for a report: name, size, what was left out, notes."""
        lines = [f"{self.name}: {len(self):,} requests over {self.duration_s:,.0f} s ({self.source})"]
        lines += [f"left out: {count:,} {why}" for why, count in self.left_out.items() if count]
        return lines + list(self.notes)

    def within_context(self, context_tokens: int) -> Workload:
        """Without calls whose prompt + output exceed ``context_tokens``, nor later calls of such a session
        (its context only grows from there); ``max_tokens`` capped by what the context leaves. Both counted,
        of these rows: apply it after an excerpt to state what a replay lacks, or before to search over loads.
        """
        table = self.requests
        too_long = table.prompt_tokens + table.output_tokens > context_tokens
        gone = too_long.copy()
        for rows, following in turns(table):
            gone[following] |= gone[rows]
        kept = self.take(np.flatnonzero(~gone))
        room = context_tokens - kept.requests.prompt_tokens
        capped = np.minimum(kept.requests.max_tokens, room)
        left_out = dict(self.left_out)
        left_out[TOO_LONG] = left_out.get(TOO_LONG, 0) + int(too_long.sum())
        left_out[AFTER_TOO_LONG] = left_out.get(AFTER_TOO_LONG, 0) + int((gone & ~too_long).sum())
        return dataclasses.replace(
            kept, requests=dataclasses.replace(kept.requests, max_tokens=capped), left_out=left_out
        )

    def with_class(
        self,
        service_class: ServiceClass,
        limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
    ) -> Workload:
        """Every request in this class, with that class's default ``max_tokens``."""
        classes = np.full(len(self), int(service_class), dtype=np.uint8)
        table = dataclasses.replace(self.requests, service_class=classes)
        return dataclasses.replace(self, requests=table).with_limits(limits)

    def with_limits(self, limits: Mapping[ServiceClass, ClassLimits]) -> Workload:
        """``max_tokens`` refilled from other class limits (the examination shows 1024, 4096 and 8192); apply
        ``within_context`` afterwards for a context that is not the default."""
        table = self.requests
        filled = default_max_tokens(table.service_class, table.prompt_tokens, table.output_tokens, limits)
        return dataclasses.replace(self, requests=dataclasses.replace(table, max_tokens=filled))

    def take(self, rows: I8) -> Workload:
        """Only these rows (int64, rising); see ``RequestTable.take``."""
        return dataclasses.replace(self, requests=self.requests.take(rows), group=self.group[rows])

    def window(self, duration_s: float, start_s: float = 0.0) -> Workload:
        """The stretch ``[start_s, start_s + duration_s)``, moved to start at 0.

        A session that is under way at ``start_s`` comes in with its next turn as a first turn (its context is
        cold there: nothing cached). Turns that could not come before the end, even if calls took no time, are
        cut; those at the border stay, since only the replay knows.
        """
        if not (duration_s > 0 and start_s >= 0):
            raise ValueError(f"window of {duration_s} s from {start_s} s: expected positive from 0 on")
        table = self.requests
        nominal_s = start_times(table)
        kept = (nominal_s >= start_s) & (start_times(table, calls_take_time=False) < start_s + duration_s)
        # A session already open at the start begins with the first turn that nominally falls inside.
        before = np.flatnonzero(table.next_turn != NO_TURN)
        comes_in = np.zeros(len(table), dtype=bool)
        comes_in[table.next_turn[before]] = ~kept[before]
        first = table.is_first | comes_in
        kept &= ~first | (nominal_s < start_s + duration_s)
        for rows, following in turns(table):
            kept[following] &= kept[rows] | comes_in[following]
        arrival_s = np.where(first, nominal_s - start_s, np.nan)
        cached = np.where(comes_in, 0, table.cached_tokens)
        moved = dataclasses.replace(table, arrival_s=arrival_s, cached_tokens=cached)
        cut = dataclasses.replace(self, requests=moved, duration_s=duration_s, warm_start_s=0.0)
        return cut.take(np.flatnonzero(kept))

    def excerpt(self, duration_s: float) -> Workload:
        """What a replay of ``duration_s`` uses: from ``warm_start_s`` on, repeated where the source is shorter."""
        end_s = self.warm_start_s + duration_s
        longer = self if end_s <= self.duration_s else self.looped(end_s)
        return longer.window(duration_s, self.warm_start_s)

    def scaled(self, rate_factor: float, seed: int = 0) -> Workload:
        """``rate_factor`` times the request rate over the same ``duration_s``; see ``scaling.scaled``."""
        return scaling.scaled(self, rate_factor, seed)

    def looped(self, duration_s: float) -> Workload:
        """Repeated (or cut) to last ``duration_s``; see ``scaling.looped``."""
        return scaling.looped(self, duration_s)

    def assign(self, workers: int, seed: int = 0) -> list[RequestTable]:
        """One table a worker: groups stay together, tokens (uncached prompt + output) are balanced.

        As a router would: in order of arrival, each group to the worker that has been given the fewest tokens
        so far; ``seed`` orders workers that are level. Rows of a table are sorted by their session's start,
        turns of a session in a row.
        """
        if workers < 1:
            raise ValueError(f"workers {workers}: expected at least 1")
        ordered = self.in_order()
        table = ordered.requests
        groups, first_row, member = np.unique(ordered.group, return_index=True, return_inverse=True)
        tokens = np.bincount(member, table.prompt_tokens - table.cached_tokens + table.output_tokens, len(groups))
        heap = [
            (0.0, int(rank), worker) for worker, rank in enumerate(np.random.default_rng(seed).permutation(workers))
        ]
        heapq.heapify(heap)
        worker_of_group = np.empty(len(groups), dtype=np.int64)
        for index in np.argsort(first_row, kind="stable"):
            load, rank, worker = heap[0]
            worker_of_group[index] = worker
            heapq.heapreplace(heap, (load + float(tokens[index]), rank, worker))
        worker_of = worker_of_group[member]
        return [table.take(np.flatnonzero(worker_of == worker)) for worker in range(workers)]

    def in_order(self) -> Workload:
        """Rows sorted by their session's start, its turns following one another."""
        table = self.requests
        begin_s, turn = np.where(table.is_first, table.arrival_s, 0.0), np.zeros(len(table), dtype=np.int64)
        for rows, following in turns(table):
            begin_s[following] = begin_s[rows]
            turn[following] = turn[rows] + 1
        return self.take(np.lexsort((turn, table.session, begin_s)).astype(np.int64))


def merged(name: str, source: str, parts: Sequence[Workload]) -> Workload:
    """Several workloads at the same time, sessions and groups renumbered; as long as the longest."""
    counted: dict[str, int] = {}
    groups: list[I8] = []
    offset = 0
    for part in parts:
        for why, count in part.left_out.items():
            counted[why] = counted.get(why, 0) + count
        groups.append(part.group + offset)
        offset += int(part.group.max(initial=-1)) + 1
    return Workload(
        name=name,
        source=source,
        requests=concatenated([part.requests for part in parts]),
        group=np.concatenate(groups),
        duration_s=max(part.duration_s for part in parts),
        warm_start_s=max(part.warm_start_s for part in parts),
        left_out=counted,
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    ).in_order()
