"""The engine protocol's verbs, answered inside EngineCore: what they order goes to the steward and its parts."""

from __future__ import annotations

import time
from typing import Final

from schemas.classes import DEFAULT_LIMITS
from schemas.engine import (
    Abort,
    AskReceipt,
    Commit,
    Copy,
    Describe,
    Description,
    Evict,
    Failure,
    GrantPages,
    Prefetch,
    Prepare,
    ReplyBody,
    RequestBody,
    ReturnPages,
    Sample,
    SampleReply,
    SetQuota,
    SetWeights,
    Snapshot,
    SnapshotReply,
)
from schemas.identity import parse_worker_id
from services.actuator.engines.vllm import row
from services.actuator.engines.vllm.steward import Steward

NO_CLASS: Final = Failure("class_forbids", "the class keeps its KV on the card")


def answer(steward: Steward, body: RequestBody) -> ReplyBody | None:
    """The reply; None: there is more of it to do, call again after the next step."""
    now_ns = time.monotonic_ns()
    steward.quota.expire(now_ns)
    match body:
        case Describe():
            return _description(steward)
        case Snapshot():
            return _snapshot(steward, body)
        case SetQuota():
            return steward.set_quota(body, now_ns)
        case GrantPages():
            return steward.quota.grant(body, steward.mapped_bytes) or steward.receipt("")
        case ReturnPages():
            return steward.receipt("")  # a stock vLLM gives nothing back while it lives
        case Prepare():
            return steward.compaction.prepare(body, now_ns)
        case Copy(ticket=number):
            return steward.compaction.copy(number)
        case Commit(ticket=number):
            return steward.compaction.commit(number, now_ns)
        case Abort(ticket=number):
            return steward.compaction.abort(number)
        case Evict() | Prefetch() if not DEFAULT_LIMITS[steward.settings.service_class].swap_allowed:
            return NO_CLASS
        case Evict():
            return steward.traffic.evict(body)
        case Prefetch():
            return steward.traffic.prefetch(body)
        case SetWeights():
            return Failure("unsupported", "asked of the API server, not of the engine")
        case AskReceipt(action_id=action):
            return steward.traffic.under_way(action) or steward.receipts.of(action) or steward.receipt(action)
        case Sample():
            worker, kind = steward.settings.worker, int(steward.settings.service_class)
            return SampleReply(
                body.after_step, (worker,), (parse_worker_id(worker).gpu,), (kind,), row.metrics(steward)
            )


def _description(steward: Steward) -> Description:
    limits, settings = steward.quota.limits, steward.settings
    capabilities = ["set_quota", *steward.compaction.capabilities()]
    if steward.offloaded is not None:
        capabilities += ["evict", "sessions", "prefetch"]
    return Description(
        settings.worker, int(settings.service_class), "vllm", steward.block_bytes, steward.geometry.group_bytes,
        steward.block_bytes // steward.block_tokens, limits.q0_bytes, limits.capacity_bytes, steward.mapped_bytes,
        steward.floor_bytes, steward.quota.generation, tuple(capabilities), granted_bytes=limits.capacity_bytes,
        prefill_tokens_per_s=steward.admission.prefill_tokens_per_s,
    )  # fmt: skip


def _snapshot(steward: Steward, ask: Snapshot) -> SnapshotReply:
    quota, pool, host = steward.quota, steward.pool, steward.offloaded
    now_s = time.monotonic()
    idle = steward.sessions.idle(ask.idle_listed, now_s, steward.copied) if ask.idle_listed else ()
    away = steward.sessions.away(ask.due_within_s, now_s, steward.missing) if ask.due_within_s else ()
    return SnapshotReply(
        quota.generation, quota.rho, quota.soft_bytes, steward.hard_bytes, quota.max_running,
        pool.live_blocks * steward.block_bytes, len(pool.idle) * steward.block_bytes, 0,
        host.used_bytes if host is not None else 0, 0, 0, steward.mapped_bytes,
        (pool.bound_blocks - pool.live_blocks - len(pool.idle)) * steward.block_bytes, steward.floor_bytes,
        quota.lease_until_ns, host_free_bytes=host.free_bytes if host is not None else 0, idle=idle, away=away,
        waiting=len(steward.scheduler.waiting), iteration_s=steward.admission.gap_s,
        quiet_s=steward.traffic.quiet_s(now_s), prefill_tokens_per_s=steward.admission.prefill_tokens_per_s,
    )  # fmt: skip
