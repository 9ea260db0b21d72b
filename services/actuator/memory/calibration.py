"""The start-up measurement of a GPU's copy paths and of how many thread blocks a kernel should have.

Numbers from other machines do not carry over: published figures put a copy-engine copy inside a card at half and
a kernel at four fifths of the memory's rate, and the link's cliff at pieces of some 28 KiB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from services.actuator.memory.arrays import Arena
from services.actuator.memory.device import Device
from services.actuator.memory.device_mover import (
    COPIES,
    IN_CARD_PATHS,
    LINK_PATHS,
    SM,
    DeviceMover,
    Tables,
)
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.paths import PIECE_BYTES, PathTable, fixed, measure
from services.actuator.memory.receipts import BACK, IN_CARD, OUT

SHARES_OF_PROCESSORS: Final = (0.25, 0.5, 1.0, 2.0)
"""Thread blocks per SM that are tried."""
GOOD_ENOUGH: Final = 0.9
"""The fewest thread blocks within this share of the best rate are taken: decode needs the SMs."""
MEASURED_BYTES: Final = 64 << 20

Place = Callable[[Geometry], Arena]
"""Arenas of a geometry over the same scratch memory."""


def calibrate(
    device: Device,
    card: Place,
    host: Place,
    *,
    pinned: bool,
    scratch_bytes: int = MEASURED_BYTES,
    piece_bytes: tuple[int, ...] = PIECE_BYTES,
    seed: int = 0,
) -> Tables:
    """Measure on scratch arenas of at most ``scratch_bytes`` that ``card`` and ``host`` give. Some 2 s on a GPU.

    The scratch memory's content is overwritten.
    """
    rng = np.random.default_rng(seed)

    def timed(mover: DeviceMover, kind: str, path: str, size: int) -> tuple[int, float]:
        blocks = max(scratch_bytes // size, 2)
        geometry = Geometry(size, 1, blocks)
        near = card(geometry)
        order = rng.permutation(blocks).astype(np.int64)
        if kind == IN_CARD:
            into, from_ = order[: blocks // 2], order[blocks // 2 :][: blocks // 2]
            return len(into) * size, mover.run_path(path, kind, near, into, near, from_)
        far, slots = host(geometry), rng.permutation(blocks).astype(np.int64)
        if kind == OUT:
            return blocks * size, mover.run_path(path, kind, far, slots, near, order)
        return blocks * size, mover.run_path(path, kind, near, order, far, slots)

    grids: dict[int, float] = {}
    for share in SHARES_OF_PROCESSORS:
        grid = max(int(device.processors * share), 1)
        trial = DeviceMover(device, _tables(fixed(SM), grid), pinned=pinned)
        table = measure(partial(timed, trial, IN_CARD), (SM,), (65536,))
        grids[grid] = table.rate(65536)
    mover = DeviceMover(device, _tables(fixed(COPIES), fewest(grids)), pinned=pinned)
    in_card, out, back = (
        measure(partial(timed, mover, kind), paths, piece_bytes)
        for kind, paths in ((IN_CARD, IN_CARD_PATHS), (OUT, LINK_PATHS), (BACK, LINK_PATHS))
    )
    return Tables(in_card, out, back, fewest(grids))


def fewest(rates: dict[int, float]) -> int:
    """The smallest key whose rate is within GOOD_ENOUGH of the best."""
    best = max(rates.values())
    return min(grid for grid, rate in rates.items() if rate >= GOOD_ENOUGH * best)


def _tables(table: PathTable, thread_blocks: int) -> Tables:
    return Tables(table, table, table, thread_blocks)
