"""States of blocks and of sessions, and which may follow which.

A session (an owner of blocks) moves as a whole; the blocks of a table have its state unless one of them is under
relocation. "Away" is a state of a session alone: it has no block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from services.actuator.memory.errors import IllegalTransition


class BlockState(IntEnum):
    """What a block is doing; the values are what ``Pool.state`` holds."""

    FREE = 0
    LIVE = 1
    """Of a running sequence."""
    IDLE = 2
    """Of a session between turns."""
    LEAVING = 3
    """Being copied to a lower tier."""
    RETURNING = 4
    """Being filled from a lower tier."""
    MOVING = 5
    """Source of a relocation under way."""
    RESERVED = 6
    """Destination of a relocation under way."""
    QUARANTINED = 7
    """Nobody's, but a kernel already launched may read it: free after one more iteration."""


class SessionState(IntEnum):
    """What the owner of a table is doing; LIVE to RETURNING have the values of the blocks' states."""

    LIVE = 1
    IDLE = 2
    LEAVING = 3
    RETURNING = 4
    AWAY = 8
    """All its KV is in a lower tier."""


SESSION_MOVES: Final[dict[str, tuple[frozenset[SessionState], SessionState]]] = {
    "grow": (frozenset({SessionState.LIVE}), SessionState.LIVE),
    "become idle": (frozenset({SessionState.LIVE}), SessionState.IDLE),
    "resume": (frozenset({SessionState.IDLE}), SessionState.LIVE),
    "begin to leave": (frozenset({SessionState.IDLE}), SessionState.LEAVING),
    "complete leaving": (frozenset({SessionState.LEAVING}), SessionState.AWAY),
    "abort leaving": (frozenset({SessionState.LEAVING}), SessionState.IDLE),
    "begin to return": (frozenset({SessionState.AWAY}), SessionState.RETURNING),
    "complete returning": (frozenset({SessionState.RETURNING}), SessionState.IDLE),
    "abort returning": (frozenset({SessionState.RETURNING}), SessionState.AWAY),
    "be freed": (frozenset({SessionState.LIVE, SessionState.IDLE, SessionState.AWAY}), SessionState.AWAY),
}
"""What a session may do: the states it may do it in, and the state that follows."""


def session_after(owner: int, state: SessionState, wanted: str) -> SessionState:
    """State of session ``owner`` after it did ``wanted`` (a key of SESSION_MOVES); IllegalTransition if it may not."""
    allowed, after = SESSION_MOVES[wanted]
    if state not in allowed:
        raise IllegalTransition("session", owner, state.name.lower(), wanted)
    return after
