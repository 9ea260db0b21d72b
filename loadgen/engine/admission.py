"""Admission: whom the batch takes next from the queue, in order of arrival or deadline, and who is refused.

The rules are ``services.actuator.fast``'s. What is admitted is computed in order of admission: by deadline the batch
therefore takes no more prompts than it can work on until the next sub-step.
"""

from __future__ import annotations

import math

from loadgen.engine.host import blocks_of, host_truncate
from loadgen.engine.jit import kernel
from loadgen.engine.link import backlog_bytes, cancel, lane_push, lane_remove
from loadgen.engine.pages import take
from loadgen.engine.records import (
    AWAKE,
    BLOCKED_ASLEEP,
    BLOCKED_CAP,
    BLOCKED_MEMORY,
    BLOCKED_NO,
    BLOCKED_PREFILL,
    BLOCKED_STARTING,
    LANE_LOAD,
    LANE_PREFETCH,
    LANE_WRITE,
    LOADING,
    MAX_BATCH,
    PREFILL,
    SHED,
    State,
)
from loadgen.engine.room import idle_push, idle_remove, make_room, over_quota_blocks
from loadgen.engine.rules import can_meet, first_token_in_s, hopeless, prefill_ahead_tokens
from loadgen.engine.waiting import blocks_needed, queue_remove, reject, set_late

SHED_SEARCH = 8
"""So many of the late ones are looked at."""
WATERMARK = 0.01
"""Share of the pool that admission leaves to those who run (vLLM's watermark)."""


@kernel
def _worth_loading(s: State, w: int, tokens: int) -> bool:
    """Is bringing ``tokens`` back over the link cheaper than the GPU time to compute them again?

    GPU time is the scarce resource, so a load may take ``load_patience`` times as long (DESIGN section 5).
    """
    worker = s.worker[w]
    card = s.card[worker.card]
    load_s = (backlog_bytes(s, worker.card, LANE_LOAD) + tokens * worker.kv_token_bytes) / card.link
    per_token = worker.gemm_token + worker.prefill_token + worker.prefill_context * 0.5 * tokens
    return bool(load_s <= worker.load_patience * tokens * per_token * 1e-3)


@kernel
def pending_tokens(s: State, w: int) -> float:
    """Prompt tokens in the batch that are still to be computed."""
    worker = s.worker[w]
    pending = 0.0
    for i in range(worker.n_pre):
        request = s.request[s.pre_request[w, i]]
        if request.phase == PREFILL:
            pending += request.target - request.computed
    return pending


@kernel
def _first_token_in(s: State, w: int, r: int, pending: float) -> float:
    """Predicted seconds until the first token of a waiting request if it were admitted now."""
    worker = s.worker[w]
    request = s.request[r]
    seq = s.sequence[request.seq]
    target = request.prompt + request.produced
    valid = request.cached if request.admitted == 0 else target
    have = 0
    load_s = 0.0
    if seq.lane == LANE_PREFETCH:
        have = seq.x_tokens
        load_s = seq.x_left / s.card[worker.card].link
    elif seq.blocks > 0:
        have = seq.tokens
    elif seq.host_tokens > 0:
        have = seq.host_tokens
        load_s = min(valid, have) * worker.kv_token_bytes / s.card[worker.card].link
    own = float(target - max(0, min(have, valid, target - 1)))
    return load_s + first_token_in_s(pending, own, worker.prefill_rate, worker.last_iteration)


@kernel
def _shed(s: State, w: int, r: int, t: float, pending: float) -> bool:
    """Refuse a waiting request that waiting has made hopeless."""
    request = s.request[r]
    if not math.isnan(request.first_token):
        return False
    alone_s = _first_token_in(s, w, r, 0.0)
    in_s = _first_token_in(s, w, r, pending)
    limit_s = request.deadline - request.arrival
    if not hopeless(t, request.deadline, in_s, alone_s, limit_s, s.shed_margin[request.klass]):
        return False
    queue_remove(s, w, r)
    reject(s, w, r, t, SHED)
    return True


@kernel
def _shed_late(s: State, w: int, t: float, pending: float) -> None:
    """Refuse hopeless ones among the first of the queue's late part."""
    r = s.worker[w].q_late
    for _ in range(SHED_SEARCH):
        if r < 0:
            return
        after = s.request[r].q_next
        _shed(s, w, r, t, pending)
        r = after


@kernel
def _still_head(s: State, w: int, r: int, t: float, pending: float) -> bool:
    """Judge the queue's head; False when it was refused or put behind the others, so that another is the head."""
    worker = s.worker[w]
    request = s.request[r]
    if not math.isnan(request.first_token) or math.isinf(request.deadline):
        return True
    if worker.sheds == 1 and _shed(s, w, r, t, pending):
        return False
    in_s = _first_token_in(s, w, r, pending)
    if worker.by_deadline == 1 and request.late == 0 and not can_meet(t, request.deadline, in_s):
        set_late(s, w, r)
        return False
    return True


@kernel
def admit(s: State, w: int, t: float) -> None:
    """Move the queue's head into the batch while memory and cap allow; the queue is in order of arrival or deadline."""
    worker = s.worker[w]
    worker.blocked = BLOCKED_NO
    if worker.asleep != AWAKE:
        worker.blocked = BLOCKED_ASLEEP
        return
    over = over_quota_blocks(s, w)
    soft = int(worker.rho * worker.q0_net / worker.block_bytes)
    cap = min(worker.max_running, MAX_BATCH)
    if worker.capped == 1:
        cap = min(cap, int(worker.cap))
    judges = worker.by_deadline == 1 or worker.sheds == 1
    pending = pending_tokens(s, w) if judges and worker.q_head >= 0 else 0.0
    if worker.sheds == 1 and worker.q_late >= 0 and t >= worker.starting_until:
        _shed_late(s, w, t, pending)
    while worker.q_head >= 0:
        running = worker.n_dec + worker.n_pre
        if judges and t >= worker.starting_until and not _still_head(s, w, worker.q_head, t, pending):
            continue
        if worker.by_deadline == 1 and pending >= prefill_ahead_tokens(
            float(worker.batch_tokens), worker.prefill_rate, s.card[worker.card].substep
        ):
            worker.blocked = BLOCKED_PREFILL
            return
        if t < worker.starting_until:
            worker.blocked = BLOCKED_STARTING
            return
        if running >= cap:
            worker.blocked = BLOCKED_CAP
            return
        r = worker.q_head
        request = s.request[r]
        q = request.seq
        seq = s.sequence[q]
        if worker.expects == 1:
            request.need = blocks_needed(s, w, r)
        # A request larger than the quota runs alone: else it would block the queue for ever.
        if worker.physical == 0 and running > 0 and worker.reserved + request.need > soft:
            worker.blocked = BLOCKED_MEMORY
            return
        target = request.prompt + request.produced
        more = max(0, blocks_of(target + 1, worker.block_tokens) - seq.blocks)
        was_idle = seq.idle == 1
        if was_idle:
            idle_remove(s, w, q)
        spare = over + (int(WATERMARK * worker.pool) if running > 0 else 0)
        if more > 0 and not make_room(s, w, more + spare):
            if was_idle:
                idle_push(s, w, q)
            worker.blocked = BLOCKED_MEMORY
            return
        queue_remove(s, w, r)
        valid = request.cached if request.admitted == 0 else target
        resident = seq.blocks > 0
        take(s, w, q, more)
        request.target = target
        request.computed = 0.0
        request.phase = PREFILL
        if seq.lane == LANE_WRITE and seq.x_tokens > valid:
            cancel(s, q)
        host_truncate(s, q, valid)
        if seq.lane == LANE_PREFETCH:
            left = seq.x_left
            lane_remove(s, q)
            lane_push(s, q, LANE_LOAD, min(seq.x_tokens, valid), left)
            request.phase = LOADING
        elif resident:
            request.computed = float(min(seq.tokens, valid, target - 1))
        elif seq.host_tokens > 0 and _worth_loading(s, w, seq.host_tokens):
            lane_push(s, q, LANE_LOAD, seq.host_tokens, seq.host_tokens * worker.kv_token_bytes)
            request.phase = LOADING
        if request.phase == PREFILL:
            worker.recomputed += max(0.0, request.done - request.computed)
            pending += target - request.computed
        request.done = 0
        worker.admissions += 1
        if request.admitted == 0:
            request.wait = t - request.arrival
        request.admitted = worker.admissions
        request.reserved = request.need
        worker.reserved += request.need
        s.pre_request[w, worker.n_pre] = r
        worker.n_pre += 1
