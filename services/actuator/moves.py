"""What one worker moves in a step: compaction, swap-out, prefetch, each with its span and its receipt.

A movement that fails raises EngineRefused, EngineUnreachable or MemoryPlaneError and lost nothing.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from schemas.engine import Evict, Prefetch, Receipt
from schemas.outcomes import WorkerOutcome
from services.actuator import sessions
from services.actuator.account import Known
from services.actuator.effects import Command, EffectSettings
from services.actuator.leases import ENGINE_REFUSED, ENGINE_UNREACHABLE, REFUSAL_OF_REASON
from services.actuator.members import Begun, Member
from services.actuator.memory.receipts import Ledger
from services.actuator.results import Results
from services.errors import EngineRefused, EngineUnreachable, MemoryPlaneError
from services.spans import Span

PREFETCH_SUFFIX: Final = "/prefetch"
"""After the id of the command in whose step the actuator brought sessions back."""
NOTHING_WORTH_MOVING: Final = "no session worth moving"


class Moves(NamedTuple):
    """A worker's movements in one step."""

    member: Member
    known: Known
    row: int
    """Of the batch."""
    action_id: str
    lease_ns: int
    span: Span
    """The step's."""
    results: Results
    ledger: Ledger
    settings: EffectSettings

    async def run(self, command: Command) -> Receipt | None:
        """Bring back, swap out, compact; gives the receipt of what was commanded. A failure is told, and the quota
        still goes out: the lease must not suffer."""
        row, results, refusals = self.row, self.results, self.results.refusals
        if command.prefetch_bytes:
            try:
                self._note(self.action_id + PREFETCH_SUFFIX, await self.prefetch(command.prefetch_bytes))
            except (EngineRefused, EngineUnreachable) as error:  # nobody commanded it
                results.explain(row, f"prefetch: {error}")
        said: Receipt | None = None
        try:
            if command.compact_bytes:
                said = await self.compact(command.compact_bytes)
            elif command.evict_bytes:
                said = await self.swap_out(command.evict_bytes)
                if said is None:
                    results.explain(row, NOTHING_WORTH_MOVING)
        except EngineRefused as error:
            refusals[row] = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
            results.explain(row, str(error))
        except MemoryPlaneError as error:
            refusals[row] = ENGINE_REFUSED
            results.explain(row, str(error))
        except EngineUnreachable as error:
            refusals[row] = ENGINE_UNREACHABLE
            results.explain(row, error.detail)
        self._note(self.action_id, said)
        return said

    async def compact(self, budget_bytes: int) -> Receipt | None:
        """Prepare, copy, commit. None: there was nothing to gain."""
        with self._child("compact", budget_bytes) as child:
            relocator = self.member.relocator
            done = await relocator.relocate(budget_bytes=budget_bytes, action_id=self.action_id, lease_ns=self.lease_ns)
            if done is None or done.receipt is None:
                return None
            said = done.receipt
            own = (done.transfer.moved(relocator.scale),) if done.transfer is not None else ()
            said = msgspec.structs.replace(
                said,
                moved=(*said.moved, *own),
                lower_bound_bytes=said.lower_bound_bytes or done.ticket.lower_bound_bytes,
            )
            tell(child, said)
            return said

    async def swap_out(self, needed_bytes: int) -> Receipt | None:
        """Have idle sessions leave: by name where the engine takes names, else by its own order. None: none of
        them is worth moving."""
        named = sessions.leaving(self.known, needed_bytes, self.settings)
        if named == ():
            return None
        with self._child("swap-out", needed_bytes) as child:
            order = Evict((), needed_bytes, self.action_id) if named is None else Evict(named, 0, self.action_id)
            said = await self.member.engine.evict(order)
            child.set("tidegate.sessions", len(named or ()))
            tell(child, said)
            return said

    async def prefetch(self, budget_bytes: int) -> Receipt | None:
        """Bring sessions back that are expected soon; until they are there the receipt tells what was started.
        None: nothing fits."""
        named, started_bytes = sessions.returning(self.known, budget_bytes, self.settings)
        if not named:
            return None
        with self._child("prefetch", started_bytes) as child:
            said = await self.member.engine.prefetch(Prefetch(named, self.action_id + PREFETCH_SUFFIX))
            child.set("tidegate.sessions", len(named))
            tell(child, said)
            if not said.done:
                said = msgspec.structs.replace(said, prefetched_bytes=max(said.prefetched_bytes, started_bytes))
            return said

    def _note(self, action_id: str, said: Receipt | None) -> None:
        """What a movement came to; one that is not done yet is asked about in later steps."""
        if said is None:
            return
        self.results.moved(self.row, said)
        if said.done:
            self.ledger.effect(said)
        else:
            self.member.begun.append(Begun(self.row, action_id))

    def _child(self, name: str, asked_bytes: int) -> Span:
        worker = self.member.engine.worker
        return self.span.child(name, {"tidegate.worker": worker, "tidegate.asked_bytes": asked_bytes})


def tell(span: Span, said: Receipt | WorkerOutcome) -> None:
    """Attributes of a movement: bytes really moved, by which path, in how many pieces; what it freed and cost.
    ``tidegate.model_bytes`` are the engine's, part of which may have needed no transfer."""
    if not span.recording:
        return
    moved = said.moved
    span.set("tidegate.model_bytes", said.compacted_bytes + said.evicted_bytes + said.prefetched_bytes)
    if moved:
        span.set("tidegate.bytes", sum(one.bytes for one in moved))
        span.set("tidegate.path", "+".join(dict.fromkeys(one.path for one in moved)))
        span.set("tidegate.pieces", sum(one.pieces for one in moved))
        span.set("tidegate.scale", max(one.scale for one in moved))
    if said.pages_freed:
        span.set("tidegate.pages_freed", said.pages_freed)
    if said.lower_bound_bytes:
        span.set("tidegate.lower_bound_bytes", said.lower_bound_bytes)
    if said.pause_us:
        span.set("tidegate.pause_us", said.pause_us)
