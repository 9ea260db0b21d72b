"""What `tidegate audit` shows, entry by entry: a worker's outcome with its command, or a revision of a bucket."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from schemas.actions import ACTION_BATCH, Action, Hold, WorkerAction, actions_of
from schemas.codec import DecodeError
from schemas.config import place_of, read_order
from schemas.identity import parse_action_id, parse_worker_id
from schemas.outcomes import (
    AUDIT_RECORD,
    OUTCOME_BATCH,
    AuditRecord,
    OutcomeKind,
    Refusal,
    Status,
    WorkerOutcome,
    outcomes_of,
)
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, KEY_REJECTED, PolicyPointer, Rejections
from schemas.subjects import BUCKET_CONFIG, BUCKET_POLICY
from services.bus import Bus, Delivery, KvEntry
from services.operator.changes import told
from services.operator.session import shown_time

POINTERS: Final = (KEY_CHAMPION, KEY_CANDIDATE, KEY_REJECTED)
"""Of ``tg_policy``; what else lies there is no change that anybody decided on."""

Entry = dict[str, Any]


def entries_of(delivery: Delivery) -> Iterator[Entry]:
    """A record's outcomes by worker, each with its command; nothing of one that cannot be read."""
    try:
        record = AUDIT_RECORD.decode(delivery.data)
        rows = rows_of(record)
    except DecodeError:
        return
    for action, outcome in rows:
        yield entry_of(record, action, outcome, delivery.stored_ns)


def rows_of(record: AuditRecord) -> list[tuple[WorkerAction | None, WorkerOutcome]]:
    """Commands and what became of them; None for a completion, whose command is in an earlier record. DecodeError."""
    actions = {one.action_id: one for one in actions_of(ACTION_BATCH.decode(record.actions))}
    return [(actions.get(one.action_id), one) for one in outcomes_of(OUTCOME_BATCH.decode(record.outcomes))]


def entry_of(record: AuditRecord, action: WorkerAction | None, outcome: WorkerOutcome, stored_ns: int) -> Entry:
    """One row as it is shown and filtered."""
    entry: Entry = {
        "t_ns": stored_ns,
        "time": shown_time(stored_ns),
        "kind": OutcomeKind(outcome.kind).name.lower(),
        "node": record.node,
        "worker": outcome.worker,
        "decision": outcome.action_id,
        "policy": outcome.policy,
        "hold": Hold(outcome.hold).name.lower() if outcome.hold else "",
        "asked": Action(outcome.requested_action).name.lower(),
        "done": Action(outcome.executed_action).name.lower(),
        "status": Status(outcome.status).name.lower(),
        "refusal": Refusal(outcome.refusal).name.lower() if outcome.refusal else "",
        "rho_asked": round(outcome.requested_rho, 4),
        "rho": round(outcome.effective_rho, 4),
        "max_running": outcome.effective_max_running,
        "generation": outcome.effective_generation,
        "evicted_bytes": outcome.evicted_bytes,
        "compacted_bytes": outcome.compacted_bytes,
        "prefetched_bytes": outcome.prefetched_bytes,
        "pages_freed": outcome.pages_freed,
        "pause_us": outcome.pause_us,
        "detail": outcome.detail,
        "gaps": record.gaps,
    }
    if action is not None and action.shadows:
        entry["shadows"] = {one.policy: Action(one.action).name.lower() for one in action.shadows}
    return entry


async def past_changes(bus: Bus) -> list[Entry]:
    """Every kept revision of both buckets."""
    return [
        change_of(bucket, entry)
        for bucket in (BUCKET_CONFIG, BUCKET_POLICY)
        for entry in await bus.kv_history(bucket)
        if bucket != BUCKET_POLICY or entry.key in POINTERS
    ]


def change_of(bucket: str, entry: KvEntry) -> Entry:
    """A revision as it is shown; the time is the server's, or the writer's own where a watch brought it."""
    change: Entry = {
        "t_ns": entry.stored_ns, "time": "-", "kind": "change", "bucket": bucket, "key": entry.key,
        "revision": entry.revision, "who": "", "why": "", "worker": "", "node": "",
        "what": told(entry.key, entry.value),
    }  # fmt: skip
    try:
        if bucket == BUCKET_CONFIG and entry.value is not None:
            order = read_order(entry.key, entry.value)
            place = place_of(entry.key)
            change |= {"t_ns": entry.stored_ns or order.when_ns, "who": order.who, "why": order.why}
            if place.scope == "worker":
                change |= {"worker": place.name, "node": parse_worker_id(place.name).node}
        elif entry.key == KEY_REJECTED and entry.value is not None:
            newest = msgspec.json.decode(entry.value, type=Rejections).rejected[-1]
            change |= {"t_ns": entry.stored_ns or newest.when_ns, "why": newest.why}
        elif entry.value is not None:
            pointer = msgspec.json.decode(entry.value, type=PolicyPointer)
            when_ns = entry.stored_ns or pointer.when_ns or pointer.created_ns
            change |= {"t_ns": when_ns, "who": pointer.who, "why": pointer.why}
    except (ValueError, IndexError, msgspec.DecodeError):
        pass  # ``what`` says that it cannot be read
    change["time"] = shown_time(change["t_ns"])
    return change


def passes(entry: Entry, options: argparse.Namespace) -> bool:
    """Whether an entry passes the filters; a change that concerns all concerns every worker and node."""
    if entry["kind"] == "change":
        if options.action or options.status:
            return False
        return options.worker in (None, entry["worker"] or options.worker) and options.node in (
            None,
            entry["node"] or options.node,
        )
    return (
        options.worker in (None, entry["worker"])
        and options.node in (None, entry["node"])
        and options.action in (None, entry["asked"], entry["done"])
        and options.status in (None, entry["status"])
    )


def line_of(entry: Entry, as_json: bool) -> str:
    """An entry for people, or as a JSON object."""
    if as_json:
        return json.dumps(entry) + "\n"
    if entry["kind"] == "change":
        where = f"{entry['bucket']}/{entry['key']} revision {entry['revision']}"
        about = f"{entry['worker']}  " if entry["worker"] else ""
        return f"{entry['time']}  change  {about}{where}: {entry['what']}\n"
    step = parse_action_id(entry["decision"])[1].step
    did = entry["asked"] if entry["asked"] == entry["done"] else f"{entry['asked']} -> {entry['done']}"
    if entry["kind"] == "completion":
        did = f"{entry['done']} completed"
    moved = [f"{word} {entry[f'{word}_bytes'] / 1e6:.0f} MB" for word in ("evicted", "compacted", "prefetched")
             if entry[f"{word}_bytes"]]  # fmt: skip
    words = [f"{entry['status']}" + (f" ({entry['refusal']})" if entry["refusal"] else ""),
             f"rho {entry['rho_asked']:g} -> {entry['rho']:g}", *moved,
             f"held: {entry['hold']}" if entry["hold"] else "", entry["detail"]]  # fmt: skip
    said = ", ".join(word for word in words if word)
    return f"{entry['time']}  {entry['worker']}  step {step}  {entry['policy']}  {did}: {said}\n"
