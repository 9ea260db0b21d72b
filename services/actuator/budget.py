"""One movement budget per card: how long the card may move KV in a step, and who gets it first.

Host transfers and in-card compaction draw on one budget in *seconds of movement per step*: prefetch first (somebody
waits for it), swap-out next, compaction with what is left (DESIGN section 5). Compaction reads and writes HBM at the
rate at which decoding does, so it has a second bound: so many milliseconds in each gap between two decode iterations,
which is what a client feels. A copy engine on the host link takes a hundredth of that bandwidth, and a bound in the
gap would only make it late. The budget halves when the card's TPOT leaves its limit and recovers slowly. Pure.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

F8 = NDArray[np.float64]

SCALE_LOW: Final = 1 / 64
"""A card in trouble keeps this share of its budget: at zero, eviction could never end what causes the trouble."""

RECOVERY: Final = 0.05
"""Share of the whole budget regained per step within the limit: 20 steps (40 s) from nothing to all."""


class Split(msgspec.Struct, frozen=True):
    """What a card's workers may move in a step, each array in bytes as it was asked for."""

    prefetch_bytes: F8
    evict_bytes: F8
    compact_bytes: F8


def in_gaps(step_s: float, gap_s: float, iteration_s: float) -> float:
    """Seconds of compaction in a step of a card at most: ``gap_s`` in each decode gap.

    ``iteration_s``: the longest mean gap of the card's workers, so that none has more than ``gap_s`` in its own;
    0: nothing decodes, or nobody knows, and the whole step is there.
    """
    return step_s if iteration_s <= 0 else step_s / iteration_s * gap_s


def cards_in_gaps(step_s: float, gap_s: float, iteration_s: F8) -> F8:
    """:func:`in_gaps` for many cards: float64 [cards] -> float64 [cards]."""
    decodes = iteration_s > 0
    return np.where(decodes, step_s / np.where(decodes, iteration_s, 1.0) * gap_s, step_s)


def next_scale(scale: float, over_limit: bool) -> float:
    """Share of the budget a card has next, SCALE_LOW to 1."""
    return max(scale / 2, SCALE_LOW) if over_limit else min(scale + RECOVERY, 1.0)


def next_scales(scales: F8, over_limit: NDArray[np.bool_]) -> F8:
    """:func:`next_scale` for many cards: float64 [cards], bool [cards] -> float64 [cards]."""
    return np.where(over_limit, np.maximum(scales / 2, SCALE_LOW), np.minimum(scales + RECOVERY, 1.0))


def share(want: float, available: float) -> float:
    """The part of a demand that fits, 0 to 1; 1 when nothing is wanted."""
    available = max(available, 0.0)  # what is left may be a rounding error below nothing
    return 1.0 if want <= available else available / want


def shares(want: F8, available: F8) -> F8:
    """:func:`share` elementwise."""
    available = np.maximum(available, 0.0)
    return np.where(want <= available, 1.0, available / np.where(want > 0, want, 1.0))


def per_card(cards: NDArray[np.int64], values: F8, count: int) -> F8:
    """Sums of ``values`` float64 [n] by card number int64 [n], float64 [count]."""
    return np.bincount(cards, weights=values, minlength=count).astype(np.float64, copy=False)


def longest(cards: NDArray[np.int64], values: F8, count: int) -> F8:
    """The greatest of ``values`` float64 [n] by card number int64 [n], float64 [count]; 0 where there is none."""
    greatest = np.zeros(count)
    np.maximum.at(greatest, cards, values)
    return greatest


def split(
    cards: NDArray[np.int64],
    budget_s: F8,
    compact_s: F8,
    link_bytes_per_s: F8,
    copy_bytes_per_s: float,
    prefetch_want: F8,
    evict_want: F8,
    compact_want: F8,
) -> Split:
    """Deal each card's seconds out in the fixed order; workers of one kind share in proportion to their wants.

    ``cards`` int64 [n] numbers each worker's card 0..c-1; ``budget_s`` float64 [c] seconds, of which
    compaction may have ``compact_s``; the link's rate and the wants float64 [n], bytes/s and bytes.
    """
    count = len(budget_s)
    left = budget_s.astype(np.float64, copy=True)
    granted = []
    copy_rate = np.full(len(cards), copy_bytes_per_s)
    for want, rate, most in ((prefetch_want, link_bytes_per_s, np.inf), (evict_want, link_bytes_per_s, np.inf),
                             (compact_want, copy_rate, compact_s)):  # fmt: skip
        asked = per_card(cards, want / rate, count)
        part = shares(asked, np.minimum(left, most))
        left -= asked * part
        granted.append(want * part[cards])
    return Split(*granted)
