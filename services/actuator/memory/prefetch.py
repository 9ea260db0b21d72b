"""When a session comes back to the card before its client does, and whether a request loads or recomputes. Pure.

A prefetch must be finished before the return, may only take memory that nobody needs until then, and only a link
that nobody waits for: one that takes memory from running requests costs more than it saves. A load has a deadline,
the limit its class promises, and is priced by the resources it uses; not by which of the two would be faster
(DESIGN section 5: that choice costs 5 to 30 % of goodput).
"""

from __future__ import annotations

import dataclasses
import math
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.returns import ReturnEstimator
from services.actuator.memory.victims import Machine, Prices

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]

_NOTHING: Final = np.empty(0, dtype=np.int64)


class PrefetchSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a prefetch is worth it."""

    early_share: float = 0.25
    """A prefetch must be done before this share of the returns, 0 to 1: earlier holds memory for longer, later
    misses the quick ones."""
    margin_s: float = 0.5
    """Slack before that instant, seconds: the link's rate varies."""
    hold_s: float = 30.0
    """How long a session that did not come is kept before its place counts as wasted, seconds."""
    least_chance: float = 0.5
    """Chance of a return within load and hold below which nothing is fetched, 0 to 1."""
    idle_link_s: float = 0.05
    """Backlog up to which the link counts as idle, seconds."""


@dataclasses.dataclass(frozen=True, eq=False)
class Away:
    """Sessions in a lower tier, n of them."""

    size_bytes: F8
    """float64 [n]."""
    tokens: F8
    """float64 [n]: what a recompute would prefill."""
    early_s: F8
    """float64 [n]: seconds from now by which ``early_share`` of the returns have come
    (``ReturnEstimator.quantile``)."""
    chance: F8
    """float64 [n]: chance of a return within :func:`windows`."""


class Headroom(msgspec.Struct, frozen=True):
    """Memory of the card that is free now and will still be ``at_s`` seconds from now, when running and admitted
    requests have grown: the least of both is what a prefetch may take. ``link_backlog_s``: queued on the link."""

    free_bytes: float
    forecast_free_bytes: float
    link_backlog_s: float


def load_seconds(size_bytes: F8, machine: Machine) -> F8:
    """How long each takes over the link alone, float64 [n]."""
    return size_bytes / machine.back_bytes_per_s


def windows(size_bytes: F8, machine: Machine, settings: PrefetchSettings) -> F8:
    """Seconds from now within which each must come back for a prefetch begun now to be of use, float64 [n]."""
    return load_seconds(size_bytes, machine) + settings.margin_s + settings.hold_s


def away_sessions(
    estimator: ReturnEstimator,
    sessions: I8,
    size_bytes: F8,
    tokens: F8,
    now_s: float,
    machine: Machine,
    settings: PrefetchSettings,
) -> Away:
    """Waiting sessions, int64 [n], with what the estimator expects of them. UnknownSession."""
    chance = estimator.within(sessions, now_s, windows(size_bytes, machine, settings))
    return Away(size_bytes, tokens, estimator.quantile(sessions, now_s, settings.early_share), chance)


def starts(away: Away, machine: Machine, settings: PrefetchSettings) -> F8:
    """Seconds from now at which each prefetch should begin to be done in time, float64 [n]; <= 0 = due."""
    return away.early_s - load_seconds(away.size_bytes, machine) - settings.margin_s


def due(
    away: Away,
    headroom: Headroom,
    machine: Machine,
    price: Prices,
    settings: PrefetchSettings,
    budget_bytes: float = math.inf,
) -> I8:
    """Rows to fetch now, best first, int64 [k].

    In order of GPU time saved (chance x prefill, less the link's price) a byte; within ``budget_bytes`` of the
    card's movement budget and the headroom. None over a link that somebody waits for.
    """
    if headroom.link_backlog_s > settings.idle_link_s:
        return _NOTHING
    room = min(headroom.free_bytes, headroom.forecast_free_bytes, budget_bytes)
    saved = away.chance * away.tokens / machine.prefill_tokens_per_s * price.gpu_s
    saved = saved - load_seconds(away.size_bytes, machine) * price.link_s
    ready = (starts(away, machine, settings) <= 0) & (away.chance >= settings.least_chance) & (saved > 0)
    chosen = []
    for row in np.argsort(-saved / away.size_bytes, kind="stable").tolist():
        if ready[row] and away.size_bytes[row] <= room:
            chosen.append(row)
            room -= float(away.size_bytes[row])
    return np.array(chosen, dtype=np.int64)


class Source(IntEnum):
    """Where a request's KV comes from."""

    LOAD = 0
    RECOMPUTE = 1


def load_or_recompute(
    size_bytes: float,
    tokens: float,
    deadline_s: float,
    machine: Machine,
    price: Prices,
    *,
    link_backlog_s: float = 0.0,
    prefill_backlog_s: float = 0.0,
) -> Source:
    """Which resources to spend on a request whose KV is in a lower tier.

    The cheaper of those that meet ``deadline_s`` (seconds from now, by its class's limit; inf = none); the cheaper
    of both when neither does, since a late answer is no reason to waste the scarcer resource.
    """
    load_s = size_bytes / machine.back_bytes_per_s
    prefill_s = tokens / machine.prefill_tokens_per_s
    loads_in_time = link_backlog_s + load_s <= deadline_s
    computes_in_time = prefill_backlog_s + prefill_s <= deadline_s
    if loads_in_time != computes_in_time:
        return Source.LOAD if loads_in_time else Source.RECOMPUTE
    return Source.LOAD if load_s * price.link_s <= prefill_s * price.gpu_s else Source.RECOMPUTE
