"""What steps a node's engines: the compiled fleet, or plain numbers in tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # the node's logic needs no compiled fleet
    from loadgen.engine import views
    from loadgen.engine.fleet import Answer, Effects

F8 = NDArray[np.float64]


class Stepper(Protocol):
    """The part of ``loadgen.engine.fleet.Fleet`` that a node needs."""

    @property
    def workers(self) -> int: ...

    @property
    def card_of(self) -> NDArray[np.integer[Any]]: ...

    def command(
        self,
        *,
        rho: F8 | None = None,
        max_running: NDArray[np.int64] | None = None,
        evict_bytes: F8 | None = None,
        generation: NDArray[np.int64] | None = None,
        hard_bytes: F8 | None = None,
    ) -> None: ...

    def advance(self, step_s: float = ...) -> None: ...

    def metrics(self) -> F8: ...

    def effects(self) -> Effects: ...

    def snapshot(self, worker: int) -> views.Snapshot: ...

    def away(self, worker: int, within_s: float) -> Sequence[views.AwaySession]: ...

    def evict_sessions(self, worker: int, sequences: Sequence[int]) -> F8: ...

    def prefetch_sessions(self, worker: int, sequences: Sequence[int]) -> F8: ...

    def prefill_tokens_per_s(self, worker: int) -> float: ...

    def set_weights(self, worker: int, on_card: bool) -> Answer: ...

    def weights(self, worker: int) -> views.WorkerWeights: ...
