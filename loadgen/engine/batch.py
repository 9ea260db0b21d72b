"""The running batch of one worker: who decodes, who is put back, how a request ends.

Decoding requests share one counter, ``worker.v``, of decode iterations. Each knows at which count it has its last
token and at which it needs another block, so a sub-step looks at one row of numbers and touches only those due.
"""

from __future__ import annotations

import math

from loadgen.engine.bins import latency_bin
from loadgen.engine.host import host_truncate
from loadgen.engine.jit import kernel
from loadgen.engine.link import cancel, start_copy
from loadgen.engine.pages import release, take
from loadgen.engine.records import (
    DECODE,
    ENGINE_CRASH,
    FINISHED,
    LANE_WRITE,
    NONE,
    PREEMPTED_TOO_OFTEN,
    State,
)
from loadgen.engine.room import idle_push, idle_remove, make_room
from loadgen.engine.rules import output_weight
from loadgen.engine.waiting import end_turn, queue_push, reject


@kernel
def join_decode(s: State, w: int, r: int, v_start: float) -> None:
    """The prompt is computed at decode count ``v_start``, which gives one token; the others follow from there."""
    worker = s.worker[w]
    request = s.request[r]
    seq = s.sequence[request.seq]
    request.phase = DECODE
    request.produced += 1
    request.v_start = v_start
    request.v_finish = v_start + (request.output - request.produced)
    ahead = worker.v - v_start
    worker.output_tokens += 1.0 + ahead
    worker.kv_decode += request.target + ahead
    seq.tokens = request.target
    slot = worker.n_dec
    worker.n_dec = slot + 1
    request.slot = slot
    s.dec_request[w, slot] = r
    s.dec_next[w, slot] = min(request.v_finish, v_start + seq.blocks * worker.block_tokens - request.target)
    if worker.offload == 1 and seq.lane < 0 and s.swap_allowed[seq.klass] == 1:
        start_copy(s, request.seq, LANE_WRITE)


@kernel
def leave_decode(s: State, w: int, r: int) -> None:
    """Take a request out of the decoding ones; the last takes its slot."""
    worker = s.worker[w]
    request = s.request[r]
    worker.n_dec -= 1
    last = worker.n_dec
    if request.slot != last:
        other = s.dec_request[w, last]
        s.dec_request[w, request.slot] = other
        s.dec_next[w, request.slot] = s.dec_next[w, last]
        s.request[other].slot = request.slot
    worker.kv_decode -= request.target + (worker.v - request.v_start)
    if last == 0:
        worker.kv_decode = 0.0
    worker.reserved -= request.reserved


@kernel
def leave_prefill(s: State, w: int, r: int) -> None:
    """Take a request out of those in prefill or loading, keeping their order."""
    worker = s.worker[w]
    at = 0
    while s.pre_request[w, at] != r:
        at += 1
    worker.n_pre -= 1
    for i in range(at, worker.n_pre):
        s.pre_request[w, i] = s.pre_request[w, i + 1]
    worker.reserved -= s.request[r].reserved


@kernel
def put_out(s: State, w: int, r: int) -> None:
    """Take a running request out of the batch and its KV off the card; what it produced stays produced."""
    worker = s.worker[w]
    request = s.request[r]
    q = request.seq
    if request.phase == DECODE:
        ahead = worker.v - request.v_start
        whole = int(ahead)
        worker.output_tokens -= ahead - whole
        leave_decode(s, w, r)
        request.produced += whole
        request.done = request.target + whole
    else:
        leave_prefill(s, w, r)
        request.done = max(request.done, int(request.computed))
    cancel(s, q)
    if s.sequence[q].blocks > 0:
        release(s, w, q)


@kernel
def preempt_newest(s: State, w: int, t: float) -> None:
    """Put the request admitted last back to the head of the queue, to be computed again."""
    worker = s.worker[w]
    newest = NONE
    admitted = -1
    for i in range(worker.n_dec):
        r = s.dec_request[w, i]
        if s.request[r].admitted > admitted:
            newest = r
            admitted = s.request[r].admitted
    for i in range(worker.n_pre):
        r = s.pre_request[w, i]
        if s.request[r].admitted > admitted:
            newest = r
            admitted = s.request[r].admitted
    put_out(s, w, newest)
    request = s.request[newest]
    request.preemptions += 1
    worker.preemptions += 1
    if request.preemptions > worker.max_preemptions:
        reject(s, w, newest, t, PREEMPTED_TOO_OFTEN)
    else:
        queue_push(s, w, newest, True)


@kernel
def grow(s: State, w: int, r: int, t: float) -> None:
    """Give a decoding request the blocks it needs by now, at last by preempting, even itself."""
    worker = s.worker[w]
    request = s.request[r]
    seq = s.sequence[request.seq]
    while request.phase == DECODE and s.dec_next[w, request.slot] <= worker.v:
        if worker.free == 0 and not make_room(s, w, 1):
            preempt_newest(s, w, t)
            continue
        take(s, w, request.seq, 1)
        if seq.blocks > request.reserved:
            request.reserved += 1
            worker.reserved += 1
        holds = request.v_start + seq.blocks * worker.block_tokens - request.target
        s.dec_next[w, request.slot] = min(request.v_finish, holds)


@kernel
def finish(s: State, w: int, r: int, t: float) -> None:
    """The last token came at ``t``: judge the request, keep its KV for the session's next turn."""
    worker = s.worker[w]
    request = s.request[r]
    q = request.seq
    seq = s.sequence[q]
    worker.output_tokens -= worker.v - request.v_finish
    leave_decode(s, w, r)
    request.phase = FINISHED
    request.finish = t
    request.produced = request.output
    ttft = request.first_token - request.arrival
    tpot = (t - request.first_token) / max(1, request.output - 1)
    good = ttft <= request.ttft_limit and tpot <= request.tpot_limit and t - request.arrival <= request.completion_limit
    context = float(request.prompt + request.output)
    worker.finished += 1
    kind = request.klass
    part = output_weight(s.finished[w, kind, 0])
    s.finished[w, kind, 0] += 1.0
    s.finished[w, kind, 1] += part * (request.output - s.finished[w, kind, 1])
    s.finished[w, kind, 2] += part * (float(request.output) * request.output - s.finished[w, kind, 2])
    worker.finished_context += context
    worker.finished_context_sq += context * context
    worker.judged += 1
    if request.output > 1:
        s.tpot[w, latency_bin(tpot / request.tpot_limit)] += 1.0
    if good:
        worker.good_tokens += request.output
    else:
        worker.violations += 1
    # The last token's KV is never computed, and no block is taken for an iteration that is the last.
    seq.tokens = min(request.prompt + request.output - 1, seq.blocks * worker.block_tokens)
    end_turn(s, w, r, t)
    if request.next >= 0 or s.card[worker.card].silent == 1:
        idle_push(s, w, q)
        if worker.offload == 1 and s.swap_allowed[seq.klass] == 1:
            cancel(s, q)
            start_copy(s, q, LANE_WRITE)


@kernel
def crash(s: State, w: int, t: float, restart_s: float) -> None:
    """Out of memory: the engine's process ends. Running requests lose their work and are tried again once;
    all KV, on the card and in the process's pinned host memory, is gone; the queue stays with the front end."""
    worker = s.worker[w]
    worker.oom += 1
    while worker.n_dec + worker.n_pre > 0:
        r = s.dec_request[w, worker.n_dec - 1] if worker.n_dec > 0 else s.pre_request[w, worker.n_pre - 1]
        put_out(s, w, r)
        request = s.request[r]
        request.retries += 1
        request.produced = 0
        request.first_token = math.nan
        if request.retries > worker.max_retries:
            worker.crashed += 1
            reject(s, w, r, t, ENGINE_CRASH)
        else:
            queue_push(s, w, r, True)
    while worker.l_head >= 0:
        q = worker.l_head
        cancel(s, q)
        idle_remove(s, w, q)
        release(s, w, q)
    q = s.card[worker.card].h_head
    while q >= 0:
        after = s.sequence[q].h_next
        if s.sequence[q].worker == w:
            cancel(s, q)
            if s.sequence[q].blocks > 0:
                release(s, w, q)
            host_truncate(s, q, 0)
        q = after
    worker.starting_until = t + restart_s
