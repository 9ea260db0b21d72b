"""The course of an examination: candidate pointer -> weights -> traces -> shadow -> champion pointer.

Killed at any line it leaves either the old champion or the new one: the pointer is moved in one write, and only if
nobody else moved it since the champion that was compared with was read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

import msgspec
import numpy as np

from loadgen.demo.background import in_background
from loadgen.examiner.comparison import Compared, compare
from loadgen.examiner.pointers import Held, Pointers
from loadgen.examiner.settings import Settings
from loadgen.examiner.shadow import Shadow
from loadgen.examiner.trials import Result, Stopped, Trials, goodputs
from schemas.actions import ACTION_BATCH
from schemas.codec import DecodeError
from schemas.policies import HEURISTIC_POINTER, KEY_CANDIDATE, PolicyPointer, behaviour_name
from schemas.subjects import BUCKET_POLICY, wildcard
from services.bus import Bus, Message
from services.decision.book import read_pointer
from services.decision.policy import Policy
from services.decision.probation import split_for
from services.errors import BusError, PolicyError

log = logging.getLogger(__name__)


PROBATION_LOOK_S: Final = 1.0
"""Between looks whether the champion is still on probation."""
FLEET_NS: Final = 60 * 10**9
"""A node that was not commanded for so long is no part of the fleet."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What an examination came to."""

    version: str
    promoted: bool
    ratio: float = 0.0
    """Goodput over the champion's on the traces; 0 where it did not come to that."""
    low: float = 0.0
    worst_ratio: float = 0.0
    why: str = ""
    stage: str = ""
    """Where it ended: ``pointer``, ``weights``, ``traces``, ``shadow`` or ``promotion``."""


class _Failed(Exception):  # ends an examination, no error
    def __init__(self, stage: str, why: str, *, final: bool = False, compared: Compared | None = None) -> None:
        super().__init__(why)
        self.stage, self.why, self.final, self.compared = stage, why, final, compared


class Examination:
    """Follows the ``candidate`` pointer; ``verdicts`` grows by one for each candidate examined (the newest hundred
    are kept). ``on_verdict`` is told of each."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        trials: Trials,
        pointers: Pointers,
        on_verdict: Callable[[Verdict], None] = lambda _: None,
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._trials = trials
        self._pointers = pointers
        self._on_verdict = on_verdict
        self._rng = np.random.default_rng(settings.seed)
        self._shadow: Shadow | None = None
        self._shadowed = asyncio.Event()
        self._fleet: dict[str, tuple[int, tuple[str, ...]]] = {}
        """By node: wall clock of its last commands, and its workers."""
        self.verdicts: list[Verdict] = []
        self.examining = ""
        """Version under examination."""

    @property
    def shadowing(self) -> bool:
        """Whether the candidate under examination decides in shadow now."""
        return self._shadow is not None

    async def run(self) -> None:
        """Examine candidates until cancelled; of several that came meanwhile only the newest."""
        newest: asyncio.Queue[PolicyPointer] = asyncio.Queue(maxsize=1)
        subscription = await self._bus.subscribe(wildcard("action"), self._on_actions)
        following = asyncio.create_task(self._follow(newest))
        try:
            while True:
                waiting = asyncio.create_task(self._next(newest))
                await asyncio.wait({waiting, following}, return_when=asyncio.FIRST_COMPLETED)
                if following.done():
                    waiting.cancel()
                    following.result()
                    return
                self._end(await self._examine(waiting.result()))
        finally:
            self._trials.stopping.set()
            waiting.cancel()
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await subscription.unsubscribe()

    async def _next(self, newest: asyncio.Queue[PolicyPointer]) -> PolicyPointer:
        """The newest candidate, once no champion is on probation: one at a time, and what is compared with is sound."""
        while True:
            with contextlib.suppress(BusError):
                if not await self._pointers.probation():
                    return await newest.get()
            await asyncio.sleep(PROBATION_LOOK_S)

    async def _follow(self, newest: asyncio.Queue[PolicyPointer]) -> None:
        async for entry in self._bus.kv_watch(BUCKET_POLICY, KEY_CANDIDATE):
            if entry.value is None:
                continue
            try:
                pointer = read_pointer(KEY_CANDIDATE, entry.value)
            except PolicyError as error:
                self._end(Verdict(version="?", promoted=False, stage="pointer", why=str(error)))
                continue
            if pointer.kind != "dqn":  # a candidate that was withdrawn
                continue
            with contextlib.suppress(asyncio.QueueEmpty):
                newest.get_nowait()
            newest.put_nowait(pointer)

    async def _examine(self, pointer: PolicyPointer) -> Verdict:
        self.examining = pointer.version
        try:
            compared, champion = await self._on_traces(pointer)
            await self._in_shadow(pointer, compared)
            return await self._promote(pointer, champion, compared)
        except _Failed as failed:
            if failed.final:
                await self._reject(pointer, failed.why)
            got = failed.compared
            return Verdict(
                version=pointer.version, promoted=False, stage=failed.stage, why=failed.why,
                ratio=got.ratio if got else 0.0, low=got.low if got else 0.0, worst_ratio=got.worst if got else 0.0,
            )  # fmt: skip
        except BusError as error:  # the next candidate comes once the bus is back
            return Verdict(version=pointer.version, promoted=False, stage="bus", why=str(error))
        finally:
            self.examining = ""

    async def _on_traces(self, pointer: PolicyPointer) -> tuple[Compared, Held]:
        held = await self._pointers.champion()
        if held.pointer.version == pointer.version:
            raise _Failed("pointer", "it is the champion")
        rejection = (await self._pointers.rejections()).of(pointer)
        if rejection is not None:
            raise _Failed("pointer", f"rejected before: {rejection.why}")
        try:
            candidate = await self._pointers.policy(pointer)
        except PolicyError as error:
            raise _Failed("weights", str(error), final=True) from None
        try:
            champion = await self._pointers.policy(held.pointer)
        except PolicyError:  # decision refuses it as well
            held = held._replace(pointer=HEURISTIC_POINTER)
            champion = await self._pointers.policy(HEURISTIC_POINTER)
        try:
            ours, theirs = await in_background(self._replay, candidate, champion, behaviour_name(held.pointer))
        except Stopped as error:
            raise _Failed("traces", str(error)) from None
        got = compare(
            goodputs(ours), goodputs(theirs), self._trials.groups, self._rng,
            confidence=self._settings.confidence, draws=self._settings.draws,
        )  # fmt: skip
        if any(result.oom for result in ours):
            raise _Failed("traces", "a card ran out of memory", final=True, compared=got)
        if got.low <= self._settings.needed_ratio or got.worst < self._settings.worst_ratio:
            await self._confirm(held)
            why = (
                f"not above {held.pointer.version}: {got.ratio:.4f} of its goodput, interval {got.low:.4f} to "
                f"{got.high:.4f}, worst {got.worst:.4f} on {got.worst_name}"
            )
            raise _Failed("traces", why, compared=got)
        return got, held

    def _replay(self, candidate: Policy, champion: Policy, name: str) -> tuple[list[Result], list[Result]]:
        """In a thread; the champion's results are kept."""
        theirs = self._trials.results(champion, name)
        return self._trials.results(candidate), theirs

    async def _in_shadow(self, pointer: PolicyPointer, compared: Compared) -> None:
        limits = self._settings.shadow
        if not limits.steps:
            return
        self._shadow, self._shadowed = Shadow(behaviour_name(pointer), limits), asyncio.Event()
        try:
            await self._pointers.show(pointer)
            try:
                async with asyncio.timeout(limits.limit_s):
                    await self._shadowed.wait()
            except TimeoutError:
                pass
            refusal, enough = self._shadow.refusal() if self._shadow.report().decisions else "", self._shadow.enough
        finally:
            self._shadow = None
            with contextlib.suppress(BusError):
                await self._pointers.show(None)
        if refusal:
            raise _Failed("shadow", refusal, final=True, compared=compared)
        if not enough:
            raise _Failed("shadow", f"too few live decisions within {limits.limit_s:g} s", compared=compared)

    async def _on_actions(self, messages: list[Message]) -> None:
        now_ns = self._pointers.wall_ns()
        for message in messages:
            try:
                batch = ACTION_BATCH.decode(message.data)
            except DecodeError:
                continue
            self._fleet[batch.node] = now_ns, batch.workers
            if self._shadow is not None:
                self._shadow.add(batch)
        if self._shadow is not None and self._shadow.enough:
            self._shadowed.set()

    async def _promote(self, pointer: PolicyPointer, champion: Held, got: Compared) -> Verdict:
        now_ns = self._pointers.wall_ns()
        self._fleet = {node: heard for node, heard in self._fleet.items() if heard[0] >= now_ns - FLEET_NS}
        nodes = [workers for _, workers in self._fleet.values()]
        split = split_for(nodes, pointer.version, self._settings.probation_share)
        promoted = msgspec.structs.replace(
            pointer,
            parent=champion.pointer.version,
            evaluation={
                f"vs_{'heuristic' if champion.pointer.kind == 'heuristic' else 'champion'}": got.ratio,
                "low": got.low, "high": got.high, "worst": got.worst,
            },
            expires_ns=now_ns + round(self._settings.validity_s * 1e9),
            share=split.share,
            part_cards=split.part_cards,
            former=champion.pointer.for_all() if split.share < 1.0 else None,
        )  # fmt: skip
        why = f"examined: {got.ratio:.4f} of {champion.pointer.version}'s goodput, at least {got.low:.4f}"
        refused = await self._pointers.move(promoted, champion.revision, why)
        if refused:
            raise _Failed("promotion", refused, compared=got)
        return Verdict(
            version=pointer.version, promoted=True, stage="promotion", ratio=got.ratio, low=got.low,
            worst_ratio=got.worst, why=why,
        )  # fmt: skip

    async def _confirm(self, held: Held) -> None:
        """A champion that an examiner promoted and that a candidate did not beat stays valid for longer."""
        pointer, validity_ns = held.pointer, round(self._settings.validity_s * 1e9)
        now_ns = self._pointers.wall_ns()
        if pointer.who or not pointer.expires_ns or pointer.expires_ns - now_ns > validity_ns // 2:
            return
        longer = msgspec.structs.replace(pointer, expires_ns=now_ns + validity_ns)
        await self._pointers.move(longer, held.revision, "confirmed: a candidate did not beat it")

    async def _reject(self, pointer: PolicyPointer, why: str) -> None:
        with contextlib.suppress(BusError):  # examined again it fails again
            await self._pointers.reject(pointer, why)

    def _end(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        del self.verdicts[:-100]
        log.info("verdict", extra={"fields": {name: getattr(verdict, name) for name in Verdict.__struct_fields__}})
        self._on_verdict(verdict)
