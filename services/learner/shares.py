"""How much of the replay each worker holds, so that one that floods the stream cannot push out all others. Pure."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

ACTIVE_NS: Final = 600_000_000_000
"""A worker counts as one of the fleet for so long after its last row."""
_NOBODY: Final = -1


class Shares:
    """Owners of the places of a ring of ``capacity`` rows, by worker slot 0, 1, ...

    A worker may hold ``factor`` times capacity / workers heard of lately. Fair shares are counted over those alone:
    where most have gone, the few that stay get the room that they leave.
    """

    def __init__(self, capacity: int, factor: float) -> None:
        self._capacity, self._factor = capacity, factor
        self._owners = np.full(capacity, _NOBODY, np.int32)
        self._held = np.zeros(64, np.int64)
        self._heard_ns = np.full(64, -ACTIVE_NS - 1, np.int64)

    def held(self, slot: int) -> int:
        """Rows of a worker in the ring."""
        return int(self._held[slot]) if slot < len(self._held) else 0

    def excess(self, slots: NDArray[np.int64], now_ns: int) -> NDArray[np.bool_]:
        """bool [n]: rows of these workers (each named once) for which there is no room left."""
        self._grow(int(slots.max(initial=0)) + 1)
        self._heard_ns[slots] = now_ns
        active = int((self._heard_ns >= now_ns - ACTIVE_NS).sum())
        room = max(1.0, self._factor * self._capacity / max(1, active))
        return np.asarray(self._held[slots] >= room)

    def take(self, slots: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Rows of workers [n] were written to these places [n], each named once."""
        before = self._owners[places]
        np.subtract.at(self._held, before[before != _NOBODY], 1)
        self._owners[places] = slots
        np.add.at(self._held, slots, 1)

    def _grow(self, need: int) -> None:
        have = len(self._held)
        if need > have:
            more = max(need, 2 * have) - have
            self._held = np.concatenate([self._held, np.zeros(more, np.int64)])
            self._heard_ns = np.concatenate([self._heard_ns, np.full(more, -ACTIVE_NS - 1, np.int64)])
