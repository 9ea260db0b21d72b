"""Small arenas and tiers for these tests."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.arrays import PrivateArena, host_geometry
from services.actuator.memory.host_tier import HostTier
from services.actuator.memory.mover import BATCH, NumpyMover
from services.actuator.memory.paths import fixed

BLOCK_BYTES = 5000  # not a multiple of a page nor of a word


def card(blocks: int = 32, seed: int = 0) -> PrivateArena:
    """An arena full of random bytes."""
    arena = PrivateArena(host_geometry(BLOCK_BYTES, blocks))
    arena.view[:] = np.random.default_rng(seed).integers(0, 256, arena.view.shape, dtype=np.uint8)
    return arena


def blocks(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def host(slots: int = 16, *, verify: bool = True) -> HostTier:
    arena = PrivateArena(host_geometry(BLOCK_BYTES, slots))
    return HostTier(arena, NumpyMover(fixed(BATCH)), verify=verify)
