"""What an emulated engine tells of itself: the answers to ``describe`` and ``snapshot``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from loadgen.engine.records import Weights
from schemas.engine import AwaySession, Description, IdleSession, Snapshot, SnapshotReply
from schemas.identity import STEP_S

if TYPE_CHECKING:
    from loadgen.engine import views
    from loadgen.node.emulation import Emulation


def describe(engines: Emulation, i: int) -> Description:
    """What worker ``i`` is, and where its arena lies."""
    quota = engines.quotas[i]
    return Description(
        engines.workers[i],
        engines.classes[i],
        "emulated",
        int(engines.metric(i, "block_bytes")),
        engines.group_bytes(i),
        int(engines.metric(i, "kv_bytes_per_token")),
        quota.limits.q0_bytes,
        engines.sleepers.capacity_bytes(i, quota.limits.capacity_bytes),
        int(engines.mapped_bytes(i)),
        int(engines.metric(i, "floor_bytes")),
        quota.generation,
        engines.capabilities,
        engines.memory.workers[i].handle if engines.memory is not None else "",
        granted_bytes=quota.granted_bytes,
        link_bytes_per_s=engines.metric(i, "link_bytes_per_s"),
        arena_scale=engines.memory.scale if engines.memory is not None else 1,
        prefill_tokens_per_s=engines.fleet.prefill_tokens_per_s(i),
    )


def snapshot(engines: Emulation, i: int, asked: Snapshot) -> SnapshotReply:
    """Worker ``i`` now; sessions where the request lists them."""
    quota = engines.quotas[i]
    kv, idle = engines.metric(i, "kv_bytes"), engines.metric(i, "kv_idle_bytes")
    leaving = sum(
        one.wanted_bytes - one.moved_bytes
        for one in engines.movements[i].actions.values()
        if one.kind == "evict" and not one.done
    )
    host_free = engines.metric(i, "host_capacity_bytes") - engines.metric(i, "host_used_bytes")
    lists = asked.idle_listed > 0 or asked.due_within_s > 0
    found = engines.fleet.snapshot(i) if lists else None
    weights = engines.fleet.weights(i)
    return SnapshotReply(
        generation=quota.generation,
        rho=quota.rho,
        quota_soft_bytes=quota.soft_bytes,
        quota_hard_bytes=quota.hard_bytes,
        max_running=quota.max_running,
        live_bytes=int(kv - idle),
        idle_bytes=int(idle),
        leaving_bytes=int(leaving),
        away_bytes=int(engines.metric(i, "host_used_bytes")),
        returning_bytes=0,
        relocating_bytes=engines.memory.workers[i].open_bytes if engines.memory is not None else 0,
        mapped_bytes=int(engines.mapped_bytes(i)),
        free_block_bytes=int(engines.mapped_bytes(i) - kv),
        floor_bytes=int(engines.metric(i, "floor_bytes")),
        lease_until_ns=quota.lease_until_ns,
        host_free_bytes=int(max(host_free, 0.0)),
        idle=_idle(engines, i, found, asked.idle_listed) if found is not None else (),
        away=_away(engines, i, asked.due_within_s) if asked.due_within_s > 0 else (),
        link_backlog_bytes=found.link_backlog_bytes if found is not None else 0,
        waiting=int(engines.metric(i, "waiting")),
        iteration_s=engines.metric(i, "iteration_s"),
        weights_bytes=weights.bytes,
        # While they come back their room is taken: only the receipt tells when they are there.
        weights_on_card=weights.state != Weights.ASLEEP,
        quiet_s=weights.quiet_s,
    )


def _idle(engines: Emulation, i: int, found: views.Snapshot, most: int) -> tuple[IdleSession, ...]:
    block, now_s = int(engines.metric(i, "block_bytes")), engines.step * STEP_S
    return tuple(
        IdleSession(
            one.sequence,
            one.blocks * block,
            now_s - one.idle_since_s,
            one.expected_return_s,
            one.copied,
            one.tokens,
        )
        for one in [idle for idle in found.idle if not idle.pinned][:most]
    )


def _away(engines: Emulation, i: int, within_s: float) -> tuple[AwaySession, ...]:
    block = int(engines.metric(i, "block_bytes"))
    return tuple(
        AwaySession(one.sequence, one.host_blocks * block, one.expected_return_s, one.host_tokens)
        for one in engines.fleet.away(i, within_s)
    )
