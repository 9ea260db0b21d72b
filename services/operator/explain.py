"""`tidegate explain`: one decision, from the state it saw to what came of it.

A decision by its id is looked up in TG_AUDIT, which keeps commands and outcomes; its state comes from
TG_TRANSITIONS, which keeps that of every step that made a transition. A worker's newest decision is taken live, and
from TG_AUDIT where nothing is heard.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import AsyncIterator
from typing import Final, TextIO

import msgspec

from schemas.actions import Action, WorkerAction
from schemas.codec import DecodeError
from schemas.identity import STEP_NS, Order, parse_action_id
from schemas.outcomes import AUDIT_RECORD, AuditRecord, OutcomeKind, WorkerOutcome
from schemas.subjects import STREAM_AUDIT, STREAM_TRANSITIONS, subject
from schemas.transitions import TRANSITION_BATCH, TransitionBatch, columns_of
from services.bus import Bus, Delivery
from services.decision.settings import Settings
from services.errors import UserError
from services.operator.entries import rows_of
from services.operator.live import Listener, StateRow
from services.operator.roster import NEWEST_RECORDS
from services.operator.session import NothingFound, node_of, settings_of
from services.operator.status import modes_of
from services.operator.story import as_json, as_text

LATER_RECORDS: Final = 60
"""Records after a decision's own in which the end of its effect is looked for: two minutes."""
MARGIN_NS: Final = 120 * 10**9


class Case(msgspec.Struct):
    """All that is known of one decision."""

    worker: str
    order: Order
    action: WorkerAction | None = None
    state: StateRow | None = None
    outcomes: list[WorkerOutcome] = []
    """The receipt, then completions."""
    source: str = ""
    """Where command and outcome come from, and the state."""


async def explain(bus: Bus, options: argparse.Namespace, out: TextIO) -> int:
    """Tell one decision; NothingFound when nothing is known of it."""
    worker, order = await _asked(bus, options.what)
    node = node_of(worker)
    if order is None:
        case = await _live(bus, node, worker, options.wait, None) or await _newest(bus, node, worker)
    else:
        case = await _kept(bus, node, worker, order) or await _live(bus, node, worker, options.wait, order)
    if case is None:
        raise NothingFound(await _nothing(bus, options.what, order))
    if case.state is None:
        case.state = await _kept_state(bus, node, worker, case.order)
        if case.state is not None:
            case.source += f", state from {STREAM_TRANSITIONS}"
    settings = settings_of(options, Settings, "decision")
    modes = await modes_of(bus, settings)
    if options.json:
        out.write(json.dumps(as_json(case, settings)) + "\n")
    else:
        out.write(as_text(case, settings, modes))
    return 0


async def _asked(bus: Bus, text: str) -> tuple[str, Order | None]:
    """The worker, and the decision if one is named; ``n0/0/w0@545`` is that step of the node's newest boot."""
    worker, _, step = text.partition("@")
    if "@" not in text:
        return worker, None
    if step.isdecimal():
        newest = await _newest_record(bus, node_of(worker))
        if newest is None:
            raise NothingFound(await _nothing(bus, text, Order(0, int(step))))
        return worker, Order(newest.boot_id, int(step))
    try:
        return parse_action_id(text)
    except ValueError as error:
        raise UserError(f"{error}; or n0/0/w0@4 for a step of the newest boot") from None


async def _live(bus: Bus, node: str, worker: str, wait_s: float, order: Order | None) -> Case | None:
    """The next whole step, or the one asked for; None when it does not come."""
    listener = Listener(bus, node)
    await listener.start()

    def there() -> bool:
        heard = listener.workers.get(worker)
        return heard is not None and heard.whole and order in (None, heard.acted)

    if not await listener.until(there, wait_s):
        return None
    heard = listener.workers[worker]
    outcomes = [heard.outcome] if heard.outcome is not None else []
    return Case(worker, heard.acted, heard.action, heard.state, outcomes, "live messages")


async def _kept(bus: Bus, node: str, worker: str, order: Order) -> Case | None:
    """The decision's record and, in those after it, the ends of what it began."""
    case: Case | None = None
    after = 0
    async for record in _records(bus, node, order):
        found = Order(record.boot_id, record.step)
        if found < order:
            continue
        if case is None and found > order:
            return None
        case = case or Case(worker, order, source=STREAM_AUDIT)
        _take(case, record)
        after += 1
        if after > LATER_RECORDS or (case.outcomes and not _lasts(case)):
            break
    return case if case is not None and case.outcomes else None


async def _newest(bus: Bus, node: str, worker: str) -> Case | None:
    """The last decision in the stream."""
    if (newest := await _newest_record(bus, node)) is None:
        return None
    case = Case(worker, Order(newest.boot_id, newest.step), source=STREAM_AUDIT)
    _take(case, newest)
    return case if case.outcomes else None


async def _newest_record(bus: Bus, node: str) -> AuditRecord | None:
    if (span := await bus.stream_span(STREAM_AUDIT)) is None:
        return None
    newest: AuditRecord | None = None
    # Records of other nodes lie between: what ended a long time ago is found by its id.
    first = max(span[1] - NEWEST_RECORDS, 1)
    async for one in bus.stream_read(STREAM_AUDIT, subject("audit", node), start_sequence=first):
        newest = _decoded(one) or newest
    return newest


async def _records(bus: Bus, node: str, order: Order) -> AsyncIterator[AuditRecord]:
    """The node's records in order, from some time before ``order``."""
    if await bus.stream_span(STREAM_AUDIT) is None:
        return
    # A boot's id is its wall clock and a step takes 2 s, but for emulated nodes that run faster or slower.
    guess_ns = order.boot_id + order.step * STEP_NS - MARGIN_NS
    for since_ns in (max(guess_ns, 0), 0):
        first = True
        async for delivery in bus.stream_read(STREAM_AUDIT, subject("audit", node), since_ns=since_ns):
            record = _decoded(delivery)
            if record is None:
                continue
            if first and since_ns and Order(record.boot_id, record.step) > order:
                break  # guessed too late
            first = False
            yield record
        else:
            if not first:
                return


def _decoded(delivery: Delivery) -> AuditRecord | None:
    try:
        return AUDIT_RECORD.decode(delivery.data)
    except DecodeError:
        return None


def _take(case: Case, record: AuditRecord) -> None:
    """What a record says of the decision."""
    wanted = f"{case.worker}@{case.order.boot_id}.{case.order.step}"
    try:
        rows = rows_of(record)
    except DecodeError:
        return
    for action, outcome in rows:
        if outcome.action_id == wanted:
            case.action = case.action or action
            case.outcomes.append(outcome)


def _lasts(case: Case) -> bool:
    """Whether a completion may still follow: the decision moves bytes and none has come."""
    moves = case.action is not None and case.action.action in (Action.COMPACT, Action.EVICT)
    return moves and all(one.kind == OutcomeKind.RECEIPT for one in case.outcomes)


async def _kept_state(bus: Bus, node: str, worker: str, order: Order) -> StateRow | None:
    """The state in the transition of that step, or in that of the step before, whose next state it was."""
    if (span := await bus.stream_span(STREAM_TRANSITIONS)) is None:
        return None
    guess_ns = order.boot_id + order.step * STEP_NS - MARGIN_NS
    for since_ns, start in ((max(guess_ns, 1), 1), (0, span[0])):
        async for delivery in bus.stream_read(
            STREAM_TRANSITIONS, subject("transition", node), since_ns=since_ns, start_sequence=start
        ):
            try:
                batch = TRANSITION_BATCH.decode(delivery.data)
                found = Order(batch.boot_id, batch.step)
                if found > order:
                    break
                row = _state_in(batch, worker, order)
            except DecodeError:
                continue
            if row is not None:
                return row
    return None


def _state_in(batch: TransitionBatch, worker: str, order: Order) -> StateRow | None:
    if batch.boot_id != order.boot_id or worker not in batch.workers:
        return None
    place = batch.workers.index(worker)
    if batch.step == order.step:
        return StateRow(order, -1, 0, columns_of(batch).states[place])
    if batch.step == order.step - 1 and not columns_of(batch).dones[place]:
        return StateRow(order, -1, 0, columns_of(batch).next_states[place])
    return None


async def _nothing(bus: Bus, what: str, order: Order | None) -> str:
    span = await bus.stream_span(STREAM_AUDIT)
    kept = "there is no audit stream" if span is None else f"{STREAM_AUDIT} holds records {span[0]} to {span[1]}"
    if order is None:
        return f"worker {what!r}: not heard of, neither live nor in the newest audit records ({kept})"
    return f"decision {what!r}: not found ({kept})"
