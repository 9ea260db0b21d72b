"""A worker as its node's steps see it from one to the next: its engine, its arena, and what is under way there."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec

from schemas.engine import Description
from schemas.outcomes import WorkerOutcome
from services.actuator.account import Account, Card, Known
from services.actuator.engines.protocol import Engine
from services.actuator.memory.relocation import Attachment, Relocator
from services.actuator.sessions import question
from services.errors import EngineRefused, EngineUnreachable


class Pending(msgspec.Struct):
    """A movement under way."""

    receipt: WorkerOutcome
    asked_steps: int = 0


class Begun(NamedTuple):
    """A movement that began in this step and is not done."""

    row: int
    action_id: str
    """By which its engine knows it."""


class Member:
    """A worker of the node."""

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.card = card
        self.known: Known | None = None
        self.described_on = 0
        """Connection on which the engine was described."""
        self.problem = ""
        self.pending: dict[str, Pending] = {}
        self.begun: list[Begun] = []
        self.over_quota = 0
        """Times a snapshot showed more mapped than the hard quota that the engine had confirmed."""
        self.changed_quota = 0
        """Times a snapshot showed another quota than the last receipt: a lease ran out, an engine restarted."""
        self._relocator: Relocator | None = None

    @property
    def relocator(self) -> Relocator:
        """Kept, with the arena that it opened, for as long as the engine's connection."""
        if self._relocator is None:
            self._relocator = Relocator(self.engine, _attach)
        return self._relocator

    async def look(self, account: Account, action: int) -> None:
        """Describe what is new or came back, then take a snapshot: acknowledgements prove nothing. ``action`` is
        what it is to do in this step."""
        engine = self.engine
        try:
            if self.known is None or self.described_on != engine.connection:
                self.known = account.describe(engine.worker, await engine.describe())
                self.described_on = engine.connection
            asked = question(self.known, action)
            said = await engine.snapshot(asked)
        except (EngineUnreachable, EngineRefused, ValueError) as error:
            self.problem = str(error)
            return
        self.problem = ""
        known = self.known
        if known.max_running and (said.generation, said.rho) != (known.generation, known.rho):
            self.changed_quota += 1
        if known.max_running and said.mapped_bytes > known.hard_bytes:
            self.over_quota += 1
        account.snapshot(known, said, asked)

    async def close(self) -> None:
        """Let go of arena and engine."""
        if self._relocator is not None:
            await asyncio.to_thread(self._relocator.close)  # it waits for a copy under way
        await self.engine.close()


def _attach(said: Description) -> Attachment:
    # Compiled copies cost a second and 100 MB to load: only where there is an arena to copy in.
    from services.actuator.memory.attachment import SharedAttachment

    return SharedAttachment.open(said)
