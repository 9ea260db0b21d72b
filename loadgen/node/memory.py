"""A node's real bytes: one arena and host tier per worker, at a scale that fits, and the tickets of each.

The arenas are shared memory, so the actuator copies in them itself; where the machine has no room for that, or
somebody removed or cut a segment, they are this process's own, no handle is told, and the engine copies. Segments that
a killed node left behind are removed when the next one starts.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.node.fleet_pool import FleetPool, Tables
from loadgen.node.worker_arena import Figures, Sessions, WorkerArena
from schemas.engine import Abort, Commit, Copy, Prepare, Receipt, ReplyBody
from schemas.metrics import COLUMN
from schemas.movement import Moved
from services.actuator.memory import segment
from services.actuator.memory.arrays import NumpyArena, PrivateArena, SharedArena, host_geometry
from services.actuator.memory.attachment import gate_path
from services.actuator.memory.engine_arena import EngineArena
from services.actuator.memory.errors import OutOfBlocks, SegmentGone
from services.actuator.memory.gate import GateKeeper
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.host_tier import HostTier
from services.actuator.memory.mover import BATCH, NumpyMover
from services.actuator.memory.paths import fixed
from services.actuator.memory.receipts import ENGINE

log = logging.getLogger(__name__)

I8 = NDArray[np.int64]

BUDGET_BYTES: Final = 48 << 20
"""Of all arenas of a node: below the 64 MiB that a container's /dev/shm often has."""
SCALES: Final = tuple(1 << k for k in range(17))
PIECE_BYTES: Final = 64
"""Blocks are whole cache lines at any scale."""
PREFIX: Final = "tidegate-node-"
ROOM_FACTOR: Final = 2
"""Host slots per block that the fleet has room for: between two looks it may give the room of one session to another,
whose bytes are written before the first one's are read. What is never used costs nothing."""
REMEMBERED: Final = 64
"""Actions whose transfers are kept for their receipts."""
TICKETS_PER_LIFE: Final = 1 << 20


class Memory(Tables, Protocol):
    """The part of ``loadgen.engine.fleet.Fleet`` that has bytes behind it."""

    @property
    def workers(self) -> int: ...

    def metrics(self) -> NDArray[np.float64]: ...

    def sessions(self, worker: int) -> Sessions: ...


class WorkerMemory:
    """One worker's arena, its tickets, and what each action moved."""

    def __init__(self, arena: WorkerArena, relocation: EngineArena[FleetPool], handle: str) -> None:
        self.arena = arena
        self.relocation = relocation
        self.handle = handle
        """For the actuator; empty: only the engine copies."""
        self.moved: OrderedDict[str, dict[tuple[str, str], Moved]] = OrderedDict()
        """By action id, then by kind and path."""

    def answer(self, body: Prepare | Copy | Commit | Abort, now_ns: int) -> ReplyBody:
        """What the engine says to a relocation's verb. The fleet stands still between two of its steps, which is an
        iteration boundary: a commit's receipt comes at once."""
        self.check()
        match body:
            case Prepare():
                return self.relocation.prepare(body, now_ns)
            case Copy():
                copied = self.relocation.copy(body.ticket, now_ns)
                for one in self.arena.take():
                    self.note(msgspec.structs.replace(one, asked_by=getattr(copied, "action_id", ENGINE)))
                return copied
            case Abort():
                return self.relocation.abort(body.ticket, now_ns)
        said = self.relocation.commit(body.ticket, now_ns)
        if said is not None:
            return said
        ((_, receipt),) = self.relocation.boundary(now_ns)
        return msgspec.structs.replace(receipt, moved=self.of(receipt.action_id))

    def check(self) -> None:
        """Where the shared segment is not what it was, go on with memory of this process: content is made up, so it
        is written anew. Nothing is read of what is left: memory beyond a file that was cut kills who touches it."""
        arena = self.arena.arena
        try:
            arena.check()
        except SegmentGone as error:
            log.error("shared memory lost, going on without", extra={"fields": {"reason": str(error)}})
            self.handle = ""
            self.arena.rebuild(PrivateArena(arena.geometry))
            if isinstance(arena, SharedArena):
                arena.unlink()

    def boundary(self, now_ns: int, *, lapsed: bool) -> None:
        """A step passed: tickets whose lease ran out end, all of them where the worker's own lease did."""
        ticket = self.relocation.open_ticket
        if lapsed and ticket is not None:
            self.relocation.abort(ticket.ticket, now_ns)
        self.relocation.boundary(now_ns)

    @property
    def open_bytes(self) -> int:
        """Bytes of the model under relocation."""
        ticket = self.relocation.open_ticket
        return ticket.bytes if ticket is not None else 0

    def of(self, action_id: str) -> tuple[Moved, ...]:
        """The transfers of an action so far, added up by kind and path."""
        return tuple(self.moved.get(action_id, {}).values())

    def note(self, one: Moved) -> None:
        """Add a transfer to its action's."""
        sums = self.moved.setdefault(one.asked_by, {})
        held = sums.get((one.kind, one.path))
        sums[one.kind, one.path] = one if held is None else _sum(held, one)
        while len(self.moved) > REMEMBERED:
            self.moved.popitem(last=False)


class NodeMemory:
    """All workers' memory. :meth:`create` makes it, :meth:`close` takes shared memory away."""

    def __init__(
        self,
        fleet: Memory,
        workers: Sequence[WorkerMemory],
        scale: int,
        keepers: Sequence[GateKeeper],
    ) -> None:
        self.workers = tuple(workers)
        self.scale = scale
        self._fleet = fleet
        self._keepers = tuple(keepers)

    def sync(self) -> None:
        """After a step of the fleet: bytes follow tables, transfers are noted."""
        for w, one in enumerate(self.workers):
            one.check()
            known = one.arena.figures.wrong
            one.arena.sync(self._fleet.owners(w)[0], self._fleet.sessions(w))
            for moved in one.arena.take():
                one.note(moved)
            if one.arena.figures.wrong > known:
                count = one.arena.figures.wrong - known
                log.error("blocks that do not hold what they must", extra={"fields": {"worker": w, "blocks": count}})

    def figures(self) -> dict[str, int]:
        """Sums over the workers, after every held block was verified once more; ``scale`` beside them, and how
        many have no shared memory."""
        for one in self.workers:
            one.arena.verify_all()
        names = Figures.__struct_fields__
        sums = {name: sum(getattr(one.arena.figures, name) for one in self.workers) for name in names}
        return {**sums, "scale": self.scale, "unshared": sum(not one.handle for one in self.workers)}

    def close(self) -> None:
        """Take segments and gates away. Twice is once."""
        for keeper in self._keepers:
            keeper.remove()
        self._keepers = ()
        for one in self.workers:
            if isinstance(one.arena.arena, SharedArena):
                one.arena.arena.unlink()


def create(
    fleet: Memory,
    name: str,
    base: Callable[[int, str], Receipt],
    asker: Callable[[int, int, str], tuple[str, float]],
    *,
    budget_bytes: int = BUDGET_BYTES,
    folder: Path = segment.FOLDER,
) -> NodeMemory:
    """Arenas for every worker of the fleet. ``name`` is the node's own among all of this machine; ``base(worker,
    action_id)`` makes a receipt with the quota in force, ``asker(worker, sequence, kind)`` tells who asked."""
    metrics = fleet.metrics()
    block_bytes = metrics[:, COLUMN["block_bytes"]].astype(np.int64)
    per_group = metrics[:, COLUMN["page_group_bytes"]].astype(np.int64) // block_bytes
    blocks = np.array([len(fleet.owners(w)[0]) for w in range(fleet.workers)], np.int64)
    slots = (metrics[:, COLUMN["host_capacity_bytes"]] // block_bytes).astype(np.int64) * ROOM_FACTOR
    scale = scale_for(block_bytes, blocks, budget_bytes)
    segment.sweep(PREFIX, folder)
    key = f"{PREFIX}{zlib.crc32(name.encode()):08x}"
    life = time.time_ns() // 1_000_000 * TICKETS_PER_LIFE
    mover = NumpyMover(fixed(BATCH))
    made: list[WorkerMemory] = []
    keepers: list[GateKeeper] = []
    for w in range(fleet.workers):
        geometry = Geometry(int(block_bytes[w]) // scale, int(per_group[w]), int(blocks[w] // per_group[w]))
        bytes_, keeper = _shared(f"{key}-{w}", geometry, folder)
        tier = HostTier(PrivateArena(host_geometry(geometry.block_bytes, max(int(slots[w]), 1))), mover, verify=True)
        arena = WorkerArena(bytes_, tier, scale, seed=w + 1, asker=partial(asker, w))
        relocation = EngineArena(
            FleetPool(fleet, w, arena),
            first_ticket=life + 1,
            plan=FleetPool.plan,
            base=partial(base, w),
            fence=keeper,
            same=partial(_same, arena),
            copy=partial(_copy, arena, mover),
            scale=scale,
        )
        made.append(WorkerMemory(arena, relocation, bytes_.name if isinstance(bytes_, SharedArena) else ""))
        keepers += [keeper] if keeper is not None else []
    return NodeMemory(fleet, made, scale, keepers)


def scale_for(block_bytes: I8, blocks: I8, budget_bytes: int) -> int:
    """The smallest scale, a power of two, at which all arenas together (int64 [workers] bytes a block and blocks) fit
    the budget; where none does, the greatest that leaves whole cache lines."""
    fitting = [one for one in SCALES if not (block_bytes % (one * PIECE_BYTES)).any()] or [1]
    within = [one for one in fitting if int((blocks * (block_bytes // one)).sum()) <= budget_bytes]
    return within[0] if within else fitting[-1]


def _shared(name: str, geometry: Geometry, folder: Path) -> tuple[NumpyArena, GateKeeper | None]:
    try:
        arena = SharedArena.create(name, geometry, folder)
    except OutOfBlocks as error:
        log.warning("no shared memory: the engine copies by itself", extra={"fields": {"reason": str(error)}})
        return PrivateArena(geometry), None
    return arena, GateKeeper.create(gate_path(name, folder))


def _same(worker: WorkerArena, moves: I8) -> NDArray[np.bool_]:
    return np.equal(worker.arena.checksum(moves[:, 0]), worker.arena.checksum(moves[:, 1]))


def _copy(worker: WorkerArena, mover: NumpyMover, moves: I8) -> None:
    worker.transfers.append(mover.move(worker.arena, moves, asked_by=ENGINE).moved(worker.scale))


def _sum(one: Moved, other: Moved) -> Moved:
    return Moved(
        one.kind, one.path, one.bytes + other.bytes, one.pieces + other.pieces, one.seconds + other.seconds,
        one.queue_s + other.queue_s, one.asked_by, one.scale,
    )  # fmt: skip
