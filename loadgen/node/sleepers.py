"""Weights off the card and back, as a node's engines are ordered and as their receipts tell it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from loadgen.engine.records import Weights
from schemas.engine import Failure, SetWeights

if TYPE_CHECKING:
    from loadgen.node.stepper import Stepper

REMEMBERED: Final = 64
"""Orders kept for late questions."""
STARTED, ALREADY, BUSY, OTHER_WAY, HOST_FULL, NO_ROOM = range(6)
"""``loadgen.engine.weights.Answer``: the node's logic needs no compiled fleet."""


class Sleepers:
    """Orders about weights, by action."""

    def __init__(self, fleet: Stepper, mates: Callable[[int], Sequence[int]]) -> None:
        """``mates``: the workers of a worker's card."""
        self._fleet = fleet
        self._mates = mates
        self._orders: OrderedDict[tuple[int, str], bool] = OrderedDict()

    def order(self, i: int, command: SetWeights) -> Failure | None:
        """Have worker ``i``'s weights leave or come back; None: under way, or so already."""
        answer = int(self._fleet.set_weights(i, command.on_card))
        if answer in (STARTED, ALREADY):
            self._orders[i, command.action_id] = command.on_card
            while len(self._orders) > REMEMBERED:
                self._orders.popitem(last=False)
            return None
        weights = self._fleet.weights(i)
        if answer == HOST_FULL:
            return Failure("tier_full", "no room for the weights in host memory", {"bytes": float(weights.bytes)})
        if answer == NO_ROOM:
            lacking = float(weights.lacking_bytes)
            return Failure("busy", "no room on the card for the weights", {"lacking_bytes": lacking})
        said = "a copy the other way is under way" if answer == OTHER_WAY else "it has requests, or it starts"
        return Failure("busy", said)

    def receipt(self, i: int, action_id: str) -> tuple[bool, str]:
        """Whether an order's effect is there, and words about it; (True, "") for an action that was none."""
        on_card = self._orders.get((i, action_id))
        if on_card is None:
            return True, ""
        weights = self._fleet.weights(i)
        wanted = Weights.AWAKE if on_card else Weights.ASLEEP
        if weights.state == wanted:
            return True, f"weights {'on' if on_card else 'off'} the card: {weights.bytes / 1e9:.1f} GB"
        if weights.state == (Weights.RETURNING if on_card else Weights.LEAVING):
            return False, f"{weights.left_bytes / 1e9:.1f} of {weights.bytes / 1e9:.1f} GB still to be copied"
        return True, f"weights {'off' if on_card else 'on'} the card: another order came since"

    def capacity_bytes(self, i: int, now_bytes: int) -> int:
        """KV capacity of worker ``i``'s card with all weights on it, of what it is now."""
        mates = map(self._fleet.weights, self._mates(i))
        return now_bytes - sum(one.bytes for one in mates if one.state == Weights.ASLEEP)
