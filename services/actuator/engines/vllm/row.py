"""An engine's own METRICS row: what only its scheduler knows. Telemetry joins it with the latencies of /metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from schemas.metrics import COLUMN, CONTEXT_EDGES_TOKENS, CONTEXT_SLICE, HISTOGRAM_BINS, METRICS
from services.actuator.memory.occupancy import fragmentation

if TYPE_CHECKING:
    from services.actuator.engines.vllm.steward import Steward


def metrics(steward: Steward) -> bytes:
    """float64 [1, len(METRICS)], little-endian; NaN for what an engine does not know."""
    scheduler, pool, quota = steward.scheduler, steward.pool, steward.quota
    size = steward.block_bytes
    values = np.full(len(METRICS), np.nan)

    def put(**known: float) -> None:
        for name, value in known.items():
            values[COLUMN[name]] = value

    limits = quota.limits
    idle_bytes = len(pool.idle) * size
    now_s = time.monotonic()
    put(
        card_kv_capacity_bytes=limits.capacity_bytes, q0_bytes=limits.q0_bytes, block_bytes=size,
        page_group_bytes=steward.geometry.group_bytes, kv_bytes_per_token=size / steward.block_tokens,
        floor_bytes=steward.floor_bytes, kv_bytes=pool.live_blocks * size + idle_bytes, kv_idle_bytes=idle_bytes,
        kv_mapped_bytes=steward.mapped_bytes, frag=fragmentation(~pool.holding),
        kv_reserved_bytes=size * sum(map(steward.reserved_blocks, scheduler.running)),
    )  # fmt: skip
    waiting = len(scheduler.waiting)
    put(
        waiting=waiting, waiting_for_memory=waiting if waits_for_memory(steward) else 0,
        running=len(scheduler.running), prefilling=sum(one.is_prefill_chunk for one in scheduler.running),
        preemptions=steward.preemptions, iteration_s=steward.admission.gap_s,
    )  # fmt: skip
    put(
        generation=quota.generation, rho=quota.rho, quota_soft_bytes=quota.soft_bytes,
        quota_hard_bytes=steward.hard_bytes, max_running=quota.max_running,
        running_cap=steward.running_cap,
    )  # fmt: skip
    counters = steward.traffic.counters
    put(
        finished=counters.finished, finished_context_tokens=counters.context_tokens,
        finished_context_tokens_sq=counters.context_tokens_sq, rejected=counters.rejected,
        evicted_bytes=counters.evicted_bytes, loaded_bytes=counters.loaded_bytes,
        compacted_bytes=steward.compaction.compacted_bytes,
    )  # fmt: skip
    quiet = [one for one in steward.sessions.known.values() if one.turns == 0 and one.idle_blocks]
    put(idle_sessions=len(quiet))
    if quiet:
        numbers = np.array([one.number for one in quiet], np.int64)
        put(idle_return_s=float(steward.sessions.returns.quantile(numbers, now_s, 0.5).mean()))
    if steward.offloaded is not None:
        put(
            host_capacity_bytes=steward.offloaded.capacity_bytes, host_used_bytes=steward.offloaded.used_bytes,
            swapped=sum(one.turns == 0 and 2 * one.idle_blocks < len(one.chain) for one in quiet),
        )  # fmt: skip
    else:
        put(host_capacity_bytes=0, host_used_bytes=0, swapped=0)
    if steward.settings.hbm_bytes:
        put(hbm_bytes=steward.settings.hbm_bytes)
    lengths = [one.num_tokens for one in scheduler.running]
    lengths += [len(one.chain) * steward.block_tokens for one in quiet]
    values[CONTEXT_SLICE] = 0.0
    for length in lengths:
        values[CONTEXT_SLICE.start + context_bin(length)] += 1
    return values.astype("<f8").tobytes()


def waits_for_memory(steward: Steward) -> bool:
    """Whether memory is what keeps the queue: the gate is closed, or too few blocks are free for its head."""
    scheduler, pool = steward.scheduler, steward.pool
    if not scheduler.waiting or len(scheduler.running) >= steward.running_cap:
        return False
    if steward.quota.generation and steward.gate_closed:
        return True
    head = scheduler.waiting.peek_request()
    need: int = -(-head.num_tokens // steward.block_tokens) + scheduler.kv_cache_manager.watermark_blocks
    free: int = pool.get_num_free_blocks()
    return need > free


def context_bin(tokens: int) -> int:
    """Bin of the context histogram, the first for everything shorter than its edge."""
    return min(max(int(np.searchsorted(CONTEXT_EDGES_TOKENS, tokens, side="right")) - 1, 0), HISTOGRAM_BINS - 1)
