"""Compactions and evictions of one worker: tickets, and what became of each action. Pure, accounting only.

The fleet moves bytes while it advances; its counters say later how many. An action's effect is the growth of
the counter since the action, up to what the action asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Literal

import msgspec

from schemas.engine import Failure, Prepare, Ticket

REMEMBERED: Final = 64
"""Actions and tickets kept for late questions and repeats."""

STILL_STEPS: Final = 3
"""An eviction in which nothing moves for so many steps has ended."""

Stage = Literal["prepared", "copied", "committed", "aborted"]


class Movement(msgspec.Struct):
    """One action's movement; bytes."""

    kind: Literal["compact", "evict"]
    wanted_bytes: float
    counter_at: float
    """The worker's counter when the action came."""
    moved_bytes: float = 0.0
    pages_freed: int = 0
    pause_us: float = 0.0
    done: bool = False
    steps: int = 0
    """Since the action."""
    still_steps: int = 0
    """Of them, the last ones in which nothing more moved."""


class OpenTicket(msgspec.Struct):
    ticket: Ticket
    action_id: str
    lease_ns: int
    stage: Stage = "prepared"


class Movements:
    """What a worker was told to move, and what it did."""

    def __init__(self) -> None:
        self.evict_bytes = 0.0
        """To hand to the fleet with its next advance."""
        self.compact_bytes = 0.0
        self.actions: OrderedDict[str, Movement] = OrderedDict()
        self._tickets: OrderedDict[int, OpenTicket] = OrderedDict()
        self._next_ticket = 1

    def evict(self, action_id: str, wanted_bytes: float, counter: float) -> Movement:
        """Start an eviction; a repeat of the action answers with the first one's movement."""
        held = self.actions.get(action_id)
        if held is None:
            held = self._remember(action_id, Movement("evict", wanted_bytes, counter))
            self.evict_bytes += wanted_bytes
        return held

    def prepare(
        self, command: Prepare, now_ns: int, holes_bytes: float, block_bytes: int, group_bytes: int
    ) -> Ticket | Failure:
        """A ticket for at most the budget; an empty one where no page group can be gained. ``busy`` while
        another is open; the same action's repeat gets the ticket it has."""
        self.expire(now_ns)
        for one in self._tickets.values():
            if one.stage in ("prepared", "copied"):
                if command.action_id and one.action_id == command.action_id:
                    return one.ticket
                return Failure("busy", f"ticket {one.ticket.ticket} is open")
        if command.moves:
            return Failure("unsupported", "this engine plans its moves itself")
        if now_ns >= command.lease_ns:
            return Failure("late", numbers={"now_ns": float(now_ns), "lease_ns": float(command.lease_ns)})
        amount = min(float(command.budget_bytes), holes_bytes)
        if holes_bytes < group_bytes or amount < block_bytes:
            return Ticket(0, 0, 0)
        moves = int(amount // block_bytes)
        ticket = Ticket(self._next_ticket, moves, moves * block_bytes)
        self._next_ticket += 1
        self._tickets[ticket.ticket] = OpenTicket(ticket, command.action_id, command.lease_ns)
        while len(self._tickets) > REMEMBERED:
            self._tickets.popitem(last=False)
        return ticket

    def copy(self, number: int) -> Failure | None:
        """Copy a prepared ticket's blocks."""
        one = self._tickets.get(number)
        if one is None or one.stage == "aborted":
            return _unknown(number)
        if one.stage == "prepared":
            one.stage = "copied"
        return None

    def commit(self, number: int, counter: float) -> Movement | Failure:
        """Re-point what was copied; from here on nothing can be taken back."""
        one = self._tickets.get(number)
        if one is None or one.stage == "aborted":
            return _unknown(number)
        if one.stage == "prepared":
            return Failure("busy", f"ticket {number} is not copied yet")
        action_id = one.action_id or f"ticket-{number}"
        if one.stage == "copied":
            one.stage = "committed"
            self.compact_bytes += one.ticket.bytes
            self._remember(action_id, Movement("compact", float(one.ticket.bytes), counter))
        return self.actions.get(action_id) or _unknown(number)

    def abort(self, number: int) -> Failure | None:
        """Give a ticket up; a committed one cannot be."""
        one = self._tickets.get(number)
        if one is None or one.stage == "committed":
            return _unknown(number)
        one.stage = "aborted"
        return None

    def expire(self, now_ns: int) -> int:
        """Abort tickets whose lease ran out; gives how many."""
        late = [one for one in self._tickets.values() if one.stage in ("prepared", "copied") and now_ns >= one.lease_ns]
        for one in late:
            one.stage = "aborted"
        return len(late)

    def abort_open(self) -> int:
        """Abort every open ticket: the worker's own lease ran out."""
        count = 0
        for one in self._tickets.values():
            if one.stage in ("prepared", "copied"):
                one.stage = "aborted"
                count += 1
        return count

    @property
    def open_bytes(self) -> int:
        """Bytes of blocks under relocation."""
        return sum(one.ticket.bytes for one in self._tickets.values() if one.stage in ("prepared", "copied"))

    def take(self) -> tuple[float, float]:
        """(evict, compact) bytes for the fleet's next advance; asked for once."""
        amounts = self.evict_bytes, self.compact_bytes
        self.evict_bytes = self.compact_bytes = 0.0
        return amounts

    def advanced(self, evicted: float, started: float, compacted: float, groups_freed: int, pause_us: float) -> None:
        """A step passed: the counters ``evicted`` and ``compacted`` say what moved, ``started`` how much of an
        eviction was begun in it, the last two what compaction freed and cost in it.

        A compaction is over within its step. An eviction is when what it began has left, or when nothing more
        left for some steps: a session that comes back calls its own off.
        """
        for movement in self.actions.values():
            if movement.done:
                continue
            compact = movement.kind == "compact"
            counter = compacted if compact else evicted
            if counter < movement.counter_at:  # the engine restarted and counts from zero
                movement.counter_at = 0.0
            if movement.steps == 0 and not compact:
                movement.wanted_bytes = min(movement.wanted_bytes, started)
            moved = max(min(counter - movement.counter_at, movement.wanted_bytes), movement.moved_bytes)
            movement.steps += 1
            movement.still_steps = 0 if moved > movement.moved_bytes else movement.still_steps + 1
            movement.moved_bytes = moved
            movement.done = compact or moved >= movement.wanted_bytes or movement.still_steps >= STILL_STEPS
            if compact:
                movement.pages_freed += groups_freed
                movement.pause_us += pause_us

    def _remember(self, action_id: str, movement: Movement) -> Movement:
        self.actions[action_id] = movement
        while len(self.actions) > REMEMBERED:
            self.actions.popitem(last=False)
        return movement


def _unknown(number: int) -> Failure:
    return Failure("unknown_ticket", f"ticket {number}")
