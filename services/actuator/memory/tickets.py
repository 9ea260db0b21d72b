"""What a relocation ticket is on the engine's side, and how the pool's errors go over the protocol."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.engine import Failure, Move, Receipt, Ticket
from services.actuator.memory.errors import BadGeometry, BadMoves, IllegalTransition, OutOfBlocks, StaleGeneration
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.relocations import Committed
from services.actuator.memory.relocations import Ticket as PoolTicket
from services.errors import MemoryPlaneError

I8 = NDArray[np.int64]

Stage = Literal["open", "committing", "ending", "committed", "aborted"]

REASON_OF: Final[dict[type[MemoryPlaneError], str]] = {
    BadGeometry: "out_of_range",
    BadMoves: "malformed",
    IllegalTransition: "busy",
    OutOfBlocks: "out_of_range",
    StaleGeneration: "stale_generation",
}
"""The protocol's label of each error; the text and the numbers travel with it."""


class Relocatable(Protocol):
    """The part of a :class:`pool.Pool` that relocation needs: an engine with block tables of its own has one too."""

    @property
    def geometry(self) -> Geometry: ...

    @property
    def epoch(self) -> NDArray[np.uint32]:
        """uint32 [blocks]: changes with a block's content or owner."""
        ...

    @property
    def state(self) -> NDArray[np.uint8]:
        """uint8 [blocks], a BlockState each."""
        ...

    def prepare(self, moves: I8) -> PoolTicket: ...

    def commit(self, ticket: PoolTicket) -> Committed: ...

    def abort(self, ticket: PoolTicket, *, copier_stopped: bool) -> None: ...

    def release_held(self, number: int) -> None: ...

    def tick(self) -> int: ...


P = TypeVar("P", bound=Relocatable)


class Planned(NamedTuple):
    """Moves int64 [n, 2] that an engine chose, and the fewest blocks that free as many page groups."""

    moves: I8
    lower_bound_blocks: int = 0


Planner = Callable[[P, int], Planned]
"""Chooses for a budget in bytes."""


class Fence(Protocol):
    """What keeps copiers out: the shared arena's gate."""

    def open(self, ticket: int) -> None: ...

    def close(self) -> bool:
        """False while somebody copies."""
        ...


class NoCopiers:
    """The fence of an arena in which only the engine itself copies."""

    def open(self, ticket: int) -> None:
        return None

    def close(self) -> bool:
        return True


class Held(msgspec.Struct):
    """A ticket given out."""

    wire: Ticket
    pool: PoolTicket
    action_id: str
    lease_ns: int
    stage: Stage = "open"
    copied: bool = False
    """By the engine itself."""
    receipt: Receipt | None = None


class Figures(msgspec.Struct):
    """What relocation did since the start: counts of tickets and moves, the longest pause in microseconds."""

    prepared: int = 0
    committed: int = 0
    aborted: int = 0
    lapsed: int = 0
    """Tickets ended by their lease."""
    fenced: int = 0
    """Tickets that ended while somebody still copied for them."""
    moved: int = 0
    dropped: int = 0
    longest_pause_us: float = 0.0


def failure_of(error: MemoryPlaneError) -> Failure:
    """The protocol's answer to an error of the pool, with its numbers."""
    numbers = {name: float(value) for name, value in vars(error).items() if isinstance(value, int | float)}
    return Failure(REASON_OF.get(type(error), "busy"), str(error), numbers)


def moves_of(plan: tuple[Move, ...]) -> I8:
    """int64 [n, 2] block numbers of a frame's moves; BadMoves for numbers that no block can have."""
    try:
        return np.array([(move.source, move.destination) for move in plan], np.int64).reshape(-1, 2)
    except OverflowError as error:
        raise BadMoves("a block number beyond 64 bits", len(plan)) from error
