"""The engine's logic: iterations over sessions, and the protocol's verbs on their pool. No sockets, no processes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.memory_engine import sessions
from loadgen.memory_engine.sessions import Launch, Mix, Sessions
from schemas.classes import ServiceClass
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Failure,
    Prepare,
    Receipt,
    ReplyBody,
    RequestBody,
    ReturnPages,
    SetQuota,
    Snapshot,
    SnapshotReply,
)
from services.actuator.memory import tickets
from services.actuator.memory.engine_arena import EngineArena
from services.actuator.memory.pool import BlockState, Pool
from services.actuator.memory.tickets import Fence, Planner, failure_of
from services.errors import MemoryPlaneError

U1 = NDArray[np.uint8]


class Report(msgspec.Struct):
    """What happened since the start. ``*_us``: microseconds per iteration (boundary, launch, finish), by whether a
    ticket was open."""

    sessions: sessions.Figures
    relocation: tickets.Figures
    used_blocks: int
    free_blocks: int
    open_ticket: int
    iterations_with_ticket: int
    mean_with_ticket_us: float
    mean_without_ticket_us: float
    longest_boundary_us: float


class MemoryEngine:
    """One worker's engine over ``view`` uint8 [blocks, block_bytes], which ``handle`` names for others.

    ``first_ticket`` must differ between lives; ``clock_ns`` is the node clock; ``check_copies`` has commits compare
    source and destination first.
    """

    def __init__(
        self,
        worker: str,
        pool: Pool,
        view: U1,
        *,
        handle: str,
        fence: Fence,
        first_ticket: int,
        clock_ns: Callable[[], int],
        rng: np.random.Generator,
        plan: Planner[Pool],
        mix: Mix | None = None,
        check_copies: bool = False,
    ) -> None:
        self.pool = pool
        self.sessions = Sessions(pool, view, rng, mix)
        self.arena = EngineArena(
            pool,
            first_ticket=first_ticket,
            plan=plan,
            base=self._receipt,
            fence=fence,
            same=(lambda moves: (view[moves[:, 0]] == view[moves[:, 1]]).all(axis=1)) if check_copies else None,
        )
        self._worker = worker
        self._handle = handle
        self._clock_ns = clock_ns
        self._mix = mix or Mix()
        self._launched: list[Launch] = []
        self._flying: list[Launch] = []
        self._took_ns = 0
        self._with_ticket = False
        self._waiting: dict[int, list[asyncio.Future[ReplyBody]]] = {}
        self._with: tuple[int, int] = (0, 0)
        self._without: tuple[int, int] = (0, 0)
        self._longest_ns = 0

    def begin(self) -> None:
        """Between two iterations: the boundary, then the next one is launched. The one before still runs."""
        started = time.perf_counter_ns()
        self._with_ticket = self.arena.open_ticket is not None
        for number, receipt in self.arena.boundary(self._clock_ns()):
            for future in self._waiting.pop(number, ()):
                if not future.done():
                    future.set_result(receipt)
        self._longest_ns = max(self._longest_ns, time.perf_counter_ns() - started)
        self._launched = self.sessions.launch()
        self._took_ns = time.perf_counter_ns() - started

    def end(self) -> None:
        """The iteration before ends; requests that came since :meth:`begin` came while two were under way."""
        started = time.perf_counter_ns()
        self.sessions.finish(self._flying, self.sessions.figures.iterations - 1)
        self._flying = self._launched
        took_ns = self._took_ns + time.perf_counter_ns() - started
        if self._with_ticket:
            self._with = self._with[0] + 1, self._with[1] + took_ns
        else:
            self._without = self._without[0] + 1, self._without[1] + took_ns

    def report(self) -> Report:
        """Read every byte of every session, then the figures."""
        self.sessions.verify()
        self.pool.check()
        ticket = self.arena.open_ticket
        return Report(
            self.sessions.figures,
            self.arena.figures,
            self.pool.used_blocks,
            self.pool.free_blocks,
            ticket.ticket if ticket is not None else 0,
            self._with[0],
            self._with[1] / max(self._with[0], 1) / 1e3,
            self._without[1] / max(self._without[0], 1) / 1e3,
            self._longest_ns / 1e3,
        )

    def answer(self, body: RequestBody) -> ReplyBody | asyncio.Future[ReplyBody]:
        """The reply to a request; to a commit, at the next boundary."""
        now_ns = self._clock_ns()
        match body:
            case Describe():
                return self._description()
            case Snapshot():
                return self._snapshot()
            case Prepare():
                return self.arena.prepare(body, now_ns)
            case Copy(ticket=number):
                return self.arena.copy(number, now_ns)
            case Commit(ticket=number):
                said = self.arena.commit(number, now_ns)
                if said is not None:
                    return said
                future: asyncio.Future[ReplyBody] = asyncio.get_running_loop().create_future()
                self._waiting.setdefault(number, []).append(future)
                return future
            case Abort(ticket=number):
                return self.arena.abort(number, now_ns)
            case AskReceipt(action_id=action):
                return self.arena.receipt(action)
            case SetQuota():
                return self._set_quota(body)
            case ReturnPages(bytes=size):
                freed = self.pool.give_back(size // self.pool.geometry.group_bytes)
                return msgspec.structs.replace(self._receipt(""), pages_freed=len(freed))
            case _:
                return Failure("unsupported", f"{type(body).__name__}: this engine has one tier and no grants")

    def _set_quota(self, command: SetQuota) -> ReplyBody:
        geometry = self.pool.geometry
        try:
            self.pool.set_quota(command.hard_bytes // geometry.group_bytes, None, command.generation)
        except MemoryPlaneError as error:
            return failure_of(error)
        return self._receipt(command.action_id)

    def _receipt(self, action_id: str) -> Receipt:
        group_bytes = self.pool.geometry.group_bytes
        hard_bytes = self.pool.quota.hard_groups * group_bytes
        return Receipt(
            action_id, True, self.pool.generation, 1.0, hard_bytes, hard_bytes, self._mix.running,
            self.pool.mapped_groups * group_bytes,
        )  # fmt: skip

    def _description(self) -> Description:
        geometry = self.pool.geometry
        return Description(
            self._worker, ServiceClass.CHAT, "memory", geometry.block_bytes, geometry.group_bytes,
            self._mix.token_bytes, geometry.arena_bytes, geometry.arena_bytes,
            self.pool.mapped_groups * geometry.group_bytes, 0, self.pool.generation, ("set_quota", "compact"),
            self._handle,
        )  # fmt: skip

    def _snapshot(self) -> SnapshotReply:
        size = self.pool.geometry.block_bytes
        held = {state: int(count) * size for state, count in zip(BlockState, self.pool.counts(), strict=True)}
        hard_bytes = self.pool.quota.hard_groups * self.pool.geometry.group_bytes
        return SnapshotReply(
            self.pool.generation, 1.0, hard_bytes, hard_bytes, self._mix.running,
            held[BlockState.LIVE], held[BlockState.IDLE], 0, 0, 0,
            held[BlockState.MOVING] + held[BlockState.RESERVED],
            self.pool.mapped_groups * self.pool.geometry.group_bytes, self.pool.free_blocks * size, 0, 0,
        )  # fmt: skip
