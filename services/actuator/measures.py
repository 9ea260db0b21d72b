"""What the actuator counts and times of itself."""

from __future__ import annotations

import copy
from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.outcomes import OutcomeBatch
from services.actuator.leases import ENGINE_UNREACHABLE, UNKNOWN_WORKER
from services.actuator.memory.receipts import Ledger, Totals
from services.actuator.results import ACCEPTED, CLIPPED, DEFERRED, REFUSED
from services.observe import Observe

RECENT = 200_000
"""Latencies kept for a benchmark, the newest ones."""


class Counts(msgspec.Struct):
    """Numbers that only grow, one per kind of event."""

    batches: int = 0
    duplicates: int = 0
    superseded: int = 0
    foreign: int = 0
    decode_errors: int = 0
    accepted: int = 0
    clipped: int = 0
    deferred: int = 0
    refused: int = 0
    completions: int = 0
    unreachable: int = 0
    unknown_workers: int = 0

    def outcomes(self, batch: OutcomeBatch) -> None:
        """Count a batch's outcomes: its completions, and the receipts by what became of them."""
        statuses, refusals = batch.statuses, batch.refusals
        if batch.completions:
            self.completions += len(batch.completions)
            ended = {one.row for one in batch.completions}
            receipts = [row for row in range(len(statuses)) if row not in ended]
            statuses, refusals = bytes(statuses[row] for row in receipts), bytes(refusals[row] for row in receipts)
        accepted = statuses.count(ACCEPTED)
        self.accepted += accepted
        if accepted == len(statuses):
            return
        self.clipped += statuses.count(CLIPPED)
        self.deferred += statuses.count(DEFERRED)
        self.refused += statuses.count(REFUSED)
        self.unreachable += refusals.count(ENGINE_UNREACHABLE)
        self.unknown_workers += refusals.count(UNKNOWN_WORKER)


class Latencies:
    """The newest telemetry-to-action latencies, milliseconds."""

    def __init__(self, limit: int = RECENT) -> None:
        self._recent: deque[float] = deque(maxlen=limit)

    def add(self, latency_ms: float) -> None:
        self._recent.append(latency_ms)

    def __len__(self) -> int:
        return len(self._recent)

    def values_ms(self) -> NDArray[np.float64]:
        """float64 [n], oldest first."""
        return np.array(self._recent, np.float64)


class MovementMetrics:
    """A ledger's sums on the metrics page: transfers by kind and path as their bytes lie in the arena, compactions
    in the model's bytes."""

    def __init__(self, observe: Observe) -> None:
        by = ("kind", "path")
        self._transfers = [
            observe.counter("transferred_bytes", "bytes really moved, by kind and copy path", by),
            observe.counter("transferred_pieces", "blocks in those transfers", by),
            observe.counter("transfer_seconds", "time those transfers took", by),
            observe.counter("transfer_queue_seconds", "time those transfers waited for their first byte", by),
        ]
        self._compactions = [
            observe.counter("compactions", "compactions done"),
            observe.counter("compaction_groups_freed", "page groups that compactions emptied"),
            observe.counter("compaction_moved_bytes", "the model's bytes that compactions moved"),
            observe.counter("compaction_lower_bound_bytes", "the fewest bytes that could have freed as much"),
            observe.counter("compaction_dropped_moves", "moves whose source changed under the copy"),
            observe.counter("compaction_pause_seconds", "time engines stood still for the swap of their tables"),
        ]
        self._longest = observe.gauge("compaction_longest_pause_seconds", "the longest of those pauses")
        self._shown: dict[tuple[str, str], Totals] = {}
        self._shown_compactions = [0.0] * len(self._compactions)

    def show(self, ledger: Ledger) -> None:
        """Bring the page up to the ledger."""
        for key, now in ledger.transfers.items():
            before = self._shown.get(key, Totals())
            if now == before:
                continue
            grown = (
                now.bytes - before.bytes,
                now.pieces - before.pieces,
                now.seconds - before.seconds,
                now.queue_s - before.queue_s,
            )
            for counter, more in zip(self._transfers, grown, strict=True):
                counter.labels(*key).inc(more)
            self._shown[key] = copy.copy(now)
        sums = [
            ledger.compactions,
            ledger.groups_freed,
            ledger.moved_bytes,
            ledger.lower_bound_bytes,
            ledger.dropped_moves,
            ledger.pause_us * 1e-6,
        ]
        for counter, total, shown in zip(self._compactions, sums, self._shown_compactions, strict=True):
            counter.inc(total - shown)
        self._shown_compactions = sums
        self._longest.set(ledger.longest_pause_us * 1e-6)
