"""One node's steps: look at its engines, decide what may act, move memory, put quotas in force."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from schemas.actions import RHO_MIN, ActionBatch, Columns, left_alone
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.engine import Receipt, SetQuota
from schemas.identity import parse_worker_id
from schemas.outcomes import OutcomeBatch, WorkerOutcome, outcomes_of
from services.actuator import underway
from services.actuator.account import HOLD, Account, Card, Known
from services.actuator.cold_orders import ColdOrders
from services.actuator.cold_weights import OFF, CardWeights, ColdWeightSettings, Order
from services.actuator.effects import MOVES, EffectSettings
from services.actuator.engines.protocol import Engine
from services.actuator.grants import grant
from services.actuator.leases import (
    CLASS_FORBIDS,
    ENGINE_REFUSED,
    ENGINE_UNREACHABLE,
    LATENCY_AT_LIMIT,
    NONE,
    REFUSAL_OF_REASON,
    RHO_SLACK,
    UNKNOWN_WORKER,
    refusal_of,
)
from services.actuator.members import Member
from services.actuator.memory.receipts import Ledger
from services.actuator.moves import Moves
from services.actuator.quiet import Quiet, Said
from services.actuator.results import Results, completed
from services.actuator.sessions import want_back
from services.errors import EngineRefused, EngineUnreachable
from services.spans import Span


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
        ledger: Ledger | None = None,
        cold: ColdWeightSettings = OFF,
    ) -> None:
        self.node = node
        self.members: dict[str, Member] = {}
        self.account = Account(limits)
        self.ledger = ledger or Ledger()
        """What all movements came to; may be shared with other nodes."""
        self._quiet: Quiet | None = None
        """The step before, where the next may be its repetition."""
        self._engine_of = engine_of
        self._settings = settings
        self._cold = ColdOrders(cold, settings) if cold.enabled else None

    async def rebuild(self, workers: Sequence[str]) -> list[str]:
        """Describe these workers and, once a card is known whole, grant its free pages. Gives the workers
        that did not answer; their cards get nothing new until they do."""
        members = [member for worker in workers if (member := self._member(worker)) is not None]
        await self._each([member.look(self.account, HOLD) for member in members], members)
        await grant(self.account, self.members)
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
            action_of = dict(zip(members, batch.actions, strict=True))
            await self._each([one.look(self.account, action_of[one]) for one in unseen], unseen)
            if self._cold is not None:
                await self._cold.look(present, self.account.cards, batch.t_ns * 1e-9)
            await grant(self.account, self.members)
        step = Step(batch, columns, members, Results(batch, columns), span, [])
        orders = self._plan(step)
        if self._cold is not None:
            await self._order(step, orders)
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
                ended += await underway.ended(member, self.ledger, span)
            if member.begun:
                begun.append(member)
            if member.engine.t_ns > t_ns:
                t_ns = member.engine.t_ns
        outcomes = step.results.batch(self.node, t_ns, [one.known if one is not None else None for one in members])
        if begun:
            underway.remember(begun, outcomes_of(outcomes))
        quiet = self._cold is None and not (unseen or any(outcomes.statuses) or any([one.pending for one in present]))  # noqa: C419
        if quiet and all([card.quiet for card in self.account.cards.values()]):  # noqa: C419  # a list is faster
            self._quiet = Quiet(batch, outcomes, step.said)
        else:
            self._quiet = None
        return completed(outcomes, ended) if ended else outcomes

    async def close(self) -> None:
        for member in self.members.values():
            await member.close()

    @property
    def over_quota(self) -> int:
        """Times a snapshot showed more mapped than the hard quota that the engine had confirmed."""
        return sum(member.over_quota for member in self.members.values())

    @property
    def changed_quota(self) -> int:
        """Times a snapshot showed another quota than the last receipt: a lease ran out, an engine restarted."""
        return sum(member.changed_quota for member in self.members.values())

    @staticmethod
    async def _each(work: Sequence[Coroutine[Any, Any, None]], members: Sequence[Member]) -> None:
        """Together where engines make us wait, one after the other where they do not: a task costs more
        than an in-process engine's whole step."""
        if len(work) > 1 and any(member.engine.waits for member in members):
            await asyncio.gather(*work)
            return
        for one in work:
            await one

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

    async def _order(self, step: Step, orders: Sequence[tuple[Order, Member, CardWeights]]) -> None:
        """Send the step's orders about weights, and say what there is to say about any."""
        assert self._cold is not None
        batch = step.batch
        await self._cold.send(orders, f"@{batch.boot_id}.{batch.step}", batch.t_ns * 1e-9, step.span)
        for row, worker in enumerate(batch.workers):
            step.results.explain(row, self._cold.words(worker))

    def _plan(self, step: Step) -> list[tuple[Order, Member, CardWeights]]:
        """Refusals into the step's results; commands are with the workers they are for. Gives the orders about weights
        that belong to them."""
        batch, columns, refusals = step.batch, step.columns, step.results.refusals
        deadline_ns, lease_ns = batch.deadline_ns, batch.lease_ns
        width = len(batch.mask_reasons) // max(len(batch.workers), 1)
        late = LATENCY_AT_LIMIT in batch.mask_reasons
        due: dict[Card, list[Known]] = {}
        # Nobody in most steps: then there is no list to make.
        alone = left_alone(batch) if any(batch.holds) or batch.orders else ()
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
            known.keeps_hard = bool(alone) and alone[row]
            if refusal == NONE and known.keeps_hard:
                # What is in force stays: no lease is renewed, and the engine itself goes back to what it is without
                # us. Only memory promised beyond Q0 is taken back at once.
                if known.rho > RHO_MIN + RHO_SLACK:
                    known.target = (HOLD, rho, max_running)
                continue
            if refusal == NONE:
                known.target = (action, rho if rho < known.rho_max else known.rho_max, max_running)
                if known.said is not None and known.said.away:
                    due.setdefault(member.card, []).append(known)
                continue
            if refusal == CLASS_FORBIDS:  # a forbidden eviction still renews the quota
                known.target = (HOLD, rho if rho < known.rho_max else known.rho_max, max_running)
            refusals[row] = refusal
        for card, workers in due.items():
            want_back(card, workers, self._settings)
        orders: list[tuple[Order, Member, CardWeights]] = []
        if self._cold is not None:
            commanded = {
                worker: not hold and not refusal
                for worker, hold, refusal in zip(batch.workers, batch.holds, refusals, strict=True)
            }
            present = [one for one in step.members if one is not None]
            orders = self._cold.plan(present, self.account.cards, commanded, batch.t_ns * 1e-9)
        for card in self.account.cards.values():
            card.plan(self._settings)
            if self._cold is not None:
                self._cold.make_room(card)
        return orders

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
            if command is not None and (command.compact_bytes or command.evict_bytes or command.prefetch_bytes):
                moves = Moves(
                    member, known, row, worker_action, batch.lease_ns, span, results, self.ledger, self._settings
                )
                moved = await moves.run(command)
            if command is None:
                # A refused command, or none, still tells the engine that its step is answered: with the quota already
                # in force and a lease that is over, which no engine renews.
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
                results.explain(row, quota.detail)
                if not refusals[row] and command is not None:
                    step.said.append(Said(engine, order, quota))
            except EngineRefused as error:
                if refusals[row] == NONE and command is not None:
                    refusals[row] = REFUSAL_OF_REASON.get(error.reason, ENGINE_REFUSED)
                    results.explain(row, str(error))
            except EngineUnreachable as error:
                member.problem = error.detail
                refusals[row] = ENGINE_UNREACHABLE
                results.explain(row, error.detail)
            if command is None:
                if refusals[row]:
                    results.refuse(row)
            elif (
                quota is None
                or refusals[row]
                or action in MOVES
                or quota.rho != command.rho
                or command.rho != target_rho[row]
            ):  # else it was accepted, and nothing is to be judged
                results.settle(row, command, moved, quota)
