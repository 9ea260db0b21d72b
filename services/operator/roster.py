"""Which workers there are, by what the actuators kept: enough to notice a name that nobody bears."""

from __future__ import annotations

from typing import Final

from schemas.codec import DecodeError
from schemas.outcomes import AUDIT_RECORD, OUTCOME_BATCH
from schemas.subjects import STREAM_AUDIT, subject
from services.bus import Bus
from services.errors import BusError
from services.operator.session import node_of, warn

NEWEST_RECORDS: Final = 2000
"""Of all nodes together: more than a step of a fleet of 10,000 workers."""


async def warn_of_a_stranger(bus: Bus, worker: str) -> None:
    """Say so when the newest audit records do not know a worker. Never raises: the order that names it was taken."""
    node = node_of(worker)
    known: set[str] = set()
    try:
        if (span := await bus.stream_span(STREAM_AUDIT)) is not None:
            first = max(span[1] - NEWEST_RECORDS, 1)
            async for delivery in bus.stream_read(STREAM_AUDIT, subject("audit", node), start_sequence=first):
                try:
                    known.update(OUTCOME_BATCH.decode(AUDIT_RECORD.decode(delivery.data).outcomes).workers)
                except DecodeError:
                    continue
                if worker in known:
                    return
    except BusError:
        return
    there = f"node {node} has {', '.join(sorted(known))}" if known else f"nothing was heard of node {node}"
    warn(f"warning: {worker} is in none of the newest audit records; {there}: the order stands when it comes")
