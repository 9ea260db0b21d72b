"""A fleet's worker as relocation sees a pool: its block tables are the fleet's, epochs and bytes the arena's."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from loadgen.engine.relocation import FREE, RESERVED, UNMAPPED
from loadgen.node.worker_arena import WorkerArena
from services.actuator.memory import planner
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.occupancy import Occupancy
from services.actuator.memory.relocations import Committed, Ticket, refuse
from services.actuator.memory.states import BlockState
from services.actuator.memory.tickets import Planned

I8 = NDArray[np.int64]


class Tables(Protocol):
    """The part of ``loadgen.engine.fleet.Fleet`` that holds block tables."""

    def owners(self, worker: int) -> tuple[I8, NDArray[np.uint8]]: ...

    def reserve(self, worker: int, blocks: I8) -> None: ...

    def unreserve(self, worker: int, blocks: I8) -> None: ...

    def relocate(self, worker: int, moves: I8) -> int: ...


class FleetPool:
    """``services.actuator.memory.tickets.Relocatable`` for ``worker`` of a fleet.

    The fleet stands still between two of its steps, so a commit is at an iteration boundary by itself and no source
    needs a grace period. Sources are not pinned: a session may end under the copy, which its epoch tells.
    """

    def __init__(self, fleet: Tables, worker: int, arena: WorkerArena) -> None:
        self._fleet = fleet
        self._worker = worker
        self._arena = arena
        self._held: dict[int, I8] = {}
        """Destinations of aborted tickets whose copier may still write."""
        self._newest = 0

    @property
    def geometry(self) -> Geometry:
        return self._arena.arena.geometry

    @property
    def epoch(self) -> NDArray[np.uint32]:
        return self._arena.epoch

    @property
    def state(self) -> NDArray[np.uint8]:
        held, _ = self._fleet.owners(self._worker)
        free = (held == FREE) | (held == UNMAPPED)
        states = np.where(free, BlockState.FREE, np.where(held == RESERVED, BlockState.RESERVED, BlockState.LIVE))
        return states.astype(np.uint8)

    def plan(self, budget_bytes: int) -> Planned:
        """What empties most page groups with at most so many bytes of the model moved."""
        held, pinned = self._fleet.owners(self._worker)
        movable, holes = (held >= 0) & (pinned == 0), held == FREE
        per_group = self.geometry.blocks_per_group
        mapped = (held != UNMAPPED).reshape(-1, per_group).all(axis=1)
        live = movable.reshape(-1, per_group).sum(axis=1, dtype=np.int64)
        free = holes.reshape(-1, per_group).sum(axis=1, dtype=np.int64)
        stuck = np.where(mapped, per_group - live - free, 0)
        occupancy = Occupancy(live, stuck, free, mapped, np.zeros(len(mapped), bool))
        chosen = planner.plan(
            occupancy, self.geometry, movable=movable, holes=holes, budget_bytes=budget_bytes // self._arena.scale
        )
        return Planned(chosen.moves, chosen.lower_bound_bytes // self.geometry.block_bytes)

    def prepare(self, moves: I8) -> Ticket:
        """Reserve the destinations. BadMoves, nothing changed, for moves that overlap or whose source is nobody's or
        in a transfer, or whose destination is not free; BadGeometry for a block outside the arena."""
        self.geometry.group_of(moves.reshape(-1))
        held, pinned = self._fleet.owners(self._worker)
        uses = np.bincount(moves.reshape(-1), minlength=1)
        refuse("block named more than once", moves, (uses[moves[:, 0]] > 1) | (uses[moves[:, 1]] > 1))
        refuse("source is nobody's", moves, held[moves[:, 0]] < 0)
        refuse("source is in a transfer", moves, pinned[moves[:, 0]] != 0)
        refuse("destination is not free", moves, held[moves[:, 1]] != FREE, 1)
        self._fleet.reserve(self._worker, moves[:, 1].copy())
        self._newest += 1
        return Ticket(self._newest, moves, self.epoch[moves[:, 0]].copy())

    def commit(self, ticket: Ticket) -> Committed:
        held, pinned = self._fleet.owners(self._worker)
        sources = ticket.moves[:, 0]
        same = (self.epoch[sources] == ticket.epochs) & (held[sources] >= 0) & (pinned[sources] == 0)
        same &= held[ticket.moves[:, 1]] == RESERVED  # a crash may have taken the group away
        moved, lost = ticket.moves[same], ticket.moves[~same]
        if len(moved):
            self._fleet.relocate(self._worker, moved)
            self._arena.relocated(moved)
        self._fleet.unreserve(self._worker, lost[:, 1].copy())
        return Committed(len(moved), len(lost), moved, lost)

    def abort(self, ticket: Ticket, *, copier_stopped: bool) -> None:
        if copier_stopped:
            self._fleet.unreserve(self._worker, ticket.moves[:, 1].copy())
        else:
            self._held[ticket.number] = ticket.moves[:, 1].copy()

    def release_held(self, number: int) -> None:
        self._fleet.unreserve(self._worker, self._held.pop(number))

    def tick(self) -> int:
        return 0
