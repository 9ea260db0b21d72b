"""The benchmark's machine with a GPU: CuPy arenas, pinned host memory, and plain copies by the copy engines."""

from __future__ import annotations

import warnings
from typing import Any, Final

import numpy as np

from loadgen.bench.memory_machines import timed
from services.actuator.memory.arrays import Arena
from services.actuator.memory.calibration import calibrate
from services.actuator.memory.cupy_arrays import CupyArena, CupyDevice, HostArena, device_problem
from services.actuator.memory.device_mover import DeviceMover
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.mover import Mover
from services.actuator.memory.paths import told
from services.errors import UserError

CARD_BYTES: Final = 4 << 30
HOST_BYTES: Final = 2 << 30
STEP_BYTES: Final = 1 << 30
"""Read by a stand-in step: some 0.3 ms on an H200."""
_UNIT: Final = 2 << 20


class CupyMachine:
    """4 GiB of the card and 2 GiB of pinned host memory."""

    backend = "cupy"

    def __init__(self) -> None:
        self._device = device = CupyDevice()
        device.load()
        self._card = CupyArena.private(device, Geometry(_UNIT, 1, CARD_BYTES // _UNIT))
        with warnings.catch_warnings(record=True) as told_off:
            warnings.simplefilter("always")
            self._host = HostArena.allocate(device, _UNIT, HOST_BYTES // _UNIT)
        if self._host.geometry.arena_bytes < HOST_BYTES:
            raise UserError(f"backend cupy: {HOST_BYTES} bytes of host memory are needed: {told_off[0].message}")
        self.size = HOST_BYTES
        tables = calibrate(device, self.card, self.host, pinned=self._host.pinned)
        self.mover: Mover = DeviceMover(device, tables, pinned=self._host.pinned)
        self.paths: dict[str, Any] = {
            "device": device.name,
            "batched_copies": device.has_batch,
            "thread_blocks": tables.thread_blocks,
            "pinned": self._host.pinned,
            "pinning_cost_bytes": self._host.receipt.device_bytes,
            "move": dict(told(tables.in_card)),
            "out": dict(told(tables.out)),
            "back": dict(told(tables.back)),
            "rates_gb_per_s": {"move": tables.in_card.rates, "out": tables.out.rates, "back": tables.back.rates},
        }
        self._streams = {name: device.new_stream() for name in ("in", "out", "back")}
        self._decode = device.new_stream(urgent=True)
        self._lists = device.upload(np.arange(STEP_BYTES // _UNIT, dtype=np.int64), self._decode)
        self._sum = device.reserve(8)

    @staticmethod
    def missing() -> str | None:
        """Why there is no GPU to measure; None when there is."""
        return device_problem()

    def card(self, geometry: Geometry) -> Arena:
        flat = self._card.view.reshape(-1)[: geometry.arena_bytes]
        return CupyArena(self._device, geometry, flat.reshape(geometry.blocks, geometry.block_bytes))

    def host(self, geometry: Geometry) -> Arena:
        flat = self._host.view.reshape(-1)[: geometry.arena_bytes]
        return HostArena(geometry, flat.reshape(geometry.blocks, geometry.block_bytes), self._host.receipt)

    def plain_in_card(self, size: int) -> float:
        base = self._card.address
        return timed(lambda: self._copies([("in", base + CARD_BYTES // 2, base)], size))

    def plain_link(self, size: int, directions: tuple[str, ...]) -> float:
        card, host, half = self._card.address, self._host.address, HOST_BYTES // 2
        places = {"out": ("out", host, card), "back": ("back", card + half, host + half)}
        return timed(lambda: self._copies([places[direction] for direction in directions], size))

    def step(self) -> float:
        return timed(self._read)

    def _copies(self, work: list[tuple[str, int, int]], size: int) -> None:
        for stream, target, source in work:
            self._device.copy(target, source, size, self._streams[stream])
        for stream, _, _ in work:
            self._device.synchronize(self._streams[stream])

    def _read(self) -> None:
        device, blocks = self._device, STEP_BYTES // _UNIT
        places = (self._sum.address, self._card.address, self._lists.address, blocks, _UNIT)
        device.launch("read_blocks", 4 * device.processors, places, self._decode)
        device.synchronize(self._decode)
