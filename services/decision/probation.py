"""Two policies side by side: which workers a new champion acts on while it is on probation. Pure.

They are a share of all, chosen by hash: from the policy's version and the worker ids of a node alone, so that every
copy of decision makes the same choice and another champion is tried on other workers. A card's workers stay together,
since what the reward measures is the card's; only where the fleet is one card are they parted. A node with several
cards has some on either side; of nodes with one, a share of the nodes is on each.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.identity import card_of
from services.decision.policy import Choice

_FULL: Final = 1 << 64


@lru_cache(maxsize=16_384)
def tried_on(workers: tuple[str, ...], version: str, share: float, part_cards: bool = False) -> tuple[bool, ...]:
    """For each worker of a node whether the champion ``version`` acts on it. ``share``: of the cards, above 0, to 1;
    ``part_cards``: of the workers instead."""
    units = workers if part_cards else tuple(map(card_of, workers))
    known = list(dict.fromkeys(units))
    if share >= 1.0 or not known:
        return (True,) * len(workers)
    if len(known) == 1:
        return (_place(known[0], version) < share,) * len(workers)
    count = _part(share, len(known))
    chosen = set(sorted(known, key=lambda unit: (_place(unit, version), unit))[:count])
    return tuple(unit in chosen for unit in units)


class Split(NamedTuple):
    """How a fleet is parted, as the champion's pointer carries it."""

    share: float
    part_cards: bool = False


def split_for(nodes: Sequence[Sequence[str]], version: str, wanted: float) -> Split:
    """The split nearest to the share ``wanted`` that leaves some of the fleet's workers, by node, on either side; share
    1 for a fleet of less than two."""
    fleet = [list(dict.fromkeys(map(card_of, workers))) for workers in nodes if workers]
    cards = [card for node in fleet for card in node]
    if wanted >= 1.0 or sum(map(len, nodes)) < 2:
        return Split(1.0)
    if len(cards) == 1:
        return Split(wanted, part_cards=True)
    if any(len(node) > 1 for node in fleet):
        return Split(wanted)
    places = sorted(_place(card, version) for card in cards)
    count = _part(wanted, len(places))
    return Split((places[count - 1] + places[count]) / 2.0)


def _part(share: float, count: int) -> int:
    """How many of ``count`` are a share: not none and not all."""
    return min(max(int(share * count + 0.5), 1), count - 1)


def merged(choice: Choice, former: Choice, stays: NDArray[np.bool_]) -> Choice:
    """``former``'s choice in the rows that ``stays`` [n] names, ``choice`` in the others; where widen and tighten jump
    to is left as it is in ``choice``."""
    column = stays[:, None]
    q_values, vetoed = choice.q_values, choice.vetoed
    if q_values is not None or former.q_values is not None:
        ours, theirs = [np.float32(np.nan) if one.q_values is None else one.q_values for one in (choice, former)]
        q_values = np.where(column, theirs, ours)
    if vetoed is not None or former.vetoed is not None:
        mine, its = [np.False_ if one.vetoed is None else one.vetoed for one in (choice, former)]
        vetoed = np.where(column, its, mine)
    return Choice(
        np.where(stays, former.actions, choice.actions),
        np.where(stays, former.probabilities, choice.probabilities),
        q_values,
        choice.goal_rho,
        vetoed,
    )


def _place(unit: str, version: str) -> float:
    """From 0 to 1, evenly spread; another hash than that of the canary mode, whose share must not be one side."""
    digest = blake2b(f"{version}\n{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / _FULL
