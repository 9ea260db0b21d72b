"""Weights that nobody promotes again by himself: read, added to, shown."""

from __future__ import annotations

import time
from typing import Final

import msgspec

from schemas.policies import KEY_REJECTED, PolicyPointer, Rejection, Rejections
from schemas.subjects import BUCKET_POLICY
from services.bus import Bus, KvEntry
from services.errors import Conflict
from services.operator.session import one_line, shown_time

LISTED: Final = 10
"""Of up to 256 that are kept."""


async def rejections_of(bus: Bus) -> Rejections:
    """What examiners and rollbacks rejected; one that cannot be read rejects nothing, as for an examiner."""
    return _decoded(await bus.kv_get(BUCKET_POLICY, KEY_REJECTED))


def _decoded(entry: KvEntry | None) -> Rejections:
    try:
        return Rejections() if not entry or not entry.value else msgspec.json.decode(entry.value, type=Rejections)
    except msgspec.DecodeError:
        return Rejections()


async def reject(bus: Bus, pointer: PolicyPointer, why: str) -> None:
    """No examiner promotes these weights again."""
    new = Rejection(version=pointer.version, sha256=pointer.sha256, why=why, when_ns=time.time_ns())
    while True:
        entry = await bus.kv_get(BUCKET_POLICY, KEY_REJECTED)
        known = _decoded(entry)
        if known.of(pointer) is not None:
            return
        value = msgspec.json.encode(known.plus(new))
        try:
            await bus.kv_put(BUCKET_POLICY, KEY_REJECTED, value, revision=entry.revision if entry else 0)
        except Conflict:
            continue
        return


def listed(rejections: Rejections) -> str:
    """Lines for the newest, newest first."""
    rejected = rejections.rejected
    lines = [f"rejected: {one.version} {reason(one)}\n" for one in reversed(rejected[-LISTED:])]
    if len(rejected) > LISTED:
        lines.append(f"rejected: {len(rejected) - LISTED} more before these\n")
    return "".join(lines)


def reason(one: Rejection) -> str:
    return f"at {shown_time(one.when_ns)}: {one_line(one.why)}"
