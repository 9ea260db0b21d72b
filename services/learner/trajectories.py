"""Which row follows which: the last accepted (boot, step) and replay serial of every worker.

Exactly the next step of the same boot continues a trajectory; a gap, another boot or a terminal row begins a
new one. A row that is not newer than its worker's last is a duplicate or stale, and never learned from twice.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from services.learner.replay_buffer import NO_ROW

_CACHE_LIMIT = 65_536


class Last(msgspec.Struct):
    """What is kept of the trajectories in a checkpoint: equal lists, one entry a worker."""

    workers: list[str]
    boots: list[int]
    steps: list[int]
    serials: list[int]


class Trajectories:
    """Bookkeeping over worker *slots* 0, 1, ... in order of first appearance."""

    def __init__(self, max_workers: int) -> None:
        self.max_workers = max_workers
        self._slot: dict[str, int] = {}
        self._of_message: dict[tuple[str, ...], NDArray[np.int64]] = {}
        self._boot = np.zeros(64, np.int64)
        self._step = np.full(64, -1, np.int64)
        self._serial = np.full(64, NO_ROW, np.int64)

    @property
    def workers(self) -> int:
        return len(self._slot)

    def slots(self, node: str, workers: tuple[str, ...]) -> NDArray[np.int64] | None:
        """Slots [n] of a message's workers, None when they cannot be that node's: a foreign or repeated name, or
        more workers than ``max_workers``. A node sends the same tuple every step, hence the cache."""
        cached = self._of_message.get(workers)
        if cached is not None and workers and workers[0].startswith(f"{node}/"):
            return cached
        prefix = f"{node}/"
        if len(set(workers)) != len(workers) or not all(name.startswith(prefix) for name in workers):
            return None
        fresh = sum(name not in self._slot for name in workers)
        if len(self._slot) + fresh > self.max_workers:
            return None
        slots = np.array([self._slot.setdefault(name, len(self._slot)) for name in workers], np.int64)
        self._grow()
        if len(self._of_message) >= _CACHE_LIMIT:
            self._of_message.clear()
        self._of_message[workers] = slots
        return slots

    def compare(
        self, slots: NDArray[np.int64], boots: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(newer, same) per row against the worker's last accepted; neither: stale. Slots must differ."""
        boot, step = self._boot[slots], self._step[slots]
        newer = (boots > boot) | ((boots == boot) & (steps > step))
        return newer, (boots == boot) & (steps == step)

    def previous(
        self, slots: NDArray[np.int64], boots: NDArray[np.int64], steps: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Serial of the row that each row follows, NO_ROW where it begins a trajectory."""
        follows = (boots == self._boot[slots]) & (steps == self._step[slots] + 1)
        return np.where(follows, self._serial[slots], NO_ROW)

    def advance(
        self,
        slots: NDArray[np.int64],
        boots: NDArray[np.int64],
        steps: NDArray[np.int64],
        serials: NDArray[np.int64],
        terminal: NDArray[np.bool_],
    ) -> None:
        """Make these rows their workers' last; nothing follows a terminal one."""
        self._boot[slots], self._step[slots] = boots, steps
        self._serial[slots] = np.where(terminal, NO_ROW, serials)

    def dump(self) -> Last:
        n = len(self._slot)
        return Last(list(self._slot), self._boot[:n].tolist(), self._step[:n].tolist(), self._serial[:n].tolist())

    def restore(self, last: Last) -> None:
        """Take over :meth:`dump`; ValueError when its lists differ in length or name a worker twice."""
        n = len(last.workers)
        if {len(last.boots), len(last.steps), len(last.serials), len(set(last.workers))} != {n}:
            raise ValueError(f"{n} workers: expected as many boots, steps and serials, and no name twice")
        self._slot = {name: i for i, name in enumerate(last.workers)}
        self._of_message.clear()
        self._grow()
        self._boot[:n], self._step[:n], self._serial[:n] = last.boots, last.steps, last.serials

    def _grow(self) -> None:
        have, need = self._boot.size, len(self._slot)
        if need <= have:
            return
        extra = max(need, 2 * have) - have
        self._boot = np.concatenate([self._boot, np.zeros(extra, np.int64)])
        self._step = np.concatenate([self._step, np.full(extra, -1, np.int64)])
        self._serial = np.concatenate([self._serial, np.full(extra, NO_ROW, np.int64)])
