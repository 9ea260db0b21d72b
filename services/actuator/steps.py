"""One node's steps: look at its engines, decide what may act, move memory, put quotas in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

import msgspec

from schemas.actions import ActionBatch, MaskReason, WorkerAction
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import Evict, GrantPages, Prepare, Receipt, SetQuota
from schemas.identity import SCHEMA_VERSION, parse_worker_id
from schemas.outcomes import OutcomeBatch, WorkerOutcome
from services.actuator.account import HOLD, Account, Card, Known
from services.actuator.effects import Command, EffectSettings
from services.actuator.engines.protocol import Engine
from services.actuator.leases import (
    CLASS_FORBIDS,
    ENGINE_REFUSED,
    ENGINE_UNREACHABLE,
    NONE,
    REFUSAL_OF_REASON,
    UNKNOWN_WORKER,
    refusal_of,
)
from services.actuator.results import Done, completion_of, outcome_of
from services.errors import EngineRefused, EngineUnreachable
from services.spans import Span

LATENCY_AT_LIMIT: Final = int(MaskReason.LATENCY_AT_LIMIT)
COMPLETION_LIMIT_STEPS: Final = 30
"""After so many steps an effect that never ended is reported as it is, and asked about no more."""


class Pending(msgspec.Struct):
    """A movement under way."""

    receipt: WorkerOutcome
    asked_steps: int = 0


class Member:
    """A worker of the node: its engine and what is under way there."""

    def __init__(self, engine: Engine, card: Card) -> None:
        self.engine = engine
        self.card = card
        self.known: Known | None = None
        self.described_on = 0
        """Connection on which the engine was described."""
        self.problem = ""
        self.pending: dict[str, Pending] = {}


class NodeSteps:
    """Executes a node's ActionBatches one after the other; makes no bus calls.

    ``engine_of`` gives the adapter of a worker, None for one that this node does not have.
    """

    def __init__(
        self,
        node: str,
        engine_of: Callable[[str], Engine | None],
        settings: EffectSettings,
        limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
    ) -> None:
        self.node = node
        self.members: dict[str, Member] = {}
        self.account = Account(limits)
        self.over_quota = 0
        """Times a snapshot showed more mapped than the hard quota that the engine had confirmed."""
        self.changed_quota = 0
        """Times a snapshot showed another quota than the last receipt: a lease ran out, an engine restarted."""
        self._engine_of = engine_of
        self._settings = settings

    async def rebuild(self, workers: Sequence[str]) -> list[str]:
        """Describe these workers and, once a card is known whole, grant its free pages. Gives the workers
        that did not answer; their cards get nothing new until they do."""
        members = [member for worker in workers if (member := self._member(worker)) is not None]
        await self._each([self._look(member) for member in members], members)
        await self._grant()
        return [member.engine.worker for member in members if member.known is None]

    async def execute(self, batch: ActionBatch, span: Span) -> OutcomeBatch:
        """Act on every command of the batch and say what became of it, completions of earlier ones included."""
        members = [self.members.get(action.worker) or self._member(action.worker) for action in batch.actions]
        present = [member for member in members if member is not None]
        unseen = [one for one in present if one.engine.waits or one.known is None]
        if unseen:
            await self._each([self._look(member) for member in unseen], unseen)
            await self._grant()
        refusals = self._plan(batch.actions, members)
        work = [
            self._act(batch, action, member, refusal, span)
            for action, member, refusal in zip(batch.actions, members, refusals, strict=True)
        ]
        outcomes = await self._each(work, unseen)
        t_ns = batch.t_ns
        for member in present:
            if member.pending:
                outcomes += await self._complete(member, batch)
            if member.engine.t_ns > t_ns:
                t_ns = member.engine.t_ns
        return OutcomeBatch(self.node, batch.boot_id, batch.step, SCHEMA_VERSION, t_ns, tuple(outcomes))

    async def close(self) -> None:
        for member in self.members.values():
            await member.engine.close()

    @staticmethod
    async def _each(work: Sequence[Coroutine[Any, Any, Any]], members: Sequence[Member]) -> list[Any]:
        """Together where engines make us wait, one after the other where they do not: a task costs more
        than an in-process engine's whole step."""
        if len(work) > 1 and any(member.engine.waits for member in members):
            return list(await asyncio.gather(*work))
        return [await one for one in work]

    def _member(self, worker: str) -> Member | None:
        member = self.members.get(worker)
        if member is None:
            try:
                mine = parse_worker_id(worker).node == self.node
            except ValueError:
                return None
            engine = self._engine_of(worker) if mine else None
            if engine is None:
                return None
            self.account.expect([worker])
            member = self.members[worker] = Member(engine, self.account.card_of(worker))
        return member

    async def _look(self, member: Member) -> None:
        """Describe what is new or came back, then take a snapshot: acknowledgements prove nothing."""
        engine = member.engine
        try:
            if member.known is None or member.described_on != engine.connection:
                member.known = self.account.describe(engine.worker, await engine.describe())
                member.described_on = engine.connection
            said = await engine.snapshot()
        except (EngineUnreachable, EngineRefused, ValueError) as error:
            member.problem = str(error)
            return
        member.problem = ""
        known = member.known
        if known.max_running and (said.generation, said.rho) != (known.generation, known.rho):
            self.changed_quota += 1
        if known.max_running and said.mapped_bytes > known.hard_bytes:
            self.over_quota += 1
        self.account.snapshot(known, said)

    def _plan(self, actions: Sequence[WorkerAction], members: Sequence[Member | None]) -> list[int]:
        """Refusals, one per action; commands are with the workers they are for."""
        refusals = []
        for action, member in zip(actions, members, strict=True):
            if member is None:
                refusals.append(UNKNOWN_WORKER)
                continue
            known = member.known
            if known is None or member.problem:
                refusals.append(ENGINE_UNREACHABLE)
                continue
            view = known.view
            refusal = refusal_of(
                action, member.engine.t_ns, known.generation, view.swap_allowed, view.q0_bytes, view.floor_bytes
            )
            if LATENCY_AT_LIMIT in action.mask_reasons:
                member.card.troubled = True
            if refusal in (NONE, CLASS_FORBIDS):  # a forbidden eviction still renews the quota
                rho = action.target_rho if action.target_rho < known.rho_max else known.rho_max
                known.target = (action.action if refusal == NONE else HOLD, rho, action.target_max_running)
            refusals.append(refusal)
        for card in self.account.cards.values():
            card.plan(self._settings)
        return refusals

    async def _act(
        self,
        batch: ActionBatch,
        action: WorkerAction,
        member: Member | None,
        refusal: int,
        span: Span,
    ) -> WorkerOutcome:
        done = Done(refusal=refusal)
        if member is None or member.known is None or member.problem:
            done.detail = member.problem if member is not None else ""
            return outcome_of(action, None, done, member.known if member is not None else None)
        known, engine, command = member.known, member.engine, member.known.command
        if command is not None and (command.compact_bytes or command.evict_bytes):
            await self._move(action, member, command, done, span)
        order = _quota(batch, action, command, known)
        try:
            if span.recording:
                with span.child("quota", {"tidegate.worker": action.worker}):
                    done.quota = await engine.set_quota(order)
            else:
                done.quota = await engine.set_quota(order)
            self.account.receipt(known, done.quota)
        except EngineRefused as error:
            if done.refusal == NONE:
                done.refusal = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
                done.detail = str(error)
        except EngineUnreachable as error:
            member.problem = error.detail
            done.refusal, done.detail = ENGINE_UNREACHABLE, error.detail
        outcome = outcome_of(action, command, done, known)
        if done.moved is not None and not done.moved.done:
            member.pending[action.action_id] = Pending(outcome)
        return outcome

    async def _move(self, action: WorkerAction, member: Member, command: Command, done: Done, span: Span) -> None:
        """Compaction or swap-out. Its failure is told, and the quota still goes out: the lease must not suffer."""
        engine = member.engine
        attributes = {"tidegate.worker": action.worker}
        try:
            if command.compact_bytes:
                with span.child("compact", attributes) as child:
                    done.moved = await _compact(engine, action, command.compact_bytes)
                    child.set("tidegate.bytes", command.compact_bytes)
            if command.evict_bytes:
                with span.child("swap-out", attributes) as child:
                    done.moved = await engine.evict(Evict((), command.evict_bytes, action.action_id))
                    child.set("tidegate.bytes", command.evict_bytes)
        except EngineRefused as error:
            done.refusal = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
            done.detail = str(error)
        except EngineUnreachable as error:
            done.refusal, done.detail = ENGINE_UNREACHABLE, error.detail

    async def _complete(self, member: Member, batch: ActionBatch) -> list[WorkerOutcome]:
        ended = []
        for action_id, pending in list(member.pending.items()):
            if batch.step == _step_of(action_id, batch):
                continue
            pending.asked_steps += 1
            try:
                effect = await member.engine.receipt(action_id)
            except (EngineRefused, EngineUnreachable) as error:
                if pending.asked_steps < COMPLETION_LIMIT_STEPS and isinstance(error, EngineUnreachable):
                    continue
                effect = _nothing(action_id)
            late = pending.asked_steps >= COMPLETION_LIMIT_STEPS
            if (effect.done or late) and member.known is not None:
                detail = "" if effect.done else f"not done after {pending.asked_steps} steps"
                ended.append(completion_of(pending.receipt, effect, member.known, detail))
                del member.pending[action_id]
        return ended

    async def _grant(self) -> None:
        """Deal out free page groups to engines that map on grants only."""
        for card in self.account.cards.values():
            if not any(one is not None and "grants" in one.capabilities for one in card.members.values()):
                continue
            for worker, granted in sorted(card.grants().items(), key=lambda item: item[1]):
                member = self.members[worker]
                if member.known is None or "grants" not in member.known.capabilities:
                    continue
                try:
                    await member.engine.grant_pages(GrantPages(granted, member.known.generation))
                    member.known.granted_bytes = granted
                except (EngineRefused, EngineUnreachable) as error:
                    member.problem = str(error)


def _quota(batch: ActionBatch, action: WorkerAction, command: Command | None, known: Known) -> SetQuota:
    """The last frame of a worker's step. A refused command still tells the engine that its step is answered:
    with the quota already in force and a lease that is over, which no engine renews."""
    if command is None:
        return SetQuota(
            batch.boot_id, batch.step, action.action_id, known.rho, known.soft_bytes, known.hard_bytes,
            known.max_running, max(action.base_generation, 0), 0, action.deadline_ns,
        )  # fmt: skip
    return SetQuota(
        batch.boot_id, batch.step, action.action_id, command.rho, command.soft_bytes, command.hard_bytes,
        command.max_running, action.base_generation, action.lease_ns, action.deadline_ns,
    )  # fmt: skip


async def _compact(engine: Engine, action: WorkerAction, budget_bytes: int) -> Receipt | None:
    """Prepare, copy, commit; a ticket that cannot be copied is given up. None: there was nothing to move."""
    ticket = await engine.prepare(Prepare((), budget_bytes, action.lease_ns, action.action_id))
    if not ticket.moves:
        return None
    try:
        await engine.copy(ticket.ticket)
        return await engine.commit(ticket.ticket)
    except EngineRefused:
        await engine.abort(ticket.ticket)
        raise


def _step_of(action_id: str, batch: ActionBatch) -> int:
    return batch.step if action_id.endswith(f"@{batch.boot_id}.{batch.step}") else -1


def _nothing(action_id: str) -> Receipt:
    return Receipt(action_id, True, 0, 0.0, 0, 0, 0, 0, detail="unknown to the engine")
