"""One node's steps: look at its engines, decide what may act, move memory, put quotas in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from schemas.actions import ActionBatch, Columns
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import Evict, GrantPages, Prepare, Receipt, SetQuota
from schemas.identity import parse_worker_id
from schemas.outcomes import OutcomeBatch, WorkerOutcome, outcomes_of
from services.actuator.account import HOLD, Account, Card, Known
from services.actuator.effects import MOVES, Command, EffectSettings
from services.actuator.engines.protocol import Engine
from services.actuator.leases import (
    CLASS_FORBIDS,
    ENGINE_REFUSED,
    ENGINE_UNREACHABLE,
    LATENCY_AT_LIMIT,
    NONE,
    REFUSAL_OF_REASON,
    UNKNOWN_WORKER,
    refusal_of,
)
from services.actuator.quiet import Quiet, Said
from services.actuator.results import Results, completed, completion_of
from services.errors import EngineRefused, EngineUnreachable
from services.spans import Span

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
        self.begun: tuple[int, str] | None = None
        """Row and action id of a movement that began in this step and is not done."""


class Step(NamedTuple):
    """A batch being executed; members and results in the order of its workers."""

    batch: ActionBatch
    columns: Columns
    members: Sequence[Member | None]
    """None: the node has no such worker."""
    results: Results
    span: Span
    said: list[Said]


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
        self._quiet: Quiet | None = None
        """The step before, where the next may be its repetition."""
        self._engine_of = engine_of
        self._settings = settings

    async def rebuild(self, workers: Sequence[str]) -> list[str]:
        """Describe these workers and, once a card is known whole, grant its free pages. Gives the workers
        that did not answer; their cards get nothing new until they do."""
        members = [member for worker in workers if (member := self._member(worker)) is not None]
        await self._each([self._look(member) for member in members], members)
        await self._grant()
        return [member.engine.worker for member in members if member.known is None]

    async def execute(self, batch: ActionBatch, columns: Columns, span: Span) -> OutcomeBatch:
        """Act on every command of the batch and say what became of it, completions of earlier ones included.
        ``columns`` are the batch's."""
        if self._quiet is not None and not span.recording:
            repeated = await self._quiet.repeat(batch)
            if repeated is not None:
                return repeated
        members = [self.members.get(worker) or self._member(worker) for worker in batch.workers]
        present = [member for member in members if member is not None]
        unseen = [one for one in present if one.engine.waits or one.known is None]
        if unseen:
            await self._each([self._look(member) for member in unseen], unseen)
            await self._grant()
        step = Step(batch, columns, members, Results(batch, columns), span, [])
        self._plan(step)
        rows = range(len(members))
        if len(rows) > 1 and any(member.engine.waits for member in unseen):
            await asyncio.gather(*[self._act(step, (row,)) for row in rows])
        else:  # a task costs more than an in-process engine's whole step
            await self._act(step, rows)
        t_ns = batch.t_ns
        ended: list[WorkerOutcome] = []
        begun: list[Member] = []
        for member in present:
            if member.pending:
                ended += await self._complete(member)
            if member.begun is not None:
                begun.append(member)
            if member.engine.t_ns > t_ns:
                t_ns = member.engine.t_ns
        outcomes = step.results.batch(self.node, t_ns, [one.known if one is not None else None for one in members])
        if begun:
            self._remember(begun, outcomes_of(outcomes))
        quiet = not (unseen or any(outcomes.statuses) or any([one.pending for one in present]))  # noqa: C419
        if quiet and all([card.quiet for card in self.account.cards.values()]):  # noqa: C419  # a list is faster
            self._quiet = Quiet(batch, outcomes, step.said)
        else:
            self._quiet = None
        return completed(outcomes, ended) if ended else outcomes

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

    def _plan(self, step: Step) -> None:
        """Refusals into the step's results; commands are with the workers they are for."""
        batch, columns, refusals = step.batch, step.columns, step.results.refusals
        deadline_ns, lease_ns = batch.deadline_ns, batch.lease_ns
        width = len(batch.mask_reasons) // max(len(batch.workers), 1)
        late = LATENCY_AT_LIMIT in batch.mask_reasons
        row = -1
        for member, action, rho, max_running, generation in zip(step.members, batch.actions, *columns, strict=True):
            row += 1
            if member is None:
                refusals[row] = UNKNOWN_WORKER
                continue
            known = member.known
            if known is None or member.problem:
                refusals[row] = ENGINE_UNREACHABLE
                continue
            view = known.view
            refusal = refusal_of(
                action,
                rho,
                max_running,
                generation,
                deadline_ns,
                lease_ns,
                t_ns=member.engine.t_ns,
                generation=known.generation,
                swap_allowed=view.swap_allowed,
                q0_bytes=view.q0_bytes,
                floor_bytes=view.floor_bytes,
            )
            if late and LATENCY_AT_LIMIT in batch.mask_reasons[width * row : width * (row + 1)]:
                member.card.troubled = True
            if refusal == NONE:
                known.target = (action, rho if rho < known.rho_max else known.rho_max, max_running)
                continue
            if refusal == CLASS_FORBIDS:  # a forbidden eviction still renews the quota
                known.target = (HOLD, rho if rho < known.rho_max else known.rho_max, max_running)
            refusals[row] = refusal
        for card in self.account.cards.values():
            card.plan(self._settings)

    async def _act(self, step: Step, rows: Iterable[int]) -> None:
        """Put the commands of these rows in force, one after the other; what they came to goes to the results."""
        batch, results, span = step.batch, step.results, step.span
        boot_id, number, refusals = batch.boot_id, batch.step, results.refusals
        # schemas.identity.action_id, with its part that is the same for all workers made once.
        suffix = f"@{boot_id}.{number}"
        target_rho, generations = step.columns.target_rho, step.columns.base_generations
        for row in rows:
            member = step.members[row]
            if member is None or member.known is None or member.problem:
                results.explain(row, member.problem if member is not None else "")
                results.refuse(row)
                continue
            known, engine, action = member.known, member.engine, batch.actions[row]
            command = known.command
            worker_action = engine.worker + suffix
            moved: Receipt | None = None
            if command is not None and (command.compact_bytes or command.evict_bytes):
                moved = await self._move(step, row, member, command, worker_action)
            if command is None:
                # A refused command still tells the engine that its step is answered: with the quota already in
                # force and a lease that is over, which no engine renews.
                order = SetQuota(
                    boot_id, number, worker_action, known.rho, known.soft_bytes, known.hard_bytes,
                    known.max_running, max(generations[row], 0), 0, batch.deadline_ns,
                )  # fmt: skip
            else:
                order = SetQuota(
                    boot_id, number, worker_action, command.rho, command.soft_bytes, command.hard_bytes,
                    command.max_running, generations[row], batch.lease_ns, batch.deadline_ns,
                )  # fmt: skip
            quota: Receipt | None = None
            try:
                if span.recording:
                    with span.child("quota", {"tidegate.worker": engine.worker}):
                        quota = await engine.set_quota(order)
                else:
                    quota = await engine.set_quota(order)
                self.account.receipt(known, quota)
                if not refusals[row]:
                    step.said.append(Said(engine, order, quota))
            except EngineRefused as error:
                if refusals[row] == NONE:
                    refusals[row] = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
                    results.explain(row, str(error))
            except EngineUnreachable as error:
                member.problem = error.detail
                refusals[row] = ENGINE_UNREACHABLE
                results.explain(row, error.detail)
            if command is None:
                results.refuse(row)
            elif (
                quota is None
                or refusals[row]
                or action in MOVES
                or quota.rho != command.rho
                or command.rho != target_rho[row]
            ):  # else it was accepted, and nothing is to be judged
                results.settle(row, command, moved, quota)
            if moved is not None and not moved.done:
                member.begun = (row, worker_action)

    async def _move(self, step: Step, row: int, member: Member, command: Command, worker_action: str) -> Receipt | None:
        """Compaction or swap-out. Its failure is told, and the quota still goes out: the lease must not suffer."""
        engine, results = member.engine, step.results
        attributes = {"tidegate.worker": engine.worker}
        moved: Receipt | None = None
        try:
            if command.compact_bytes:
                with step.span.child("compact", attributes) as child:
                    moved = await _compact(engine, command.compact_bytes, step.batch.lease_ns, worker_action)
                    child.set("tidegate.bytes", command.compact_bytes)
            if command.evict_bytes:
                with step.span.child("swap-out", attributes) as child:
                    moved = await engine.evict(Evict((), command.evict_bytes, worker_action))
                    child.set("tidegate.bytes", command.evict_bytes)
        except EngineRefused as error:
            results.refusals[row] = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
            results.explain(row, str(error))
        except EngineUnreachable as error:
            results.refusals[row] = ENGINE_UNREACHABLE
            results.explain(row, error.detail)
        return moved

    @staticmethod
    def _remember(begun: Iterable[Member], receipts: Sequence[WorkerOutcome]) -> None:
        """Keep the receipts of movements that began in this step, for their completions."""
        for member in begun:
            place, member.begun = member.begun, None
            if place is not None:
                row, worker_action = place
                member.pending[worker_action] = Pending(receipts[row])

    async def _complete(self, member: Member) -> list[WorkerOutcome]:
        """The later words on the effects of earlier steps that have ended."""
        ended = []
        for action_id, pending in list(member.pending.items()):
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


async def _compact(engine: Engine, budget_bytes: int, lease_ns: int, worker_action: str) -> Receipt | None:
    """Prepare, copy, commit; a ticket that cannot be copied is given up. None: there was nothing to move."""
    ticket = await engine.prepare(Prepare((), budget_bytes, lease_ns, worker_action))
    if not ticket.moves:
        return None
    try:
        await engine.copy(ticket.ticket)
        return await engine.commit(ticket.ticket)
    except EngineRefused:
        await engine.abort(ticket.ticket)
        raise


def _nothing(action_id: str) -> Receipt:
    return Receipt(action_id, True, 0, 0.0, 0, 0, 0, 0, detail="unknown to the engine")
