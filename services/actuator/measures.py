"""What the actuator counts and times of itself. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.outcomes import OutcomeKind, WorkerOutcome
from services.actuator.leases import ENGINE_UNREACHABLE, UNKNOWN_WORKER
from services.actuator.results import ACCEPTED, CLIPPED, DEFERRED

COMPLETION = int(OutcomeKind.COMPLETION)
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

    def outcomes(self, outcomes: Sequence[WorkerOutcome]) -> None:
        """Count a batch's outcomes."""
        statuses = [one.status for one in outcomes]
        accepted = statuses.count(ACCEPTED)
        if accepted == len(statuses) and not any([one.kind for one in outcomes]):  # noqa: C419  # a list is faster
            self.accepted += accepted
            return
        for one in outcomes:
            if one.kind == COMPLETION:
                self.completions += 1
            elif one.status == ACCEPTED:
                self.accepted += 1
            elif one.status == CLIPPED:
                self.clipped += 1
            elif one.status == DEFERRED:
                self.deferred += 1
            else:
                self.refused += 1
                self.unreachable += one.refusal == ENGINE_UNREACHABLE
                self.unknown_workers += one.refusal == UNKNOWN_WORKER


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
