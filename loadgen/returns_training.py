"""Teaching the return estimator on session traces, with nothing from the future.

A workload's turns become :class:`Waits` on the clock of its trace. :func:`walk` replays their ends and returns in the
order of time, so at any instant the estimator knows what an engine would: sessions that still wait are counted as
such, and nobody tells it of an end. :func:`told` writes what it says at each turn's end into a request table.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from loadgen.requests import F8, I8, NO_TURN, U1, RequestTable
from loadgen.traces.splits import SESSION_PARTS, SESSION_TRAIN, SESSION_VALIDATE
from loadgen.workload import Workload
from loadgen.workload.chains import nominal_call_s, start_times
from schemas.classes import ServiceClass
from schemas.endings import Ending
from services.actuator.memory.return_rates import HORIZON_S
from services.actuator.memory.returns import ReturnEstimator

TRAIN_SHARE: Final = 0.6
"""Share of a trace's turns that ends before the cut."""
ENDED_CHANCE: Final = 0.8
"""A session that has ended with this chance or more is told as ended: what is wrongly dropped is computed again, what
is wrongly kept goes when memory is short. Chosen on training configurations (0.5 costs 1 to 6 % with long sessions)."""
ADVANCE_EVERY_S: Final = 5.0
CLIENT_COLUMNS: Final = "client,t_s,rate_rps"
CLIENT_WINDOW_S: Final = 600.0
_CALL_S: Final = 1e-3
"""How long a drawn call is taken to last: something, so that its end comes after the return before it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Waits:
    """What follows each turn, arrays [n]; a session's rows are in its order."""

    session: I8
    kind: I8
    at_s: F8
    """float64, seconds of the trace's clock: the turn's end."""
    gap_s: F8
    """float64, seconds to the next turn; inf when none follows."""
    end_s: float
    """The trace's end: who is away then may still come back."""
    ending: U1 | None = None
    """uint8, an Ending each: how the turn ended. None: the trace does not say."""

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def watched_s(self) -> F8:
        """float64 [n]: how long one could have seen a return."""
        return self.end_s - self.at_s

    def take(self, rows: I8) -> Waits:
        ending = None if self.ending is None else self.ending[rows]
        return Waits(self.session[rows], self.kind[rows], self.at_s[rows], self.gap_s[rows], self.end_s, ending)

    def without_endings(self) -> Waits:
        """The same where nobody says how a turn ended."""
        return dataclasses.replace(self, ending=None)


def waits_of(workload: Workload) -> Waits:
    """The waits of a workload. Calls last nominally; the sessions of a session table are whole (the last turn is an
    end), those of other traces are cut at the trace's end."""
    waits = waits_in(workload.in_order().requests, workload.duration_s)
    if workload.warm_start_s > 0:  # a session table
        return dataclasses.replace(waits, end_s=float(waits.at_s.max(initial=0.0)) + 2 * HORIZON_S)
    return waits


def waits_in(table: RequestTable, end_s: float) -> Waits:
    """The waits of a table whose turns begin before ``end_s``."""
    at_s = start_times(table) + nominal_call_s(table)
    gap_s = np.where(table.next_turn == NO_TURN, np.inf, table.think_s)
    return Waits(table.session, table.service_class.astype(np.int64), at_s, gap_s, end_s, table.ending)


def teaching_sessions(workload: Workload) -> Workload:
    """The sessions that may teach or be examined here; the others are kept for the final examination."""
    parts = (*SESSION_TRAIN, *SESSION_VALIDATE)
    return workload.take(np.flatnonzero(np.isin(workload.group % SESSION_PARTS, parts)).astype(np.int64))


def walk(
    estimator: ReturnEstimator,
    waits: Waits,
    *,
    from_s: float = -np.inf,
    until_s: float = np.inf,
    ask: Callable[[int], None] | None = None,
    advance_every_s: float = np.inf,
) -> None:
    """Replay what happens in [from_s, until_s) and before the trace's end; ``ask(row)`` is called as each wait begins.

    The waiting so far of those that still wait is counted at the end of the stretch, and every ``advance_every_s``.
    """
    until_s = min(until_s, waits.end_s)
    rows = np.arange(len(waits))
    came = np.isfinite(waits.gap_s)
    when_s = np.concatenate([waits.at_s, (waits.at_s + waits.gap_s)[came]])
    key = np.concatenate([2 * rows, 2 * rows[came] + 1])  # at one instant: an end, its return, the next turn's end
    here = (when_s >= from_s) & (when_s < until_s)
    when_s, key = when_s[here], key[here]
    order = np.lexsort((key, when_s))
    session, kind = waits.session.tolist(), waits.kind.tolist()
    told_of = [Ending.UNKNOWN] * len(waits) if waits.ending is None else [Ending(one) for one in waits.ending.tolist()]
    due_s = when_s[order[0]] + advance_every_s if len(order) else np.inf
    for now_s, event in zip(when_s[order].tolist(), key[order].tolist(), strict=True):
        row, back = divmod(event, 2)
        if now_s >= due_s:
            estimator.advance(now_s)
            due_s = now_s + advance_every_s
        if back:
            estimator.returned(session[row], now_s)
            continue
        estimator.finished(session[row], kind[row], now_s, told_of[row])
        if ask is not None:
            ask(row)
    estimator.advance(until_s)


def cut_of(waits: Waits, share: float = TRAIN_SHARE) -> float:
    """The instant before which this share of the turns ended, seconds."""
    return float(np.quantile(waits.at_s, share)) if len(waits) else 0.0


def told(estimator: ReturnEstimator, table: RequestTable, ended_chance: float = ENDED_CHANCE) -> RequestTable:
    """The table with ``expected_think_s`` as the estimator says when each turn ends, and learns on from what it sees.

    The median time of those that return; inf where an end is likely. Of other sessions it knows what would have
    happened by then if calls lasted nominally; of its own, exactly what has happened.
    """
    waits = waits_in(table, np.inf)
    at_s = waits.at_s
    waits = dataclasses.replace(waits, end_s=float(at_s.max(initial=0.0)) + 1.0)
    expected_s = np.full(len(table), np.nan)
    single = np.empty(1, dtype=np.int64)

    def ask(row: int) -> None:
        single[0] = waits.session[row]
        gone = estimator.ended(single, at_s[row])[0] >= ended_chance
        expected_s[row] = np.inf if gone else estimator.quantile(single, at_s[row], 0.5)[0]

    walk(estimator, waits, ask=ask, advance_every_s=ADVANCE_EVERY_S)
    return dataclasses.replace(table, expected_think_s=expected_s)


def with_gaps_of(table: RequestTable, waits: Waits, rng: np.random.Generator) -> RequestTable:
    """The table's sessions with the think times of a trace's and with how the turns before them ended: each session
    takes those of one drawn session, from a drawn turn on, and begins again at its first turn when it runs out. Its
    last turn ends as that session's last one did."""
    gaps: dict[int, list[float]] = {}
    endings: dict[int, list[int]] = {}
    last: dict[int, int] = {}
    said = np.zeros(len(waits), dtype=np.uint8) if waits.ending is None else waits.ending
    for session, gap_s, ending in zip(waits.session.tolist(), waits.gap_s.tolist(), said.tolist(), strict=True):
        last[session] = ending
        if gap_s <= HORIZON_S:
            gaps.setdefault(session, []).append(gap_s)
            endings.setdefault(session, []).append(ending)
    numbers = [session for session, one in gaps.items() if len(one) > 1]
    kept = [np.array(gaps[session]) for session in numbers]
    weights = np.array([len(one) for one in kept], dtype=np.float64)
    think_s, ended = table.think_s.copy(), np.zeros(len(table), dtype=np.uint8)
    for first in np.flatnonzero(table.is_first).tolist():
        drawn = int(rng.choice(len(kept), p=weights / weights.sum()))
        own, how = kept[drawn], endings[numbers[drawn]]
        turn, row = int(rng.integers(len(own))), first
        while table.next_turn[row] != NO_TURN:
            think_s[row], ended[row] = own[turn % len(own)], how[turn % len(own)]
            turn, row = turn + 1, int(table.next_turn[row])
        ended[row] = last[numbers[drawn]]
    return dataclasses.replace(table, think_s=think_s, ending=None if waits.ending is None else ended)


def is_client_rates(path: Path) -> bool:
    """Whether the file is a table of clients' request rates by 10 minutes (ServeGen's); what is wrong with one that
    cannot be read, the trace reader says."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            return file.readline(200).startswith(CLIENT_COLUMNS)
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return False


def client_waits(path: Path, days: float, rate_per_s: float, seed: int) -> Waits:
    """Calls of API clients over the table's first ``days``, drawn from their rates by 10 minutes scaled to
    ``rate_per_s`` in all; a client counts as a session. Recorded rates, drawn calls: Poisson within a window."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        rows = [(int(row["client"]), float(row["t_s"]), float(row["rate_rps"])) for row in csv.DictReader(file)]
    cells = np.array([row for row in rows if row[1] < days * 86_400.0])
    rng = np.random.default_rng(seed)
    mean = cells[:, 2].sum() * CLIENT_WINDOW_S / (days * 86_400.0)
    counts = rng.poisson(cells[:, 2] * CLIENT_WINDOW_S * rate_per_s / mean)
    client = np.repeat(cells[:, 0], counts).astype(np.int64)
    at_s = np.repeat(cells[:, 1], counts) + rng.uniform(0.0, CLIENT_WINDOW_S, int(counts.sum()))
    order = np.lexsort((at_s, client))
    client, at_s = client[order], at_s[order]
    gap_s = np.full(len(at_s), np.inf)
    same = np.flatnonzero(client[1:] == client[:-1])
    gap_s[same] = np.maximum(at_s[same + 1] - at_s[same] - _CALL_S, 0.0)
    return Waits(client, np.full(len(at_s), int(ServiceClass.CHAT), dtype=np.int64), at_s, gap_s, days * 86_400.0)
