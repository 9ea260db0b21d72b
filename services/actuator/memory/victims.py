"""Which idle sessions leave the card, and how: by what they free against what bringing them back will cost. Pure.

A session that stays away frees its bytes for as long as it is away, and costs the way out, and with the chance
that it comes back the way back: over the link or by computing its prompt again, whichever is cheaper. Costs are
*prices of resources*, seconds of the link and of the GPU, each weighted by how scarce it is now; never the latency
of one request: the GPU is scarce while the link idles (DESIGN section 5).
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.returns import ReturnEstimator

F8 = NDArray[np.float64]
I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]

_CHEAPEST: Final = 0.02
"""Price of a second of an idle resource: not nothing, or a useless transfer would cost nothing."""

_FREE: Final = 1e-9
"""Price of what costs nothing, so that larger sessions still come before smaller ones."""


class Prices(msgspec.Struct, frozen=True):
    """What a second of each resource is worth; 1 = a second of a saturated GPU."""

    gpu_s: float = 1.0
    link_s: float = 0.1


def prices(gpu_busy: float, link_busy: float) -> Prices:
    """Prices from the shares of time in which GPU and link are busy, 0 to 1 each: an idle second costs next to
    nothing, a saturated one all. ValueError outside 0 to 1."""
    for name, busy in (("gpu_busy", gpu_busy), ("link_busy", link_busy)):
        if not 0 <= busy <= 1:
            raise ValueError(f"{name} {busy}: expected within 0 to 1")
    return Prices(max(gpu_busy, _CHEAPEST), max(link_busy, _CHEAPEST))


class Machine(msgspec.Struct, frozen=True):
    """Measured rates: the way out and back, bytes/s, and prefill, tokens/s."""

    out_bytes_per_s: float
    back_bytes_per_s: float
    prefill_tokens_per_s: float


class Way(IntEnum):
    """How a session leaves the card."""

    FREE = 0
    """A lower tier has it already: nothing moves."""
    SWAP = 1
    DROP = 2
    """It has ended as far as one can tell, or computing it again is cheaper than carrying it: nothing moves."""


@dataclasses.dataclass(frozen=True, eq=False)
class Idle:
    """Sessions that may leave, n of them."""

    size_bytes: F8
    """float64 [n], > 0: what each has on the card."""
    tokens: F8
    """float64 [n]: what recomputing it prefills; shared prefixes that stay on the card do not count."""
    missing_bytes: F8
    """float64 [n]: what no lower tier has yet; 0 = the copy is complete."""
    returns: F8
    """float64 [n], 0 to 1: chance that it comes back within the horizon."""
    away_s: F8
    """float64 [n]: expected seconds away out of the horizon (``ReturnEstimator.mean_away``)."""


def idle_sessions(
    estimator: ReturnEstimator,
    sessions: I8,
    size_bytes: F8,
    tokens: F8,
    missing_bytes: F8,
    now_s: float,
    horizon_s: float = 600.0,
) -> Idle:
    """Waiting sessions, int64 [n], with what the estimator expects of them in the next ``horizon_s`` seconds (how
    far ahead the choice looks: beyond that, others will have come and gone). UnknownSession."""
    return Idle(
        size_bytes,
        tokens,
        missing_bytes,
        estimator.within(sessions, now_s, horizon_s),
        estimator.mean_away(sessions, now_s, horizon_s),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """Who leaves, in order, and how; ``freed_bytes`` may fall short of what was needed."""

    rows: I8
    """int64 [k], rows of the Idle."""
    ways: NDArray[np.uint8]
    """uint8 [k], a Way each."""
    freed_bytes: float
    moved_bytes: float


def costs(idle: Idle, machine: Machine, price: Prices, *, swap_allowed: bool = True) -> tuple[F8, NDArray[np.uint8]]:
    """Expected price of letting each go by its cheapest way, float64 [n], and that Way, uint8 [n].

    Where swapping is forbidden (the class) or pointless (a full tier) the way is FREE or DROP.
    """
    gpu = idle.tokens / machine.prefill_tokens_per_s * price.gpu_s
    back = idle.size_bytes / machine.back_bytes_per_s * price.link_s
    dropped = idle.returns * gpu
    swapped = idle.missing_bytes / machine.out_bytes_per_s * price.link_s + idle.returns * np.minimum(back, gpu)
    complete = idle.missing_bytes <= 0
    way = np.where(complete, Way.FREE, np.where(swapped < dropped, Way.SWAP, Way.DROP)).astype(np.uint8)
    if not swap_allowed:
        way = np.where(complete, Way.FREE, Way.DROP).astype(np.uint8)
    return np.where(way == Way.DROP, dropped, swapped), way


def choose(
    idle: Idle,
    needed_bytes: float,
    machine: Machine,
    price: Prices,
    *,
    out_budget_bytes: float = np.inf,
    tier_free_bytes: float = np.inf,
    swap_allowed: bool = True,
) -> Choice:
    """The sessions with the most byte-seconds freed for a price, until ``needed_bytes`` are free; none too many.

    Swaps stop at ``out_budget_bytes`` (the card's movement budget) and ``tier_free_bytes``; a session beyond them
    is passed over unless it leaves without a move, so a full tier makes nobody wait and loses nothing dear.
    """
    price_of, way = costs(idle, machine, price, swap_allowed=swap_allowed)
    worth = idle.size_bytes * idle.away_s / (price_of + _FREE)
    budget = min(out_budget_bytes, tier_free_bytes)
    taken: list[int] = []
    freed = moved = 0.0
    for row in np.argsort(-worth, kind="stable").tolist():
        if freed >= needed_bytes:
            break
        missing = float(idle.missing_bytes[row]) if way[row] == Way.SWAP else 0.0
        if moved + missing > budget:
            continue
        taken.append(row)
        freed += float(idle.size_bytes[row])
        moved += missing
    for row in reversed(taken.copy()):  # the least worthy first
        size = float(idle.size_bytes[row])
        if freed - size >= needed_bytes:
            taken.remove(row)
            freed -= size
            moved -= float(idle.missing_bytes[row]) if way[row] == Way.SWAP else 0.0
    rows = np.array(taken, dtype=np.int64)
    return Choice(rows, way[rows], freed, moved)
