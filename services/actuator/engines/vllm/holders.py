"""Who holds which block, read from vLLM's tables as they grow. Pure.

vLLM keeps a block's references as a number and not as a list. Reading all tables anew takes 8 ms for 30,000 blocks,
most of it cache misses; here each is read once, and every call only what was appended since: below 1 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

I4 = NDArray[np.int32]
I8 = NDArray[np.int64]


class Holder(msgspec.Struct):
    """One table that was read: vLLM's list of blocks and their numbers, int32 [at least len(blocks)]."""

    blocks: list[Any]
    numbers: I4
    length: int = 0

    def read(self) -> None:
        """What was appended since."""
        more = len(self.blocks) - self.length
        if more <= 0:
            return
        if len(self.blocks) > len(self.numbers):
            grown = np.empty(max(2 * len(self.blocks), 16), np.int32)
            grown[: self.length] = self.numbers[: self.length]
            self.numbers = grown
        added = [block.block_id for block in self.blocks[self.length :]]
        self.numbers[self.length : len(self.blocks)] = added
        self.length = len(self.blocks)


class Holders:
    """Of one engine. It relies on tables that only grow at their end, as those of full attention do."""

    def __init__(self) -> None:
        self._known: dict[str, Holder] = {}

    def find(self, table: Mapping[str, list[Any]], sources: I8) -> dict[int, list[tuple[Holder, int]]]:
        """Each of ``sources``, int64 [n], to the holders that name it and where."""
        known: dict[str, Holder] = {}
        for name, blocks in table.items():
            holder = self._known.get(name)
            if holder is None or holder.blocks is not blocks or len(blocks) < holder.length:
                holder = Holder(blocks, np.empty(0, np.int32))
            holder.read()
            known[name] = holder
        self._known = known
        holders = list(known.values())
        found: dict[int, list[tuple[Holder, int]]] = {number: [] for number in sources.tolist()}
        if not holders or not found:
            return found
        numbers = np.concatenate([one.numbers[: one.length] for one in holders])
        moving = np.zeros(int(max(numbers.max(initial=0), sources.max())) + 1, np.bool_)
        moving[sources] = True
        hits = np.flatnonzero(moving[numbers])
        ends = np.cumsum([one.length for one in holders])
        for hit, row in zip(hits.tolist(), np.searchsorted(ends, hits, side="right").tolist(), strict=True):
            holder = holders[row]
            found[int(numbers[hit])].append((holder, hit - int(ends[row]) + holder.length))
        return found

    def forget(self) -> None:
        """Read everything anew the next time."""
        self._known.clear()
