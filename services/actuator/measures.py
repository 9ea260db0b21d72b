"""What the actuator counts and times of itself. Pure."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.outcomes import OutcomeBatch
from services.actuator.leases import ENGINE_UNREACHABLE, UNKNOWN_WORKER
from services.actuator.results import ACCEPTED, CLIPPED, DEFERRED, REFUSED

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
