"""Engines on one Fleet: every verb of the protocol, and the step that ends when all workers were commanded.

Synchronous and without I/O: the sockets are in ``server``, the clock that calls :meth:`advance` in ``replay``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.node.describing import describe, snapshot
from loadgen.node.movements import Kind, Movement, Movements
from loadgen.node.sleepers import Sleepers
from loadgen.node.stepper import Stepper
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Evict,
    Failure,
    GrantPages,
    Prefetch,
    Prepare,
    Receipt,
    ReplyBody,
    RequestBody,
    ReturnPages,
    SampleReply,
    SetQuota,
    SetWeights,
    Snapshot,
)
from schemas.identity import STEP_NS, STEP_S, Order
from schemas.metrics import COLUMN
from schemas.telemetry import pack_metrics
from services.actuator.effects import DEFAULTS
from services.actuator.engines.quota import Quota, QuotaLimits
from services.actuator.memory.receipts import ENGINE, OUT

if TYPE_CHECKING:
    from loadgen.node.memory import NodeMemory, WorkerMemory

F8 = NDArray[np.float64]

CAPABILITIES: Final = ("set_quota", "evict", "sessions", "receipt", "sleep", "grow")
"""No ``grants``: the fleet's guard owns the card's account, and looks and maps in one thread. With memory behind the
blocks ``compact`` comes on top, and ``prefetch`` where the fleet does not bring sessions back by itself."""


class Emulation:
    """The engines of a node. Simulated time is ``step`` x 2 s."""

    def __init__(
        self,
        fleet: Stepper,
        workers: Sequence[str],
        classes: Sequence[int],
        limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
        *,
        fetches: bool = False,
        wall_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``fetches``: the fleet brings sessions back by itself. ``wall_s``: clock of queue times."""
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
                    q0_bytes=int(self.metric(i, "q0_bytes")),
                    capacity_bytes=int(self.metric(i, "card_kv_capacity_bytes")),
                    rho_max=limits[ServiceClass(classes[i])].rho_max,
                    max_running_start=int(self.metric(i, "max_running")),
                )
            )
            for i in range(len(workers))
        ]
        self.memory: NodeMemory | None = None
        """The bytes behind the blocks; whoever made them puts them here. Without, nothing can be compacted."""
        self._answered = [Order(-1, -1)] * len(workers)
        self._caps = np.full(len(workers), np.inf)
        """Hard quotas below what the neighbours leave, bytes."""
        self._fetches = fetches
        self._moved: dict[Kind, F8] = {"evict": np.zeros(len(workers)), "prefetch": np.zeros(len(workers))}
        """Since the start, bytes: what left the card, and what came back."""
        self._wall_s = wall_s
        self.sleepers = Sleepers(fleet, self._card_mates)

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
        self.fleet.command(
            rho=np.array([one.rho for one in self.quotas]),
            max_running=np.array([one.max_running for one in self.quotas], np.int64),
            evict_bytes=np.array([one.take() for one in self.movements]),
            generation=np.array([one.generation for one in self.quotas], np.int64),
            hard_bytes=self._caps,
        )
        self.fleet.advance(STEP_S)
        self.step += 1
        self.metrics = self.fleet.metrics()
        self._follow_capacity()
        if self.memory is not None:
            self.memory.sync()
        effects = self.fleet.effects()
        self._moved["evict"] += effects.evicted_bytes
        self._moved["prefetch"] += effects.loaded_bytes
        for i, movements in enumerate(self.movements):
            counters = {kind: float(moved[i]) for kind, moved in self._moved.items()}
            movements.advanced(counters, float(effects.evict_started_bytes[i]))
            if self.t_ns >= self.quotas[i].lease_until_ns:
                self._caps[i] = np.inf
            lapsed = self.quotas[i].expire(self.t_ns)
            if self.memory is not None:
                self.memory.workers[i].boundary(self.t_ns, lapsed=lapsed)

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
        try:
            return self._answer(self.index[worker], body)
        except (ValueError, OverflowError) as error:  # numbers that no block, session or budget can have
            return Failure("out_of_range", str(error))

    def _answer(self, i: int, body: RequestBody) -> ReplyBody:
        match body:
            case SetQuota():
                return self._set_quota(i, body)
            case Snapshot():
                return snapshot(self, i, body)
            case Describe():
                return describe(self, i)
            case Evict():
                return self._evict(i, body)
            case Prepare() | Copy() | Commit() | Abort():
                if self.memory is None:
                    return Failure("unsupported", "no memory behind the blocks")
                return self._relocation(i, body, self.memory.workers[i])
            case AskReceipt():
                return self._ask_receipt(i, body.action_id)
            case GrantPages():
                return self.quotas[i].grant(body, int(self.mapped_bytes(i))) or self._receipt(i, "")
            case ReturnPages():
                return self._receipt(i, "", detail="empty page groups are given back as soon as they are empty")
            case Prefetch():
                return self._prefetch(i, body)
            case SetWeights():
                return self._set_weights(i, body)
            case _:
                return Failure("unsupported", "this is a worker's socket: ask node.sock for samples")

    def _set_quota(self, i: int, command: SetQuota) -> ReplyBody:
        # Refused commands count as well: the step was answered, and time must not wait for what will not come.
        self._answered[i] = max(self._answered[i], Order(command.boot_id, command.step))
        failure = self.quotas[i].set_quota(command, self.t_ns, int(self.metric(i, "floor_bytes")))
        if failure is None:
            # Up to what the neighbours leave, the fleet's guard keeps the quota itself and looks at every mapping: a
            # copy of it that is two seconds old would only keep the worker from what a neighbour gave back since.
            lowered = command.hard_bytes < self._left_by_neighbours(i) - self.group_bytes(i)
            self._caps[i] = command.hard_bytes if lowered else np.inf
        return failure or self._receipt(i, command.action_id)

    def _left_by_neighbours(self, i: int) -> float:
        """Hard quota of a worker as DESIGN section 1 has it: the card's capacity less the reserve and what each
        neighbour has mapped or must be able to map, bytes."""
        others = [k for k in self._card_mates(i) if k != i]
        held = sum(max(self.mapped_bytes(k), self.metric(k, "floor_bytes")) for k in others)
        return self.metric(i, "card_kv_capacity_bytes") - held - (DEFAULTS.reserve_bytes if others else 0.0)

    @property
    def capabilities(self) -> tuple[str, ...]:
        more = ("compact",) if self.memory is not None else ()
        return CAPABILITIES + more + (() if self._fetches else ("prefetch",))

    def _evict(self, i: int, command: Evict) -> ReplyBody:
        if (forbidden := self._forbidden(i, "KV never leaves the card")) is not None:
            return forbidden
        movements = self.movements[i]
        held = movements.actions.get(command.action_id)
        if held is not None:  # a repeat
            return self._receipt(i, command.action_id, held)
        if command.bytes <= 0 and not command.sessions:
            return Failure("out_of_range", numbers={"bytes": float(command.bytes)})
        host_free = self.metric(i, "host_capacity_bytes") - self.metric(i, "host_used_bytes")
        if host_free < self.metric(i, "block_bytes"):
            return Failure("tier_full", numbers={"host_free_bytes": host_free})
        wanted = min(float(command.bytes), self.metric(i, "kv_idle_bytes"))
        if command.sessions:
            try:
                wanted = float(self.fleet.evict_sessions(i, command.sessions).sum())
            except ValueError as error:
                return Failure("unknown_session", str(error))
        return self._begin(i, "evict", command.action_id, wanted, command.sessions)

    def _prefetch(self, i: int, command: Prefetch) -> ReplyBody:
        if (forbidden := self._forbidden(i, "KV never leaves the card")) is not None:
            return forbidden
        if self._fetches:
            return Failure("unsupported", "this engine brings sessions back ahead of time by itself")
        held = self.movements[i].actions.get(command.action_id)
        if held is not None:
            return self._receipt(i, command.action_id, held)
        try:
            wanted = float(self.fleet.prefetch_sessions(i, command.sessions).sum())
        except ValueError as error:
            return Failure("unknown_session", str(error))
        return self._begin(i, "prefetch", command.action_id, wanted, command.sessions)

    def _set_weights(self, i: int, command: SetWeights) -> ReplyBody:
        if (forbidden := self._forbidden(i, "it never sleeps")) is not None:
            return forbidden
        failure = self.sleepers.order(i, command)
        self.metrics = self.fleet.metrics()  # room for weights that come back is taken now
        self._follow_capacity()
        return failure or self._receipt(i, command.action_id)

    def _forbidden(self, i: int, words: str) -> Failure | None:
        kind = ServiceClass(self.classes[i])
        if self._limits[kind].swap_allowed:
            return None
        return Failure("class_forbids", f"class {kind.name.lower()}: {words}")

    def _follow_capacity(self) -> None:
        """A card whose neighbours' weights are in host memory can be told to map more."""
        for i, quota in enumerate(self.quotas):
            capacity = int(self.metric(i, "card_kv_capacity_bytes"))
            if capacity != quota.limits.capacity_bytes:
                quota.limits = msgspec.structs.replace(quota.limits, capacity_bytes=capacity)

    def _card_mates(self, i: int) -> list[int]:
        """Workers of ``i``'s card, itself among them."""
        cards = self.fleet.card_of
        return [k for k in range(len(self.workers)) if cards[k] == cards[i]]

    def _begin(self, i: int, kind: Kind, action_id: str, wanted: float, sessions: Sequence[int]) -> Receipt:
        counter = float(self._moved[kind][i])
        movement = self.movements[i].begin(action_id, kind, wanted, counter, self._wall_s(), sessions)
        return self._receipt(i, action_id, movement)

    def _relocation(self, i: int, body: Prepare | Copy | Commit | Abort, memory: WorkerMemory) -> ReplyBody:
        said = memory.answer(body, self.t_ns)
        if isinstance(body, Commit) and isinstance(said, Receipt):
            self.metrics = self.fleet.metrics()  # what the commit gave back is given back now
            said = msgspec.structs.replace(said, mapped_bytes=int(self.mapped_bytes(i)))
        return said

    def _ask_receipt(self, i: int, action_id: str) -> ReplyBody:
        movement = self.movements[i].actions.get(action_id)
        if movement is None and self.memory is not None:
            said = self.memory.workers[i].relocation.receipt(action_id)
            if isinstance(said, Receipt):
                return said
        return self._receipt(i, action_id, movement, "" if movement else "no movement of this action")

    def base_receipt(self, i: int, action_id: str) -> Receipt:
        """The quota in force, for an action that moved nothing yet."""
        return self._receipt(i, action_id)

    def asker(self, i: int, sequence: int, kind: str) -> tuple[str, float]:
        """Who asked for a session's transfer ``out`` or ``back``, and how many seconds ago by the wall."""
        found = self.movements[i].asked_by(sequence, "evict" if kind == OUT else "prefetch")
        return (ENGINE, 0.0) if found is None else (found[0], self._wall_s() - found[1])

    def _receipt(self, i: int, action_id: str, movement: Movement | None = None, detail: str = "") -> Receipt:
        quota = self.quotas[i]
        done, said = self.sleepers.receipt(i, action_id)
        detail = said or detail
        receipt = Receipt(
            action_id,
            done and (movement is None or movement.done),
            quota.generation,
            quota.rho,
            quota.soft_bytes,
            quota.hard_bytes,
            quota.max_running,
            int(self.mapped_bytes(i)),
            detail=detail,
        )
        if movement is None:
            return receipt
        moved = self.memory.workers[i].of(action_id) if self.memory is not None else ()
        name = "evicted_bytes" if movement.kind == "evict" else "prefetched_bytes"
        return msgspec.structs.replace(receipt, moved=moved, **{name: int(movement.moved_bytes)})

    def metric(self, i: int, name: str) -> float:
        """A metric, 0 where this fleet has none of it."""
        value = float(self.metrics[i, COLUMN[name]])
        return value if np.isfinite(value) else 0.0

    def group_bytes(self, i: int) -> int:
        return max(int(self.metric(i, "page_group_bytes")), 1)

    def mapped_bytes(self, i: int) -> float:
        return max(self.metric(i, "kv_mapped_bytes"), self.metric(i, "kv_bytes"))
