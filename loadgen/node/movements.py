"""Swap-outs and prefetches of one worker: what became of each action. Pure, accounting only.

The fleet moves sessions while it advances; its counters say later how much. An action's effect is the growth of the
counter since the action, up to what the action began.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

REMEMBERED: Final = 64
"""Actions kept for late questions and repeats."""

STILL_STEPS: Final = 3
"""A movement in which nothing moves for so many steps has ended."""

Kind = Literal["evict", "prefetch"]


class Movement(msgspec.Struct):
    """One action's movement; bytes."""

    kind: Kind
    wanted_bytes: float
    counter_at: float
    """The worker's counter when the action came."""
    asked_s: float
    """When it came, by the clock of queue times."""
    sessions: frozenset[int]
    """Those it named; none: the engine chooses."""
    moved_bytes: float = 0.0
    done: bool = False
    steps: int = 0
    """Since the action."""
    still_steps: int = 0
    """Of them, the last ones in which nothing more moved."""


class Movements:
    """What a worker was told to move, and what it did."""

    def __init__(self) -> None:
        self.evict_bytes = 0.0
        """To hand to the fleet with its next advance."""
        self.actions: OrderedDict[str, Movement] = OrderedDict()

    def begin(
        self,
        action_id: str,
        kind: Kind,
        wanted_bytes: float,
        counter: float,
        asked_s: float,
        sessions: Sequence[int] = (),
    ) -> Movement:
        """Note a movement: of ``sessions`` that are on their way already, or of bytes that the fleet is yet to be
        told of. One that moves nothing has ended."""
        movement = Movement(kind, wanted_bytes, counter, asked_s, frozenset(sessions), done=wanted_bytes <= 0)
        if kind == "evict" and not sessions:
            self.evict_bytes += wanted_bytes
        self.actions[action_id] = movement
        while len(self.actions) > REMEMBERED:
            self.actions.popitem(last=False)
        return movement

    def asked_by(self, sequence: int, kind: Kind) -> tuple[str, float] | None:
        """The newest open action that a session's transfer belongs to, and when it came; None: the engine's own."""
        for action_id, movement in reversed(self.actions.items()):
            chosen = sequence in movement.sessions or (kind == "evict" and not movement.sessions)
            if movement.kind == kind and not movement.done and chosen:
                return action_id, movement.asked_s
        return None

    def take(self) -> float:
        """Bytes to evict for the fleet's next advance; asked for once."""
        amount, self.evict_bytes = self.evict_bytes, 0.0
        return amount

    def advanced(self, counters: dict[Kind, float], started_bytes: float) -> None:
        """A step passed: ``counters`` say what moved, ``started_bytes`` how much of an eviction was begun in it.

        A movement is over when what it began has moved, or when nothing more moved for some steps: a session that
        comes back calls its own off.
        """
        for movement in self.actions.values():
            if movement.done:
                continue
            counter = counters[movement.kind]
            if movement.steps == 0 and movement.kind == "evict":
                movement.wanted_bytes = min(movement.wanted_bytes, started_bytes)
            moved = max(min(counter - movement.counter_at, movement.wanted_bytes), movement.moved_bytes)
            movement.steps += 1
            movement.still_steps = 0 if moved > movement.moved_bytes else movement.still_steps + 1
            movement.moved_bytes = moved
            movement.done = moved >= movement.wanted_bytes or movement.still_steps >= STILL_STEPS
