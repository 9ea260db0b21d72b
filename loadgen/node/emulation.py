"""Engines on one Fleet: every verb of the protocol, and the step that ends when all workers were commanded.

Synchronous and without I/O: the sockets are in ``server``, the clock that calls :meth:`advance` in ``replay``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.node.movements import Movement, Movements
from loadgen.node.quota import Quota, QuotaLimits
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Evict,
    Failure,
    GrantPages,
    IdleSession,
    Prefetch,
    Prepare,
    Receipt,
    ReplyBody,
    RequestBody,
    ReturnPages,
    SampleReply,
    SetQuota,
    Snapshot,
    SnapshotReply,
)
from schemas.identity import STEP_NS, STEP_S, Order
from schemas.metrics import COLUMN
from schemas.telemetry import pack_metrics

if TYPE_CHECKING:  # the node's logic needs no compiled fleet: tests run it on plain numbers
    from loadgen.engine.fleet import Effects
    from loadgen.engine.fleet import Snapshot as FleetSnapshot

F8 = NDArray[np.float64]

CAPABILITIES: Final = ("set_quota", "compact", "evict", "receipt")
"""No ``grants``: the fleet's guard owns the card's account, and looks and maps in one thread."""

IDLE_LISTED: Final = 64
"""Idle sessions that a snapshot lists, least recently used first."""


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
        compact_bytes: F8 | None = None,
        generation: NDArray[np.int64] | None = None,
    ) -> None: ...

    def advance(self, step_s: float = ...) -> None: ...

    def metrics(self) -> F8: ...

    def effects(self) -> Effects: ...

    def snapshot(self, worker: int) -> FleetSnapshot: ...


class Emulation:
    """The engines of a node. Simulated time is ``step`` x 2 s."""

    def __init__(
        self,
        fleet: Stepper,
        workers: Sequence[str],
        classes: Sequence[int],
        limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
    ) -> None:
        if not fleet.workers == len(workers) == len(classes):
            raise ValueError(f"{fleet.workers} workers, {len(workers)} names, {len(classes)} classes")
        self.fleet = fleet
        self.workers = tuple(workers)
        self.index = {worker: i for i, worker in enumerate(workers)}
        self.classes = tuple(int(one) for one in classes)
        self.step = 0
        self.boot_id = 0
        """Of the telemetry that asks now; only commands of its steps let time go on."""
        self.metrics = fleet.metrics()
        self._limits = limits
        self.movements = [Movements() for _ in workers]
        self.quotas = [
            Quota(
                QuotaLimits(
                    q0_bytes=int(self._get(i, "q0_bytes")),
                    capacity_bytes=int(self._get(i, "card_kv_capacity_bytes")),
                    rho_max=limits[ServiceClass(classes[i])].rho_max,
                    max_running_start=int(self._get(i, "max_running")),
                )
            )
            for i in range(len(workers))
        ]
        self._answered = [Order(-1, -1)] * len(workers)

    @property
    def t_ns(self) -> int:
        """Node clock."""
        return self.step * STEP_NS

    @property
    def commanded(self) -> bool:
        """Whether every worker's command for this step, or a later one, has come."""
        return all(one.boot_id == self.boot_id and one.step >= self.step for one in self._answered)

    def asked_by(self, boot_id: int) -> None:
        """Telemetry asks for samples; a newer boot's steps count from here on."""
        self.boot_id = max(self.boot_id, boot_id)

    def advance(self) -> None:
        """One step of simulated time under the quotas in force; then leases may run out."""
        count = len(self.workers)
        amounts = [one.take() for one in self.movements]
        self.fleet.command(
            rho=np.array([one.rho for one in self.quotas]),
            max_running=np.array([one.max_running for one in self.quotas], np.int64),
            evict_bytes=np.array([one[0] for one in amounts]),
            compact_bytes=np.array([one[1] for one in amounts]),
            generation=np.array([one.generation for one in self.quotas], np.int64),
        )
        self.fleet.advance(STEP_S)
        self.step += 1
        self.metrics = self.fleet.metrics()
        effects = self.fleet.effects()
        for i in range(count):
            movements = self.movements[i]
            movements.advanced(
                self._get(i, "evicted_bytes"),
                float(effects.evict_started_bytes[i]),
                self._get(i, "compacted_bytes"),
                int(effects.groups_freed[i]),
                float(effects.pause_us[i]),
            )
            movements.expire(self.t_ns)
            if self.quotas[i].expire(self.t_ns):
                movements.abort_open()

    def sample(self, finished: bool) -> SampleReply:
        """METRICS rows of this step, quota columns as this node keeps them."""
        rows = self.metrics.copy()
        for i, quota in enumerate(self.quotas):
            rows[i, COLUMN["generation"]] = quota.generation
            rows[i, COLUMN["rho"]] = quota.rho
            rows[i, COLUMN["quota_soft_bytes"]] = quota.soft_bytes
            rows[i, COLUMN["quota_hard_bytes"]] = quota.hard_bytes
            rows[i, COLUMN["max_running"]] = quota.max_running
        cards = tuple(int(one) for one in self.fleet.card_of)
        return SampleReply(self.step, self.workers, cards, self.classes, pack_metrics(rows), finished)

    def answer(self, worker: str, body: RequestBody) -> ReplyBody:
        """What the worker's engine says to a request; never raises for what a caller can send."""
        i = self.index[worker]
        match body:
            case SetQuota():
                return self._set_quota(i, body)
            case Snapshot():
                return self._snapshot(i)
            case Describe():
                return self._describe(i)
            case Evict():
                return self._evict(i, body)
            case Prepare():
                block, group = int(self._get(i, "block_bytes")), self._group(i)
                return self.movements[i].prepare(body, self.t_ns, self._holes(i), block, group)
            case Copy():
                return self.movements[i].copy(body.ticket) or self._receipt(i, "")
            case Commit():
                done = self.movements[i].commit(body.ticket, self._get(i, "compacted_bytes"))
                return done if isinstance(done, Failure) else self._receipt(i, "", done)
            case Abort():
                return self.movements[i].abort(body.ticket) or self._receipt(i, "")
            case AskReceipt():
                movement = self.movements[i].actions.get(body.action_id)
                return self._receipt(i, body.action_id, movement, "" if movement else "no movement of this action")
            case GrantPages():
                return self.quotas[i].grant(body, int(self._mapped(i))) or self._receipt(i, "")
            case ReturnPages():
                return self._receipt(i, "", detail="empty page groups are given back as soon as they are empty")
            case Prefetch():
                if body.sessions:
                    return Failure("unsupported", "this engine brings sessions back ahead of time by itself")
                return self._receipt(i, body.action_id)
            case _:
                return Failure("unsupported", "this is a worker's socket: ask node.sock for samples")

    def _set_quota(self, i: int, command: SetQuota) -> ReplyBody:
        # Refused commands count as well: the step was answered, and time must not wait for what will not come.
        self._answered[i] = max(self._answered[i], Order(command.boot_id, command.step))
        failure = self.quotas[i].set_quota(command, self.t_ns, int(self._get(i, "floor_bytes")))
        return failure or self._receipt(i, command.action_id)

    def _describe(self, i: int) -> Description:
        quota = self.quotas[i]
        return Description(
            self.workers[i],
            self.classes[i],
            "emulated",
            int(self._get(i, "block_bytes")),
            self._group(i),
            int(self._get(i, "kv_bytes_per_token")),
            quota.limits.q0_bytes,
            quota.limits.capacity_bytes,
            int(self._mapped(i)),
            int(self._get(i, "floor_bytes")),
            quota.generation,
            CAPABILITIES,
            granted_bytes=quota.granted_bytes,
            link_bytes_per_s=self._get(i, "link_bytes_per_s"),
        )

    def _snapshot(self, i: int) -> SnapshotReply:
        quota = self.quotas[i]
        kv, idle = self._get(i, "kv_bytes"), self._get(i, "kv_idle_bytes")
        leaving = sum(
            one.wanted_bytes - one.moved_bytes
            for one in self.movements[i].actions.values()
            if one.kind == "evict" and not one.done
        )
        host_free = self._get(i, "host_capacity_bytes") - self._get(i, "host_used_bytes")
        return SnapshotReply(
            generation=quota.generation,
            rho=quota.rho,
            quota_soft_bytes=quota.soft_bytes,
            quota_hard_bytes=quota.hard_bytes,
            max_running=quota.max_running,
            live_bytes=int(kv - idle),
            idle_bytes=int(idle),
            leaving_bytes=int(leaving),
            away_bytes=int(self._get(i, "host_used_bytes")),
            returning_bytes=0,
            relocating_bytes=self.movements[i].open_bytes,
            mapped_bytes=int(self._mapped(i)),
            free_block_bytes=int(self._holes(i)),
            floor_bytes=int(self._get(i, "floor_bytes")),
            lease_until_ns=quota.lease_until_ns,
            host_free_bytes=int(max(host_free, 0.0)),
            idle=self._idle(i),
        )

    def _idle(self, i: int) -> tuple[IdleSession, ...]:
        block, now_s = int(self._get(i, "block_bytes")), self.step * STEP_S
        return tuple(
            IdleSession(one.sequence, one.blocks * block, now_s - one.idle_since_s, one.expected_return_s)
            for one in self.fleet.snapshot(i).idle[:IDLE_LISTED]
        )

    def _evict(self, i: int, command: Evict) -> ReplyBody:
        if not self._limits[ServiceClass(self.classes[i])].swap_allowed:
            return Failure("class_forbids", f"KV of class {ServiceClass(self.classes[i]).name.lower()} never leaves")
        if command.sessions:
            return Failure("unsupported", "this engine chooses the sessions itself: send bytes")
        if command.bytes <= 0:
            return Failure("out_of_range", numbers={"bytes": float(command.bytes)})
        host_free = self._get(i, "host_capacity_bytes") - self._get(i, "host_used_bytes")
        if command.action_id not in self.movements[i].actions and host_free < self._get(i, "block_bytes"):
            return Failure("tier_full", numbers={"host_free_bytes": host_free})
        counter = self._get(i, "evicted_bytes")
        movement = self.movements[i].evict(command.action_id, float(command.bytes), counter)
        return self._receipt(i, command.action_id, movement)

    def _receipt(self, i: int, action_id: str, movement: Movement | None = None, detail: str = "") -> Receipt:
        quota = self.quotas[i]
        compact = movement is not None and movement.kind == "compact"
        moved = int(movement.moved_bytes) if movement is not None else 0
        return Receipt(
            action_id,
            movement is None or movement.done,
            quota.generation,
            quota.rho,
            quota.soft_bytes,
            quota.hard_bytes,
            quota.max_running,
            int(self._mapped(i)),
            compacted_bytes=moved if compact else 0,
            evicted_bytes=0 if compact else moved,
            pages_freed=movement.pages_freed if movement is not None else 0,
            pause_us=movement.pause_us if movement is not None else 0.0,
            detail=detail,
        )

    def _get(self, i: int, name: str) -> float:
        """A metric, 0 where this fleet has none of it."""
        value = float(self.metrics[i, COLUMN[name]])
        return value if np.isfinite(value) else 0.0

    def _group(self, i: int) -> int:
        return max(int(self._get(i, "page_group_bytes")), 1)

    def _mapped(self, i: int) -> float:
        return max(self._get(i, "kv_mapped_bytes"), self._get(i, "kv_bytes"))

    def _holes(self, i: int) -> float:
        return self._mapped(i) - self._get(i, "kv_bytes")
