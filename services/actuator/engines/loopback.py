"""An engine inside the actuator that accepts everything and echoes it: for ``bench loop``, which measures
the control path and not an engine, and for tests. It answers without waiting."""

from __future__ import annotations

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

GROUP_BYTES = 128 << 20
BLOCK_BYTES = 2 << 20
Q0_BYTES = 30 << 30


class LoopbackEngine:
    """Holds the last quota; moves nothing. It has no clock: ``t_ns`` stays 0 and no command is ever late."""

    waits = False
    t_ns = 0
    connection = 1

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self._generation = 0
        self._quota = SetQuota(0, -1, "", 1.0, Q0_BYTES, Q0_BYTES, 256, 0, 0, 0)

    async def describe(self) -> Description:
        return Description(
            self.worker, ServiceClass.CHAT, "loopback", BLOCK_BYTES, GROUP_BYTES, BLOCK_BYTES // 16, Q0_BYTES,
            Q0_BYTES, 0, GROUP_BYTES, self._generation, ("compact", "evict"),
        )  # fmt: skip

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        quota = self._quota
        return SnapshotReply(
            self._generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.max_running,
            0, 0, 0, 0, 0, 0, 0, 0, GROUP_BYTES, quota.lease_ns,
        )  # fmt: skip

    async def set_quota(self, command: SetQuota) -> Receipt:
        # The generation is the one that the command names: made-up samples know nothing of this engine, and one of
        # its own would have every later command refused as older.
        self._generation = command.generation
        self._quota = command
        return self._receipt(command.action_id)

    async def grant_pages(self, command: GrantPages) -> Receipt:
        return self._receipt("")

    async def return_pages(self, command: ReturnPages) -> Receipt:
        return self._receipt("")

    async def prepare(self, command: Prepare) -> Ticket:
        return Ticket(0, 0, 0)

    async def copy(self, ticket: int) -> Receipt:
        return self._receipt("")

    async def commit(self, ticket: int) -> Receipt:
        return self._receipt("")

    async def abort(self, ticket: int) -> Receipt:
        return self._receipt("")

    async def evict(self, command: Evict) -> Receipt:
        return self._receipt(command.action_id)

    async def prefetch(self, command: Prefetch) -> Receipt:
        return self._receipt(command.action_id)

    async def set_weights(self, command: SetWeights) -> Receipt:
        return self._receipt(command.action_id)

    async def receipt(self, action_id: str) -> Receipt:
        return self._receipt(action_id)

    async def close(self) -> None:
        return None

    def _receipt(self, action_id: str) -> Receipt:
        quota = self._quota
        return Receipt(
            action_id, True, self._generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.max_running, 0
        )
