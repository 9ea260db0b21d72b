"""More or less of the same load: compressed arrivals, thinned or repeated sessions, longer replays.

Pure. A request alone says only when it came, so a higher rate brings the same requests sooner. A session has
a pace of its own (people think, tools run), which a higher load does not change: there are more sessions.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Final

import numpy as np

from loadgen.requests import I8, Bool, concatenated

if TYPE_CHECKING:
    from loadgen.workload.table import Workload

COPY_JITTER_S: Final = 60.0
"""A repeated session starts within this much of its original: the load's shape over time stays, and the copies
do not ask in the same instant."""


def scaled(workload: Workload, rate_factor: float, seed: int = 0) -> Workload:
    """``rate_factor`` times the request rate over the same ``duration_s``.

    Single calls: arrivals are divided by the factor, then repeated or cut to the duration, so every factor
    keeps the mix and the burstiness. Groups with sessions: thinned (each kept with probability factor) or
    repeated (the whole part of the factor, one more with its fractional part), each at its own pace; a session
    that a lower factor keeps is kept by a higher one, so a search over factors sees a monotone load.
    ValueError for a factor that is not positive and finite.
    """
    if not 0 < rate_factor < float("inf"):
        raise ValueError(f"rate_factor {rate_factor}: expected positive and finite")
    if rate_factor == 1.0 or not len(workload):
        return workload
    in_session = _in_session(workload)
    parts = [
        _compressed(workload.take(np.flatnonzero(~in_session)), rate_factor),
        *_copies(workload.take(np.flatnonzero(in_session)), rate_factor, seed),
    ]
    return _joined(workload, [part for part in parts if len(part)], workload.duration_s)


def looped(workload: Workload, duration_s: float) -> Workload:
    """Repeated end to end, or cut, to last ``duration_s``; a repetition's sessions are new sessions.

    The later turns of one round overlap the next round's starts, as they would in a longer trace.
    """
    if not 0 < duration_s < float("inf"):
        raise ValueError(f"duration_s {duration_s}: expected positive and finite")
    rounds = int(np.ceil(duration_s / workload.duration_s)) if len(workload) else 1
    if rounds <= 1:
        return workload.window(duration_s)
    parts = [_later(workload, turn * workload.duration_s) for turn in range(rounds)]
    return _joined(workload, parts, rounds * workload.duration_s).window(duration_s)


def _compressed(singles: Workload, rate_factor: float) -> Workload:
    arrival_s = singles.requests.arrival_s / rate_factor
    faster = dataclasses.replace(
        singles,
        requests=dataclasses.replace(singles.requests, arrival_s=arrival_s),
        duration_s=singles.duration_s / rate_factor,
    )
    return looped(faster, singles.duration_s)


def _copies(sessions: Workload, rate_factor: float, seed: int) -> list[Workload]:
    groups, member = np.unique(sessions.group, return_inverse=True)
    rng = np.random.default_rng(seed)
    luck = rng.random(len(groups))
    begin_s = np.full(len(groups), np.inf)
    np.minimum.at(begin_s, member, np.nan_to_num(sessions.requests.arrival_s, nan=np.inf))
    copies = []
    for copy in range(int(np.ceil(rate_factor))):
        kept = luck < rate_factor - copy
        part = sessions.take(np.flatnonzero(kept[member]))
        if copy:
            moved_s = np.abs(begin_s + rng.uniform(-COPY_JITTER_S, COPY_JITTER_S, len(groups)))
            over_s = np.maximum(moved_s - sessions.duration_s, 0.0)
            moved_s = np.clip(moved_s - 2 * over_s, 0.0, None)
            part = _later(part, (moved_s - begin_s)[member][kept[member]])
        copies.append(part)
    return copies


def _later(workload: Workload, by_s: float | np.ndarray[tuple[int], np.dtype[np.float64]]) -> Workload:
    arrival_s = np.maximum(workload.requests.arrival_s + by_s, 0.0)
    return dataclasses.replace(workload, requests=dataclasses.replace(workload.requests, arrival_s=arrival_s))


def _in_session(workload: Workload) -> Bool:
    """bool ``(n,)``: the row belongs to a group of more than one call."""
    _, member, size = np.unique(workload.group, return_inverse=True, return_counts=True)
    return np.asarray(size[member] > 1, dtype=np.bool_)


def _joined(like: Workload, parts: list[Workload], duration_s: float) -> Workload:
    groups: list[I8] = []
    offset = 0
    for part in parts:
        groups.append(part.group + offset)
        offset += int(part.group.max(initial=-1)) + 1
    return dataclasses.replace(
        like,
        requests=concatenated([part.requests for part in parts]),
        group=np.concatenate(groups) if groups else like.group[:0],
        duration_s=duration_s,
    ).in_order()
