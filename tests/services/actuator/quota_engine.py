"""An engine behind a real socket that keeps its quota by the rules that every engine keeps."""

from __future__ import annotations

from pathlib import Path

from schemas.engine import (
    AskReceipt,
    Describe,
    Description,
    Evict,
    Failure,
    Prefetch,
    Receipt,
    ReplyBody,
    RequestBody,
    SetQuota,
    Snapshot,
    SnapshotReply,
)
from services.actuator.engines import emulated
from services.actuator.engines.quota import Quota, QuotaLimits
from services.actuator.engines.serving import Sockets
from services.clock import ManualClock

MIB = 1 << 20


class QuotaEngine:
    """``said`` holds what its snapshots tell beside the quota; whatever it was told is in ``told``."""

    def __init__(self, worker: str, clock: ManualClock, q0: int, capacity: int, start: int = 256) -> None:
        self.worker = worker
        self.clock = clock
        self.quota = Quota(
            QuotaLimits(q0_bytes=q0, capacity_bytes=capacity, max_running_start=start, hard_limit_bytes=2 * capacity)
        )
        self.capabilities: tuple[str, ...] = ("set_quota", "evict", "prefetch")
        self.mapped_bytes = 0
        self.said: dict[str, object] = {}
        self.told: list[RequestBody] = []
        self.sockets = Sockets(clock.now_ns)

    async def serve(self, folder: Path) -> None:
        await self.sockets.serve(emulated.socket_path(folder, self.worker), self.answer)

    @property
    def in_force(self) -> tuple[int, float, int, int, int]:
        quota = self.quota
        return quota.generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.max_running

    def answer(self, body: RequestBody) -> ReplyBody:
        quota, limits = self.quota, self.quota.limits
        quota.expire(self.clock.now_ns())
        if not isinstance(body, Describe | Snapshot):
            self.told.append(body)
        match body:
            case Describe():
                return Description(
                    self.worker, 0, "played", MIB, MIB, 65536, limits.q0_bytes, limits.capacity_bytes,
                    self.mapped_bytes, MIB, quota.generation, self.capabilities,
                )  # fmt: skip
            case Snapshot():
                return SnapshotReply(
                    quota.generation, quota.rho, quota.soft_bytes, quota.hard_bytes, quota.max_running,
                    0, 0, 0, 0, 0, 0, self.mapped_bytes, 0, MIB, quota.lease_until_ns, **self.said,
                )  # fmt: skip
            case SetQuota():
                return quota.set_quota(body, self.clock.now_ns(), MIB) or self.receipt(body.action_id)
            case Evict() | Prefetch() | AskReceipt():
                return self.receipt(body.action_id)
        return Failure("unsupported")

    def receipt(self, action_id: str) -> Receipt:
        return Receipt(action_id, True, *self.in_force, self.mapped_bytes)
