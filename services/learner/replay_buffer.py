"""Prioritized replay (Schaul et al. 2016, proportional variant) over one-step rows in structure-of-arrays form.

    P(i) = p_i^alpha / sum_j p_j^alpha          w_i = (N P(i))^-beta / max_j w_j

A row holds two states, so that the last row of a trajectory is as usable as any other: with 57 features
2 x 228 + 35 bytes a row, 98 MB for 200,000 rows, of which an empty buffer occupies almost nothing (the pages
come with the rows).
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

NO_ROW: Final = -1
ANY_ACTION: Final = 255
NOTHING_SHOWN: Final = 255
_BESIDE: Final = ("masks", "shown", "exhausted", "followers")
"""Columns of the buffer that are no columns of :class:`Rows`."""


class Rows(msgspec.Struct, frozen=True):
    """n one-step transitions as columns."""

    states: NDArray[np.float32]
    """[n, features], raw; NaN = absent."""
    next_states: NDArray[np.float32]
    """[n, features]."""
    actions: NDArray[np.uint8]
    """[n], executed."""
    next_masks: NDArray[np.uint8]
    """[n], bit k is action k."""
    rewards: NDArray[np.float32]
    """[n], of the objective in force."""
    discounts: NDArray[np.float32]
    """[n]: gamma, 0 for terminal rows."""
    probabilities: NDArray[np.float32]
    """[n], of the action under the behaviour policy."""
    sequences: NDArray[np.int64]
    """[n], stream sequence of the message that brought the row."""


class SumTree:
    """Sums of non-negative float64 leaves in a binary heap; every operation takes arrays.

    Parents are always computed from their children, never by difference, so that no error gathers.
    """

    def __init__(self, leaves: int) -> None:
        if leaves < 1:
            raise ValueError(f"a sum tree of {leaves} leaves: expected at least 1")
        self.depth = max(1, int(leaves - 1).bit_length())
        self._base = 1 << self.depth
        self._nodes = np.zeros(2 * self._base, np.float64)

    @property
    def total(self) -> float:
        return float(self._nodes[1])

    def values(self, leaves: NDArray[np.int64]) -> NDArray[np.float64]:
        return self._nodes[leaves + self._base]

    def set(self, leaves: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Set leaves [n]; of a leaf named twice the last value stays."""
        if not leaves.size:
            return
        nodes = leaves + self._base
        self._nodes[nodes] = values
        for _ in range(self.depth):
            nodes = nodes >> 1  # repeats compute the same sum again: cheaper than finding them
            self._nodes[nodes] = self._nodes[2 * nodes] + self._nodes[2 * nodes + 1]

    def set_range(self, start: int, stop: int, value: float) -> None:
        """Set leaves ``start`` to ``stop`` - 1 to one value: what an insertion does, by slices alone."""
        low, high = start + self._base, stop + self._base
        self._nodes[low:high] = value
        for _ in range(self.depth):
            low, high = low >> 1, ((high - 1) >> 1) + 1
            children = self._nodes[2 * low : 2 * high]
            np.add(children[::2], children[1::2], out=self._nodes[low:high])

    def find(self, masses: NDArray[np.float64]) -> NDArray[np.int64]:
        """Leaves [n] in which the running sum passes each mass of [0, total). Never an empty leaf while the
        total is above 0, whatever rounding does to a mass."""
        nodes = np.ones(masses.shape, np.int64)
        rest = masses.astype(np.float64)
        for _ in range(self.depth):
            nodes <<= 1
            left = self._nodes[nodes]
            right = (rest >= left) & (self._nodes[nodes + 1] > 0)
            rest = np.where(right, rest - left, rest)
            nodes += right
        return nodes - self._base


class Sample(msgspec.Struct, frozen=True):
    """A batch drawn from the buffer: places [b] and importance weights [b], the largest being 1."""

    places: NDArray[np.int64]
    weights: NDArray[np.float32]


class ReplayBuffer:
    """A ring of rows. A *serial* numbers rows from 0 in order of insertion, a *place* is serial % capacity.

    ``written`` is the next serial. Not safe for several threads: one owner.
    """

    def __init__(self, capacity: int, features: int, *, alpha: float = 0.6, epsilon: float = 1e-3) -> None:
        if capacity < 1 or features < 1:
            raise ValueError(f"capacity {capacity}, features {features}: expected both of at least 1")
        self.capacity = capacity
        self.written = 0
        self.max_priority = 1.0
        self._alpha, self._epsilon = alpha, epsilon
        self.states = np.zeros((capacity, features), np.float32)
        self.next_states = np.zeros((capacity, features), np.float32)
        self.actions = np.zeros(capacity, np.uint8)
        self.next_masks = np.zeros(capacity, np.uint8)
        self.rewards = np.zeros(capacity, np.float32)
        self.discounts = np.zeros(capacity, np.float32)
        self.probabilities = np.zeros(capacity, np.float32)
        self.sequences = np.zeros(capacity, np.int64)
        self.masks = np.full(capacity, ANY_ACTION, np.uint8)
        """Allowed actions in ``states``; every bit where whoever inserted the row did not say."""
        self.shown = np.full(capacity, NOTHING_SHOWN, np.uint8)
        """The action to imitate in the row's state, whichever was executed; ``NOTHING_SHOWN`` for none."""
        self.exhausted = np.zeros(capacity, np.bool_)
        """Memory was exhausted in the row's step (``risk.exhausted``)."""
        self.followers = np.full(capacity, NO_ROW, np.int64)
        """Serial of the row that followed on the same worker. It is newer, so it lives while this one does."""
        self.tree = SumTree(capacity)

    @property
    def size(self) -> int:
        return min(self.written, self.capacity)

    @property
    def first_sequence(self) -> int:
        """Stream sequence of the oldest row, 0 when empty: from here a lost buffer can be filled again."""
        if not self.written:
            return 0
        return int(self.sequences[(self.written - self.size) % self.capacity])

    def insert(
        self,
        rows: Rows,
        previous: NDArray[np.int64],
        *,
        masks: NDArray[np.uint8] | None = None,
        shown: NDArray[np.uint8] | None = None,
        exhausted: NDArray[np.bool_] | None = None,
    ) -> NDArray[np.int64]:
        """Append n rows and give their serials [n].

        ``previous`` [n] is the serial of the row that each follows, NO_ROW for none; one already overwritten
        is ignored. ``masks`` and ``shown`` uint8 [n] and ``exhausted`` bool [n] are for imitation and the risk
        head. New rows get the greatest priority seen, so that each is learned from soon. ValueError when
        the columns are not of one length or more than the capacity.
        """
        count = rows.actions.shape[0]
        if count > self.capacity or any(getattr(rows, n).shape[0] != count for n in Rows.__struct_fields__):
            raise ValueError(f"{count} rows: expected equal columns of at most {self.capacity} rows")
        serials = np.arange(self.written, self.written + count, dtype=np.int64)
        done = 0
        while done < count:  # twice when the ring closes inside
            start = (self.written + done) % self.capacity
            part = min(count - done, self.capacity - start)
            for name in Rows.__struct_fields__:
                getattr(self, name)[start : start + part] = getattr(rows, name)[done : done + part]
            self.masks[start : start + part] = ANY_ACTION if masks is None else masks[done : done + part]
            self.shown[start : start + part] = NOTHING_SHOWN if shown is None else shown[done : done + part]
            self.exhausted[start : start + part] = exhausted is not None and exhausted[done : done + part]
            self.followers[start : start + part] = NO_ROW
            self.tree.set_range(start, start + part, self.max_priority)
            done += part
        self.written += count
        linked = (previous >= 0) & (previous >= self.written - self.capacity)
        self.followers[previous[linked] % self.capacity] = serials[linked]
        return serials

    def sample(self, batch: int, beta: float, rng: np.random.Generator) -> Sample:
        """Draw ``batch`` places, one from each equal slice of the total priority. ValueError when empty."""
        if not self.written:
            raise ValueError("nothing to sample: the buffer is empty")
        total = self.tree.total
        masses = (np.arange(batch) + rng.random(batch)) * (total / batch)
        places = self.tree.find(masses)
        weights = (self.tree.values(places) * (self.size / total)) ** -beta
        return Sample(places, (weights / weights.max()).astype(np.float32))

    def chain(self, places: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Places [length, b] of the rows that followed one another, NO_ROW beyond the last known."""
        out = np.full((length, places.shape[0]), NO_ROW, np.int64)
        out[0] = places
        for k in range(1, length):
            serials = np.where(out[k - 1] >= 0, self.followers[out[k - 1]], NO_ROW)
            out[k] = np.where(serials >= 0, serials % self.capacity, NO_ROW)
        return out

    def update(self, places: NDArray[np.int64], errors: NDArray[np.float32]) -> None:
        """Set priorities from absolute TD errors [b]: (|error| + epsilon)^alpha. Others stay as they are."""
        priorities = (np.abs(errors.astype(np.float64)) + self._epsilon) ** self._alpha
        self.max_priority = max(self.max_priority, float(priorities.max(initial=0.0)))
        self.tree.set(places, priorities)

    def contents(self) -> dict[str, NDArray[np.generic]]:
        """The live rows as named arrays for a checkpoint, oldest first."""
        order = np.arange(self.written - self.size, self.written, dtype=np.int64) % self.capacity
        columns = {name: getattr(self, name)[order] for name in (*Rows.__struct_fields__, *_BESIDE)}
        return columns | {"priorities": self.tree.values(order)}

    def restore(self, contents: dict[str, NDArray[np.generic]], written: int, max_priority: float) -> None:
        """Take over :meth:`contents` of an equally large buffer. ValueError when they do not fit."""
        count = contents["actions"].shape[0]
        if count != min(written, self.capacity):
            raise ValueError(f"{count} rows of {written} written: expected {min(written, self.capacity)}")
        order = np.arange(written - count, written, dtype=np.int64) % self.capacity
        for name in (*Rows.__struct_fields__, *_BESIDE):
            if name in contents or name not in _BESIDE[:3]:  # earlier checkpoints lack them
                getattr(self, name)[order] = contents[name]
        self.tree.set(order, contents["priorities"].astype(np.float64))
        self.written, self.max_priority = written, max_priority
