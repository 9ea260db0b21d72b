"""Relocation of blocks in two phases: prepare, then commit or abort (DESIGN section 5).

Full blocks never change, so they are copied while the engine runs. Commit re-points a table only where the source's
epoch is what it was at prepare; any other move is dropped. A source is free one iteration after the commit, because
kernels already launched may read it. Freeing, resuming or writing a session whose block is under way does not wait
for the copy: it changes the epoch, and the block itself is nobody else's until the ticket ends.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from services.actuator.memory.blocks import FREE, NO_OWNER, NO_WAITER, Blocks
from services.actuator.memory.errors import BadMoves, UnknownTicket
from services.actuator.memory.states import BlockState
from services.actuator.memory.tables import Tables

I8 = NDArray[np.int64]
Bool = NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, eq=False)
class Ticket:
    """A prepared plan: ``moves`` int64 [n, 2] of (source, destination), ``epochs`` uint32 [n] of the sources."""

    number: int
    moves: I8
    epochs: NDArray[np.uint32]


@dataclasses.dataclass(frozen=True, eq=False)
class Committed:
    """What a commit did: how many moves tables now follow, how many were given up, and which: ``moves`` int64
    [moved, 2] and ``lost`` int64 [dropped, 2]."""

    moved: int
    dropped: int
    moves: I8
    lost: I8


class Relocations:
    """Tickets of one pool."""

    def __init__(self, blocks: Blocks, tables: Tables) -> None:
        self.quarantined: list[I8] = []
        """Blocks that the next iteration boundary frees."""
        self.held: dict[int, I8] = {}
        """Destinations of aborted tickets whose copier may still write."""
        self.tickets: dict[int, Ticket] = {}
        self._blocks = blocks
        self._tables = tables
        self._newest = 0

    def prepare(self, moves: I8) -> Ticket:
        """Reserve destinations and pin sources of moves int64 [n, 2]; BadMoves, and nothing happens, when they
        overlap, a source may not move, or a destination is not free, not mapped or protected."""
        moves = np.array(moves, np.int64)
        self._check(moves)
        sources, destinations = moves[:, 0], moves[:, 1]
        blocks = self._blocks
        blocks.state[sources] = BlockState.MOVING
        blocks.occupy(destinations, BlockState.RESERVED)
        self._newest += 1
        moves.flags.writeable = False
        ticket = Ticket(self._newest, moves, blocks.epoch[sources])
        self.tickets[ticket.number] = ticket
        return ticket

    def commit(self, ticket: Ticket | int) -> Committed:
        """Re-point tables; call it at an iteration boundary, with all copies done. UnknownTicket if it ended."""
        open_ticket = self._close(ticket)
        blocks = self._blocks
        moves = open_ticket.moves
        same = blocks.epoch[moves[:, 0]] == open_ticket.epochs
        whole = bool(same.all())
        moved, dropped = (moves, moves[:0]) if whole else (moves[same], moves[~same])
        sources, destinations = np.ascontiguousarray(moved[:, 0]), np.ascontiguousarray(moved[:, 1])
        if len(moved):
            self._tables.repoint(sources, destinations)
            blocks.hand_over(sources, destinations)
            self.quarantined.append(sources)
        if len(dropped):
            self._settle(dropped[:, 0])
            blocks.vacate(dropped[:, 1])
        return Committed(len(moved), len(dropped), moved, dropped)

    def abort(self, ticket: Ticket | int, copier_stopped: bool) -> None:
        """Give a ticket up: sources are what they were, destinations free after one more iteration, or, while a
        copier may still write to them, once ``release_held`` says that it stopped. UnknownTicket if it ended."""
        open_ticket = self._close(ticket)
        self._settle(open_ticket.moves[:, 0])
        destinations = open_ticket.moves[:, 1]
        self._blocks.state[destinations] = BlockState.QUARANTINED
        if copier_stopped:
            self.quarantined.append(destinations)
        else:
            self.held[open_ticket.number] = destinations

    def release_held(self, number: int) -> None:
        """The copier of an aborted ticket has stopped: its destinations go through the grace period."""
        if number not in self.held:
            raise UnknownTicket(number, self._newest, len(self.held))
        self.quarantined.append(self.held.pop(number))

    def tick(self) -> int:
        """One iteration boundary: what was quarantined before it is free; gives how many blocks."""
        if not self.quarantined:
            return 0
        freed = np.concatenate(self.quarantined)
        self.quarantined = []
        self._blocks.vacate(freed)
        return len(freed)

    def _settle(self, sources: I8) -> None:
        """Sources that do not move after all: back to rest, or free if their session is gone."""
        blocks = self._blocks
        orphans = blocks.owner[sources] == NO_OWNER
        kept = sources[~orphans]
        blocks.state[kept] = blocks.resting[kept]
        if orphans.any():
            blocks.vacate(sources[orphans])

    def _close(self, ticket: Ticket | int) -> Ticket:
        number = ticket if isinstance(ticket, int) else ticket.number
        if number not in self.tickets:
            raise UnknownTicket(number, self._newest, len(self.tickets))
        return self.tickets.pop(number)

    def _check(self, moves: I8) -> None:
        if moves.ndim != 2 or moves.shape[1] != 2:
            raise BadMoves(f"moves of shape {moves.shape}, expected [n, 2]")
        blocks = self._blocks
        sources, destinations = moves[:, 0], moves[:, 1]
        count = blocks.geometry.blocks
        outside = (moves < 0) | (moves >= count)
        refuse(f"outside blocks 0 to {count - 1}", moves, outside[:, 0] | outside[:, 1])
        times = np.bincount(moves.reshape(-1), minlength=1)
        repeated = times[moves] > 1
        refuse("block named more than once", moves, repeated[:, 0] | repeated[:, 1])
        state = blocks.state[sources]
        refuse("source is not live or idle", moves, (state != BlockState.LIVE) & (state != BlockState.IDLE))
        refuse("source is pinned", moves, blocks.pinned[sources])
        refuse("source is being written", moves, blocks.writing[sources])
        groups = destinations // blocks.geometry.blocks_per_group
        taken = (blocks.state[destinations] != FREE) | ~blocks.mapped[groups]
        refuse("destination is not free", moves, taken, 1)
        refuse("destination is protected for a waiter", moves, blocks.protected[groups] != NO_WAITER, 1)


def refuse(reason: str, moves: I8, bad: Bool, side: int = 0) -> None:
    """BadMoves that names the first of ``moves`` int64 [n, 2] where ``bad`` bool [n], and its block on ``side``."""
    if bad.any():
        first = int(bad.argmax())
        raise BadMoves(reason, int(bad.sum()), first, int(moves[first, side]))
