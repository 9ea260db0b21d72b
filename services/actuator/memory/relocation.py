"""The actuator's end of relocation: prepare over the engine protocol, copy in the shared arena, commit or abort.

The stages are methods of their own, so that a test can kill either process between any two; :meth:`Relocator.relocate`
is all of them. :class:`Relocation` is the pure part: what one ticket may do next, and whether its plan can be copied
at all. Nothing here is left behind when this process dies: the kernel gives the gate back, the engine's lease ends
the ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.engine import Description, Move, Prepare, Receipt, Ticket
from services.actuator.engines.protocol import Engine
from services.actuator.memory.errors import BadGeometry, BadMoves, IllegalTransition, SegmentGone
from services.actuator.memory.geometry import Geometry
from services.actuator.memory.receipts import Transfer
from services.actuator.memory.tickets import moves_of
from services.errors import EngineRefused, EngineUnreachable, MemoryPlaneError

I8 = NDArray[np.int64]

Stage = Literal["prepared", "copied", "committed", "aborted"]
LEASE_S: Final = 6.0
"""A ticket's lease where the caller names none: three steps, like a quota's."""


class Attachment(Protocol):
    """An engine's arena opened by this process."""

    @property
    def geometry(self) -> Geometry: ...

    def copy(self, ticket: int, moves: I8, asked_by: str = "") -> Transfer:
        """Copy the blocks of int64 [n, 2] moves while the gate lets ``ticket`` through, and say what that took.
        UnknownTicket when it does not; SegmentGone when the segment is not what was attached."""
        ...

    def close(self) -> None: ...


class Relocation:
    """One ticket's way; methods raise IllegalTransition out of turn and then change nothing.

    ``moves`` int64 [n, 2]; ``geometry`` of the arena, None where only the engine copies. Raises BadGeometry for a
    block outside the arena and BadMoves for moves that overlap or for a ticket that says another number of them:
    whoever sent them, they are not copied.
    """

    def __init__(self, ticket: Ticket, geometry: Geometry | None, action_id: str = "") -> None:
        moves = moves_of(ticket.plan)
        if geometry is not None:
            geometry.group_of(moves.reshape(-1))
        if len(moves) != ticket.moves and (ticket.plan or geometry is not None):
            raise BadMoves(f"a plan of {len(moves)} moves where the ticket says {ticket.moves}", len(moves))
        blocks, first, uses = np.unique(moves, return_index=True, return_counts=True)
        twice = np.flatnonzero(uses > 1)
        if len(twice):
            at = int(first[twice[0]])
            raise BadMoves("a block that is in two places of the plan", len(twice), at // 2, int(blocks[twice[0]]))
        self.ticket = ticket
        self.action_id = action_id
        self.moves: I8 = moves
        self.stage: Stage = "prepared"
        self.copy_s = 0.0
        self.transfer: Transfer | None = None
        """What this process copied; None where the engine did."""
        self.receipt: Receipt | None = None

    def copied(self, copy_s: float, transfer: Transfer | None = None) -> None:
        self._step("copied", ("prepared",))
        self.copy_s, self.transfer = copy_s, transfer

    def committed(self, receipt: Receipt) -> None:
        self._step("committed", ("copied",))
        self.receipt = receipt

    def aborted(self) -> None:
        self._step("aborted", ("prepared", "copied"))

    def _step(self, to: Stage, allowed: tuple[Stage, ...]) -> None:
        if self.stage not in allowed:
            raise IllegalTransition("ticket", self.ticket.ticket, self.stage, f"be {to}")
        self.stage = to


class Relocator:
    """Relocations in one worker's arena, one at a time.

    ``attach`` opens the arena that a description names, in a thread of its own; it is opened again whenever the
    engine is another one than before. A description states the model's bytes, which are ``arena_scale`` times those
    of the arena. An engine without a handle is asked to copy itself. Every method raises EngineUnreachable and
    EngineRefused as the engine does, SegmentGone for an arena that is not there, and leaves the engine's tables as
    they were.
    """

    def __init__(self, engine: Engine, attach: Callable[[Description], Attachment]) -> None:
        self._engine = engine
        self._attach = attach
        self._attachment: Attachment | None = None
        self._described_on = -1
        self.scale = 1
        """The model's bytes per byte of the arena, as last described."""

    async def ready(self) -> Geometry | None:
        """Describe the engine and attach its arena where that is not done for this connection; gives the arena's
        geometry, None where only the engine copies. BadGeometry for one that is cut otherwise than described."""
        if self._described_on != self._engine.connection or not self._engine.connection:
            said = await self._engine.describe()
            self.close()  # an engine's next life may use the same name
            if said.handle:
                attachment = await asyncio.to_thread(self._attach, said)
                try:
                    _fits(attachment.geometry, said)
                except BadGeometry:
                    attachment.close()
                    raise
                self._attachment, self.scale = attachment, said.arena_scale
            self._described_on = self._engine.connection
        return self._attachment.geometry if self._attachment is not None else None

    async def prepare(
        self,
        moves: tuple[Move, ...] = (),
        budget_bytes: int = 0,
        action_id: str = "",
        lease_s: float = LEASE_S,
        lease_ns: int | None = None,
    ) -> Relocation | None:
        """A relocation of these ``moves``, or of what the engine plans within the budget; None when there is
        nothing to gain. A ticket whose plan cannot be copied is given up. Its lease is ``lease_s`` from the engine's
        clock, or ``lease_ns`` on it."""
        geometry = await self.ready()
        try:
            ticket = await self._ask(moves, budget_bytes, action_id, lease_s, lease_ns)
        except EngineRefused as error:
            if error.reason != "late" or lease_ns is not None:
                raise
            # The engine's clock was last heard of long ago; its refusal brought the time.
            ticket = await self._ask(moves, budget_bytes, action_id, lease_s, lease_ns)
        if not ticket.moves:
            return None
        try:
            return Relocation(ticket, geometry, action_id)
        except MemoryPlaneError:
            await self._give_up(ticket.ticket)
            raise

    async def copy(self, relocation: Relocation) -> None:
        """Copy the blocks, in a thread of its own: neither this process's loop nor the engine waits for it."""
        number = relocation.ticket.ticket
        transfer: Transfer | None = None
        started = time.perf_counter()
        if self._attachment is None:
            await self._engine.copy(number)
        else:
            copy = self._attachment.copy
            try:
                transfer = await asyncio.to_thread(copy, number, relocation.moves, relocation.action_id)
            except SegmentGone:
                self.close()  # what the engine names next is looked for anew
                raise
        relocation.copied(time.perf_counter() - started, transfer)

    async def commit(self, relocation: Relocation) -> Receipt:
        """Re-point the tables; the receipt tells what moved and how long the engine paused."""
        if relocation.stage != "copied":
            raise IllegalTransition("ticket", relocation.ticket.ticket, relocation.stage, "be committed")
        receipt = await self._engine.commit(relocation.ticket.ticket)
        relocation.committed(receipt)
        return receipt

    async def abort(self, relocation: Relocation) -> None:
        """Give the ticket up. An engine that does not answer ends it by its lease."""
        relocation.aborted()
        await self._give_up(relocation.ticket.ticket)

    async def relocate(
        self,
        moves: tuple[Move, ...] = (),
        budget_bytes: int = 0,
        action_id: str = "",
        lease_s: float = LEASE_S,
        lease_ns: int | None = None,
    ) -> Relocation | None:
        """Prepare, copy, commit. What fails after prepare is given up and raised; when the task is cancelled, the
        copy ends by itself and the ticket by its lease."""
        relocation = await self.prepare(moves, budget_bytes, action_id, lease_s, lease_ns)
        if relocation is None:
            return None
        try:
            await self.copy(relocation)
            await self.commit(relocation)
        except (MemoryPlaneError, EngineRefused, EngineUnreachable):
            await self.abort(relocation)
            raise
        return relocation

    def close(self) -> None:
        """Let go of the arena."""
        if self._attachment is not None:
            self._attachment.close()
        self._attachment, self._described_on = None, -1

    async def _ask(
        self, moves: tuple[Move, ...], budget_bytes: int, action_id: str, lease_s: float, lease_ns: int | None
    ) -> Ticket:
        until_ns = self._engine.t_ns + int(lease_s * 1e9) if lease_ns is None else lease_ns
        return await self._engine.prepare(Prepare(moves, budget_bytes, until_ns, action_id))

    async def _give_up(self, number: int) -> None:
        with contextlib.suppress(EngineRefused, EngineUnreachable):
            await self._engine.abort(number)


def _fits(cut: Geometry, said: Description) -> None:
    """BadGeometry unless the arena is cut as described."""
    if said.arena_scale < 1:
        raise BadGeometry(f"{said.handle}: arena_scale", said.arena_scale, "1 or more")
    for name, found, described in (
        ("block_bytes", cut.block_bytes, said.block_bytes),
        ("group_bytes", cut.group_bytes, said.page_group_bytes),
    ):
        if found * said.arena_scale != described:
            scaled = f" at a scale of {said.arena_scale}" if said.arena_scale != 1 else ""
            raise BadGeometry(f"{said.handle}: {name}", found, f"{described} as described{scaled}")
