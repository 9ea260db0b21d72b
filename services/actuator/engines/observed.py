"""A server that nobody can command: it is read by telemetry, and this stands for it in the actuator.

So shadow mode goes the whole way round, with outcomes and audit records and no errors: what shadow commands (hold at
rho 1.0, the ceiling of the start) is what such a server does anyway. Whatever would change it is refused, with the
words for how to have an engine that can be changed. It answers without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from schemas.actions import MAX_RUNNING_START, RHO_MIN
from schemas.classes import ServiceClass
from schemas.engine import (
    Description,
    Evict,
    GrantPages,
    Prefetch,
    Prepare,
    Receipt,
    ReturnPages,
    SetQuota,
    SetWeights,
    Snapshot,
    SnapshotReply,
    Ticket,
)
from services.actuator.engines.protocol import PLAIN
from services.actuator.leases import RHO_SLACK
from services.errors import EngineRefused

ENGINE: Final = "observed"
"""What it calls itself in a description."""
UNKNOWN_BYTES: Final = 1
"""Where an account needs an amount above 0 and nobody told one: no quota of such a server is in bytes."""


class ObservedEngine:
    """Rho 1.0, generation 0, no capabilities, for ever. ``clock_ns``: the node's clock.

    Bytes of a quota are 0 in all its answers: nothing bounds it, so there is none to tell.
    """

    waits = False
    connection = 1

    def __init__(
        self, worker: str, clock_ns: Callable[[], int], service_class: ServiceClass = ServiceClass.CHAT
    ) -> None:
        self.worker = worker
        self._clock_ns = clock_ns
        self._service_class = service_class

    @property
    def t_ns(self) -> int:
        return self._clock_ns()

    async def describe(self) -> Description:
        return Description(
            self.worker, self._service_class, ENGINE, UNKNOWN_BYTES, UNKNOWN_BYTES, UNKNOWN_BYTES, UNKNOWN_BYTES,
            UNKNOWN_BYTES, 0, 0, 0, (),
        )  # fmt: skip

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        return SnapshotReply(0, RHO_MIN, 0, 0, MAX_RUNNING_START, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    async def set_quota(self, command: SetQuota) -> Receipt:
        """Nothing to change; EngineRefused (``unsupported``) for a rho or a ceiling that would bind."""
        if abs(command.rho - RHO_MIN) > RHO_SLACK or command.max_running < MAX_RUNNING_START:
            raise EngineRefused(
                self.worker, "unsupported", {"rho": command.rho, "max_running": float(command.max_running)}
            )
        return self._receipt(command.action_id)

    async def grant_pages(self, command: GrantPages) -> Receipt:
        self._refuse()

    async def return_pages(self, command: ReturnPages) -> Receipt:
        self._refuse()

    async def prepare(self, command: Prepare) -> Ticket:
        self._refuse()

    async def copy(self, ticket: int) -> Receipt:
        self._refuse()

    async def commit(self, ticket: int) -> Receipt:
        self._refuse()

    async def abort(self, ticket: int) -> Receipt:
        self._refuse()

    async def evict(self, command: Evict) -> Receipt:
        self._refuse()

    async def prefetch(self, command: Prefetch) -> Receipt:
        self._refuse()

    async def set_weights(self, command: SetWeights) -> Receipt:
        self._refuse()

    async def receipt(self, action_id: str) -> Receipt:
        return self._receipt(action_id)

    async def close(self) -> None:
        return None

    def _refuse(self) -> NoReturn:
        raise EngineRefused(self.worker, "unsupported")

    def _receipt(self, action_id: str) -> Receipt:
        return Receipt(action_id, True, 0, RHO_MIN, 0, 0, MAX_RUNNING_START, 0)
