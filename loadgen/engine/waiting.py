"""Requests outside the batch: arrivals to come, the queue, clients that give up, and how a turn ends."""

from __future__ import annotations

import math

from loadgen.engine.host import blocks_of, host_truncate
from loadgen.engine.jit import kernel
from loadgen.engine.link import cancel
from loadgen.engine.pages import release
from loadgen.engine.records import (
    CLIENT_TIMEOUT,
    LANE_SWAP,
    NEVER_FITS,
    NONE,
    ORACLE,
    REJECTED,
    TABLE,
    WAITING,
    State,
)
from loadgen.engine.room import idle_remove
from loadgen.engine.rules import deadline_s, expected_output_tokens

MEDIAN_STEP = 1.05
"""A think time above the running median raises it by this factor, one below lowers it."""


@kernel
def heap_push(s: State, w: int, t: float, r: int) -> None:
    """A later turn arrives at ``t``."""
    worker = s.worker[w]
    base = worker.request_at
    i = worker.heap_len
    worker.heap_len = i + 1
    while i > 0:
        parent = (i - 1) >> 1
        if s.heap_t[base + parent] <= t:
            break
        s.heap_t[base + i] = s.heap_t[base + parent]
        s.heap_r[base + i] = s.heap_r[base + parent]
        i = parent
    s.heap_t[base + i] = t
    s.heap_r[base + i] = r


@kernel
def heap_pop(s: State, w: int) -> int:
    """The request of the earliest later turn; the heap is not empty."""
    worker = s.worker[w]
    base = worker.request_at
    top = s.heap_r[base]
    n = worker.heap_len - 1
    worker.heap_len = n
    t = s.heap_t[base + n]
    r = s.heap_r[base + n]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= n:
            break
        if child + 1 < n and s.heap_t[base + child + 1] < s.heap_t[base + child]:
            child += 1
        if s.heap_t[base + child] >= t:
            break
        s.heap_t[base + i] = s.heap_t[base + child]
        s.heap_r[base + i] = s.heap_r[base + child]
        i = child
    s.heap_t[base + i] = t
    s.heap_r[base + i] = r
    return int(top)


@kernel
def _insert(s: State, w: int, r: int, before: int) -> None:
    """Link a request into the queue behind ``before``, -1: as its head."""
    worker = s.worker[w]
    request = s.request[r]
    after = worker.q_head if before < 0 else s.request[before].q_next
    request.q_prev = before
    request.q_next = after
    if before >= 0:
        s.request[before].q_next = r
    else:
        worker.q_head = r
    if after >= 0:
        s.request[after].q_prev = r
    else:
        worker.q_tail = r


@kernel
def _earlier(s: State, w: int, deadline: float) -> int:
    """The request behind which one of this deadline belongs, -1: none; looks from the end that seems nearer."""
    worker = s.worker[w]
    last = worker.q_tail if worker.q_late < 0 else s.request[worker.q_late].q_prev
    if last < 0 or s.request[last].deadline <= deadline or not math.isnan(s.request[last].first_token):
        return int(last)
    r = worker.q_head
    if deadline - s.request[r].deadline < s.request[last].deadline - deadline:
        while s.request[r].deadline <= deadline or not math.isnan(s.request[r].first_token):
            r = s.request[r].q_next
        return int(s.request[r].q_prev)
    r = last
    while r >= 0 and s.request[r].deadline > deadline and math.isnan(s.request[r].first_token):
        r = s.request[r].q_prev
    return int(r)


@kernel
def set_late(s: State, w: int, r: int) -> None:
    """Put a waiting request behind all that can still meet their limit."""
    queue_remove(s, w, r)
    worker = s.worker[w]
    worker.q_len += 1
    _insert(s, w, r, worker.q_tail)
    s.request[r].late = 1
    if worker.q_late < 0:
        worker.q_late = r


@kernel
def queue_push(s: State, w: int, r: int, front: bool) -> None:
    """Put a request into the queue: new ones at the end, preempted ones at the front; or by deadline."""
    worker = s.worker[w]
    request = s.request[r]
    request.phase = WAITING
    worker.q_len += 1
    request.late = 0
    before = NONE if front else worker.q_tail
    if worker.by_deadline == 1:
        if math.isnan(request.first_token):
            before = _earlier(s, w, request.deadline)
        elif request.first_token > request.deadline:
            before = worker.q_tail
            request.late = 1
    _insert(s, w, r, before)
    if request.late == 1 and worker.q_late < 0:
        worker.q_late = r
    worker.next_timeout = min(worker.next_timeout, request.timeout)


@kernel
def queue_remove(s: State, w: int, r: int) -> None:
    """Take a request out of the queue."""
    worker = s.worker[w]
    request = s.request[r]
    worker.q_len -= 1
    if worker.q_late == r:
        worker.q_late = request.q_next
    if request.q_prev >= 0:
        s.request[request.q_prev].q_next = request.q_next
    else:
        worker.q_head = request.q_next
    if request.q_next >= 0:
        s.request[request.q_next].q_prev = request.q_prev
    else:
        worker.q_tail = request.q_prev


@kernel
def _due(s: State, w: int, r: int, t: float) -> float:
    """When the session's next turn is expected, inf: never, by what the worker goes by."""
    worker = s.worker[w]
    request = s.request[r]
    if worker.returns == ORACLE:
        return float(t + request.think) if request.next >= 0 else math.inf
    if worker.returns == TABLE and not math.isnan(request.expected):
        return float(t + request.expected)
    seq = s.sequence[request.seq]
    return float(t + (s.think[w, seq.klass] + seq.thinks * seq.think) / (1 + seq.thinks))


@kernel
def end_turn(s: State, w: int, r: int, t: float) -> None:
    """The turn is over, answered or not: its session thinks, or ends. One that says so leaves nothing behind."""
    request = s.request[r]
    q = request.seq
    seq = s.sequence[q]
    if request.next >= 0:
        following = s.request[request.next]
        following.arrival = t + request.think
        heap_push(s, w, following.arrival, request.next)
    if request.next >= 0 or s.card[s.worker[w].card].silent == 1:
        seq.idle_since = t
        seq.due = _due(s, w, r, t)
        return
    cancel(s, q)
    if seq.idle == 1:
        idle_remove(s, w, q)
    if seq.blocks > 0:
        release(s, w, q)
    host_truncate(s, q, 0)


@kernel
def reject(s: State, w: int, r: int, t: float, reason: int) -> None:
    """End a request without its last token. The session goes on, so that all policies are offered the same."""
    worker = s.worker[w]
    request = s.request[r]
    request.phase = REJECTED
    request.reason = reason
    request.finish = t
    worker.rejected += 1
    if reason >= CLIENT_TIMEOUT:
        worker.judged += 1
        worker.violations += 1
    end_turn(s, w, r, t)


@kernel
def blocks_needed(s: State, w: int, r: int) -> int:
    """Blocks that the request reserves if it is admitted now."""
    worker = s.worker[w]
    request = s.request[r]
    output = float(request.max_tokens)
    if worker.expects == 1:
        kind = request.klass
        finished, mean, square = s.finished[w, kind, 0], s.finished[w, kind, 1], s.finished[w, kind, 2]
        output = expected_output_tokens(finished, mean, square, float(request.produced), output)
    return int(min(blocks_of(request.prompt + int(output), worker.block_tokens), worker.pool))


@kernel
def arrive(s: State, w: int, r: int) -> None:
    """A request reaches the engine's queue, or is refused at once."""
    worker = s.worker[w]
    request = s.request[r]
    seq = s.sequence[request.seq]
    worker.arrived += 1
    request.deadline = deadline_s(request.arrival, request.ttft_limit, request.completion_limit)
    request.timeout = request.arrival + request.patience if s.card[worker.card].timeouts == 1 else math.inf
    if seq.request != r:
        gap = request.arrival - seq.idle_since
        seq.thinks += 1
        seq.think += (gap - seq.think) / seq.thinks
        if gap > s.think[w, seq.klass]:
            s.think[w, seq.klass] *= MEDIAN_STEP
        else:
            s.think[w, seq.klass] /= MEDIAN_STEP
        if seq.lane == LANE_SWAP:
            cancel(s, request.seq)
        seq.request = r
    if request.reason > 0:
        reject(s, w, r, request.arrival, request.reason)
    elif blocks_of(request.prompt + request.output, worker.block_tokens) + 1 > worker.pool:
        reject(s, w, r, request.arrival, NEVER_FITS)
    else:
        request.need = blocks_needed(s, w, r)
        queue_push(s, w, r, False)


@kernel
def arrivals(s: State, w: int, t: float) -> None:
    """Everything that has arrived by ``t``."""
    worker = s.worker[w]
    while worker.first_at < worker.first_end and s.request[s.first[worker.first_at]].arrival <= t:
        r = s.first[worker.first_at]
        worker.first_at += 1
        arrive(s, w, r)
    while worker.heap_len > 0 and s.heap_t[worker.request_at] <= t:
        arrive(s, w, heap_pop(s, w))


@kernel
def give_up(s: State, w: int, t: float) -> None:
    """Clients in the queue that have waited too long for a first token go."""
    worker = s.worker[w]
    if t < worker.next_timeout:
        return
    soonest = math.inf
    r = worker.q_head
    while r >= 0:
        request = s.request[r]
        after = request.q_next
        if math.isnan(request.first_token):
            if request.timeout <= t:
                queue_remove(s, w, r)
                reject(s, w, r, t, CLIENT_TIMEOUT)
            else:
                soonest = min(soonest, request.timeout)
        r = after
    worker.next_timeout = soonest
