"""A fleet of plain numbers with the interface of the emulated one: quick, and every byte is predictable."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from schemas.metrics import COLUMN, METRICS

GIB = 1 << 30
GROUP = 128 << 20
BLOCK = 2 << 20
NUMBERS = {
    "hbm_bytes": 80 * GIB,
    "card_kv_capacity_bytes": 40 * GIB,
    "q0_bytes": 20 * GIB,
    "block_bytes": BLOCK,
    "page_group_bytes": GROUP,
    "kv_bytes_per_token": BLOCK // 16,
    "floor_bytes": GIB,
    "host_capacity_bytes": 80 * GIB,
    "host_used_bytes": 0,
    "link_bytes_per_s": 25e9,
    "kv_bytes": 12 * GIB,
    "kv_idle_bytes": 6 * GIB,
    "kv_mapped_bytes": 14 * GIB,
    "waiting": 0,
    "running": 3,
    "generation": 0,
    "rho": 1.0,
    "max_running": 256,
    "evicted_bytes": 0,
    "compacted_bytes": 0,
}


class FakeFleet:
    """``workers`` on one card; moves what it is told to, at most ``evict_per_step`` bytes a step."""

    def __init__(self, workers: int = 2, evict_per_step: float = 2 * GIB) -> None:
        self.workers = workers
        self.card_of = np.zeros(workers, np.int64)
        self.step = 0
        self.on_card = [True] * workers
        self.evict_per_step = evict_per_step
        self.table = np.full((workers, len(METRICS)), np.nan)
        for name, value in NUMBERS.items():
            self.column(name)[:] = value
        self.told: list[dict[str, np.ndarray]] = []
        self._evicting = np.zeros(workers)
        self._left = np.zeros(workers)
        self._started = np.zeros(workers)

    def column(self, name: str) -> np.ndarray:
        return self.table[:, COLUMN[name]]

    def command(self, *, rho=None, max_running=None, evict_bytes=None, generation=None, hard_bytes=None) -> None:
        self.told.append({"rho": rho, "max_running": max_running, "evict_bytes": evict_bytes, "hard_bytes": hard_bytes})
        self.column("rho")[:] = rho
        self._evicting += evict_bytes
        self._started += np.minimum(evict_bytes, self.column("kv_idle_bytes"))

    def advance(self, step_s: float = 2.0) -> None:
        self.step += 1
        moved = np.minimum(np.minimum(self._evicting, self.evict_per_step), self.column("kv_idle_bytes"))
        self._evicting -= moved
        self._left += moved
        self.column("evicted_bytes")[:] += moved
        self.column("host_used_bytes")[:] += moved.sum()
        self.column("kv_idle_bytes")[:] -= moved
        self.column("kv_bytes")[:] -= moved

    def metrics(self) -> np.ndarray:
        return self.table.copy()

    def effects(self) -> SimpleNamespace:
        left, self._left = self._left, np.zeros(self.workers)
        started, self._started = self._started, np.zeros(self.workers)
        return SimpleNamespace(evict_started_bytes=started, evicted_bytes=left, loaded_bytes=np.zeros(self.workers))

    def snapshot(self, worker: int) -> SimpleNamespace:
        idle = SimpleNamespace(
            sequence=5, blocks=3, idle_since_s=0.0, expected_return_s=9.0, copied=False, pinned=False, tokens=48
        )
        return SimpleNamespace(idle=(idle,), link_backlog_bytes=0)

    def away(self, worker: int, within_s: float) -> tuple:
        return ()

    def evict_sessions(self, worker: int, sequences) -> np.ndarray:
        """Session 5 is the only one there is; it leaves with the next steps."""
        started = np.array([3.0 * BLOCK if one == 5 else 0.0 for one in sequences])
        self._evicting[worker] += started.sum()
        self._started[worker] += started.sum()
        return started

    def prefetch_sessions(self, worker: int, sequences) -> np.ndarray:
        return np.zeros(len(sequences))

    def set_weights(self, worker: int, on_card: bool) -> int:
        """Weights leave and come back at once."""
        here = self.on_card[worker]
        self.on_card[worker] = on_card
        return 1 if here == on_card else 0

    def weights(self, worker: int) -> SimpleNamespace:
        state = 0 if self.on_card[worker] else 2
        return SimpleNamespace(state=state, bytes=16 * GIB, left_bytes=0, quiet_s=0.0, lacking_bytes=0)

    def prefill_tokens_per_s(self, worker: int) -> float:
        return 20_000.0
