"""An engine on kvcached: its own adapter for everything, with the hard quota as kvcached's limit too.

``set_quota.hard_bytes`` moves the limit: a raise is written before the engine is told, so that it never admits what
cannot be mapped; a lowering after, so that it stops admitting first. A raise that cannot be written is clipped to the
limit in force, and the receipt says why: the lease goes on, and no quota is confirmed that is not there. A command
whose lease is over, as shadow's are, moves nothing: not the limit either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from schemas.engine import Description, Receipt, SetQuota, Snapshot, SnapshotReply
from services.actuator.account import CAN_GROW
from services.actuator.engines.kvcached.limits import Limits
from services.actuator.engines.kvcached.shrink import Shrunk, Terms, shrink
from services.actuator.engines.protocol import PLAIN, Engine
from services.actuator.engines.wrapping import WrappedEngine
from services.clock import Clock
from services.errors import EngineRefused, EngineUnreachable, SegmentError

REMEMBERED: Final = 16
"""Lowerings whose effects can still be asked about."""


class KvcachedCounts(msgspec.Struct):
    """Numbers that only grow, of all engines that share them."""

    not_taken: int = 0
    """Raises that an engine with waiting requests did not follow."""
    foreign_writes: int = 0
    """Limits found that somebody else wrote."""
    contests: int = 0
    """Times the writing ended because somebody else went on writing."""


class KvcachedEngine(WrappedEngine):
    """``limits`` is this worker's segment. ``on_error`` hears what the background met."""

    def __init__(
        self,
        inner: Engine,
        limits: Limits,
        clock: Clock,
        on_error: Callable[[str, Exception], None] = lambda _worker, _error: None,
        counts: KvcachedCounts | None = None,
    ) -> None:
        super().__init__(inner)
        self._limits = limits
        self._clock = clock
        self._on_error = on_error
        self._capabilities: tuple[str, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._shrinks: dict[str, Shrunk] = {}
        self._ended = ""
        """How the last shrink ended, until it was told."""
        self._counts = counts or KvcachedCounts()
        self._waiting = 0
        """Requests in the last snapshot."""
        self._not_taken = False
        self._foreign = 0
        """Changes by others that were counted."""
        self._contested = False

    async def describe(self) -> Description:
        said = await self._inner.describe()
        self._capabilities = said.capabilities
        mapped = self._mapped(said.mapped_bytes)
        # Without its segment an engine's limit cannot be moved, so it is one that cannot grow.
        grows = () if self._limits.last is None else (CAN_GROW,)
        return msgspec.structs.replace(
            said, engine=f"{said.engine}+kvcached", mapped_bytes=mapped, capabilities=(*said.capabilities, *grows)
        )

    async def snapshot(self, ask: Snapshot = PLAIN) -> SnapshotReply:
        said = await self._inner.snapshot(ask)
        mapped = self._mapped(said.mapped_bytes)
        self._waiting = said.waiting
        last = self._limits.last
        hard = said.quota_hard_bytes if last is None else min(said.quota_hard_bytes, last.limit_bytes)
        return msgspec.structs.replace(said, mapped_bytes=mapped, quota_hard_bytes=hard)

    async def set_quota(self, command: SetQuota) -> Receipt:
        """As the engine's, within what kvcached's limit really is."""
        if self._inner.t_ns >= command.lease_ns:
            return await self._inner.set_quota(command)
        words: list[str] = []
        allowed, raised = self._raise(command, words)
        told = msgspec.structs.replace(command, hard_bytes=min(command.hard_bytes, allowed))
        said = await self._inner.set_quota(told)
        # What the engine confirmed, which is not always what it was told: a repeat leaves it as it was.
        self._lower(command, said.quota_hard_bytes, words)
        last = self._limits.last
        hard = said.quota_hard_bytes if last is None else min(said.quota_hard_bytes, last.limit_bytes)
        running = self._task is not None and not self._task.done()
        self._tell_growth(raised, words)
        self._tell_others(words)
        if self._ended:
            words.append(self._ended)
            self._ended = ""
        detail = "; ".join(word for word in (said.detail, *words) if word)
        return msgspec.structs.replace(said, quota_hard_bytes=hard, done=said.done and not running, detail=detail)

    async def receipt(self, action_id: str) -> Receipt:
        """Of a lowering: what its completion has given back so far; of the engine's own effects as ever."""
        state = self._shrinks.get(action_id)
        if state is None:
            return await self._inner.receipt(action_id)
        snapshot = await self._inner.snapshot()
        running = self._task is not None and not self._task.done() and action_id == next(reversed(self._shrinks))
        return Receipt(
            action_id, not running, snapshot.generation, snapshot.rho, snapshot.quota_soft_bytes,
            min(snapshot.quota_hard_bytes, state.target_bytes), snapshot.max_running, self._mapped(state.used_bytes),
            compacted_bytes=state.compacted_bytes, evicted_bytes=state.evicted_bytes, detail=_words(state),
        )  # fmt: skip

    async def close(self) -> None:
        await self._stop()
        self._limits.end()
        await self._inner.close()

    def _mapped(self, told: int) -> int:
        """What kvcached says is mapped; the engine's own word where the segment is away."""
        try:
            return self._limits.observe().mapped_bytes
        except SegmentError as error:
            self._on_error(self.worker, error)
            return told

    def _tell_growth(self, raised: bool, words: list[str]) -> None:
        growth = self._limits.growth
        said = self._limits.verify_growth(self._waiting)
        last = self._limits.last
        if said == "not_taken" and growth is not None and last is not None:
            self._counts.not_taken += not self._not_taken
            words.append(
                f"kvcached: the raise from {growth.from_bytes} to {growth.to_bytes} bytes is not taken: "
                f"{self._waiting} requests wait, {last.mapped_bytes} bytes are mapped"
            )
        elif said == "pending" and raised:
            words.append("kvcached: the raise is written, not yet in use")
        self._not_taken = said == "not_taken"

    def _tell_others(self, words: list[str]) -> None:
        """Who else writes the limit: told when it happens, and in every step while nothing is written because of it."""
        contest = self._limits.contest
        if contest.seen > self._foreign or contest.contested:
            ended = "; contested, no more is written" if contest.contested else ""
            told = f"kvcached: {contest.story()}{ended}"
            if not any("contested" in word for word in words):
                words.append(told)
        self._counts.foreign_writes += contest.seen - self._foreign
        self._counts.contests += contest.contested and not self._contested
        self._foreign, self._contested = contest.seen, contest.contested

    def _raise(self, command: SetQuota, words: list[str]) -> tuple[int, bool]:
        """Write a higher limit; the limit that the engine may be told, and whether one was written."""
        known = self._limits.last
        try:
            if not self._limits.owner.taken:
                self._limits.begin()
            usage = self._limits.observe()
            if command.hard_bytes <= usage.limit_bytes:
                return command.hard_bytes, False
            known = usage
            done = self._limits.set(command.hard_bytes)
            return done.usage.limit_bytes, done.raised
        except SegmentError as error:
            self._on_error(self.worker, error)
            words.append(f"kvcached: {error}")
            # With the segment away nobody knows what may be mapped: no more than what was last in force.
            return known.limit_bytes if known is not None else command.hard_bytes, False

    def _lower(self, command: SetQuota, hard_bytes: int, words: list[str]) -> None:
        last = self._limits.last
        if last is None or hard_bytes <= 0:
            return
        try:
            usage = self._limits.set(hard_bytes).usage if hard_bytes < last.limit_bytes else last
        except SegmentError as error:
            self._on_error(self.worker, error)
            words.append(f"kvcached: {error}")
            usage = last  # the limit stands, but what is idle can leave all the same
        if usage.used_bytes > hard_bytes:
            words.append(f"kvcached: {usage.used_bytes - hard_bytes} bytes above the limit are being given back")
            self._complete(Terms(hard_bytes, command.lease_ns, command.lease_ns, command.action_id), usage.used_bytes)

    def _complete(self, terms: Terms, used_bytes: int) -> None:
        """Bring use down in the background; a newer command's target takes over."""
        if self._task is not None and not self._task.done():
            latest = next(reversed(self._shrinks))
            if self._shrinks[latest].target_bytes == terms.target_bytes:
                return
            self._task.cancel()
            self._shrinks[latest] = self._shrinks[latest]._replace(why="a newer target took over")
        self._shrinks.pop(terms.action_id, None)  # the latest one is the last
        self._shrinks[terms.action_id] = Shrunk(terms.target_bytes, used_bytes, used_bytes)
        while len(self._shrinks) > REMEMBERED:
            del self._shrinks[next(iter(self._shrinks))]
        self._task = asyncio.get_running_loop().create_task(self._run(terms))

    async def _run(self, terms: Terms) -> None:
        def tell(state: Shrunk) -> None:
            self._shrinks[terms.action_id] = state

        try:
            capabilities = self._capabilities or (await self._inner.describe()).capabilities
            await shrink(self._inner, self._limits.observe, capabilities, terms, self._clock, tell)
        except (SegmentError, EngineUnreachable, EngineRefused) as error:
            tell(self._shrinks[terms.action_id]._replace(why=str(error)))
            self._on_error(self.worker, error)
        self._ended = _words(self._shrinks[terms.action_id])

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def _words(state: Shrunk) -> str:
    if state.done:
        return f"kvcached: use {state.before_bytes} to {state.used_bytes} bytes in {state.rounds} rounds"
    return f"kvcached: {state.used_bytes - state.target_bytes} bytes above the limit: {state.why or 'under way'}"
