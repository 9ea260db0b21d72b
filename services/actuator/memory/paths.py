"""Which way of copying is fastest for a size of piece: measured at start-up, looked up afterwards. Pure.

The right way changes with the piece (on a GPU's link the cliff is near 28 KiB), with the machine and with the
driver, so nothing here is a constant.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec

PIECE_BYTES: Final = (4096, 16384, 65536, 2 << 20)
"""Sizes measured by default."""
REPEATS: Final = 7


class PathTable(msgspec.Struct, frozen=True):
    """Rates of each path, GB/s, at ``piece_bytes`` (rising)."""

    piece_bytes: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]

    def best(self, piece_bytes: int) -> str:
        """The fastest path for pieces of this size: that of the nearest measured size on a logarithmic scale."""
        at = self._nearest(piece_bytes)
        return max(self.rates, key=lambda path: self.rates[path][at])

    def rate(self, piece_bytes: int) -> float:
        """GB/s of that path."""
        return self.rates[self.best(piece_bytes)][self._nearest(piece_bytes)]

    def _nearest(self, piece_bytes: int) -> int:
        wanted = math.log(max(piece_bytes, 1))
        distances = [abs(math.log(size) - wanted) for size in self.piece_bytes]
        return distances.index(min(distances))


def measure(
    run: Callable[[str, int], tuple[int, float]],
    paths: Sequence[str],
    piece_bytes: Sequence[int] = PIECE_BYTES,
    repeats: int = REPEATS,
) -> PathTable:
    """Rates of ``paths``, by ``run(path, piece_bytes) -> (bytes, seconds)``, median of ``repeats`` after one warm-up.

    The paths take turns, so that what else the machine does hits all of them. A path that raises
    ``NotImplementedError`` is one this machine does not have, and is left out. ValueError when none is left.
    """
    rates: dict[str, list[float]] = {path: [] for path in paths}
    for size in piece_bytes:
        for path in tuple(rates):
            try:
                run(path, size)
            except NotImplementedError:
                del rates[path]
        turns: dict[str, list[float]] = {path: [] for path in rates}
        for _ in range(repeats):
            for path, measured in turns.items():
                measured.append(_rate(*run(path, size)))
        for path, measured in turns.items():
            rates[path].append(statistics.median(measured))
    if not rates:
        raise ValueError(f"none of the copy paths {', '.join(paths)} works on this machine")
    return PathTable(tuple(piece_bytes), {path: tuple(measured) for path, measured in rates.items()})


def fixed(path: str, gb_per_s: float = 1.0) -> PathTable:
    """A table that always answers ``path``."""
    return PathTable((65536,), {path: (gb_per_s,)})


def told(table: PathTable) -> Mapping[str, str]:
    """For a log line: piece size -> path and rate."""
    return {str(size): f"{table.best(size)} {table.rate(size):.2f} GB/s" for size in table.piece_bytes}


def _rate(moved_bytes: int, seconds: float) -> float:
    return moved_bytes / max(seconds, 1e-9) / 1e9
