"""What a worker computes in a sub-step: iterations of prefill chunks and decodes, and the tokens they give.

While prompts wait, an iteration takes up to ``batch_tokens``: one per decoding request, the rest prompt tokens in
order of admission. Times are those of ``calibration.IterationTime``. A sub-step has at most two stretches, one with
prefill and one without; first tokens fall on ends of iterations, last tokens are interpolated.
"""

from __future__ import annotations

import math

from loadgen.engine.batch import finish, grow, join_decode, put_out
from loadgen.engine.bins import latency_bin
from loadgen.engine.jit import kernel
from loadgen.engine.records import CLIENT_TIMEOUT, PREFILL, State
from loadgen.engine.rules import prefill_rate
from loadgen.engine.waiting import reject

BOUND_TOKENS = 256.0
"""calibration.BOUND_TOKENS"""
EPS = 1e-6


@kernel
def iteration_s(s: State, w: int, sequences: float, kv: float, prefill: float, context: float) -> float:
    """Seconds of one iteration, overhead included: ``IterationTime.iteration_s`` on the worker's record."""
    worker = s.worker[w]
    bound = worker.gemm_floor + worker.gemm_sequence * min(sequences + prefill, BOUND_TOKENS)
    gemm = max(bound, worker.gemm_base + worker.gemm_token * (sequences + prefill))
    attention = worker.decode_sequence * sequences + worker.decode_kv * kv
    attention += prefill * (worker.prefill_token + worker.prefill_context * context)
    constant = worker.decode_base if sequences > 0.0 else 0.0
    if prefill > 0.0:
        constant = max(constant, worker.prefill_base)
    return float((gemm + attention + constant) * 1e-3 + worker.overhead)


@kernel
def ready(s: State, w: int) -> bool:
    """Whether the worker has anything to compute."""
    worker = s.worker[w]
    if worker.n_dec > 0:
        return True
    computing = 0
    for i in range(worker.n_pre):
        if s.request[s.pre_request[w, i]].phase == PREFILL:
            computing += 1
    return computing > 0


@kernel
def prefill_gives_up(s: State, w: int, t: float) -> None:
    """Clients of running requests that have waited too long for a first token go."""
    worker = s.worker[w]
    i = 0
    while i < worker.n_pre:
        r = s.pre_request[w, i]
        request = s.request[r]
        if request.timeout <= t and math.isnan(request.first_token):
            put_out(s, w, r)
            reject(s, w, r, t, CLIENT_TIMEOUT)
        else:
            i += 1


@kernel
def _spent(s: State, w: int, wall_s: float, iterations: float) -> None:
    """Count ``iterations`` of ``wall_s`` each for the mean iteration time."""
    worker = s.worker[w]
    worker.recent_iterations += iterations
    worker.recent_time += iterations * wall_s


@kernel
def _context(s: State, w: int, tokens: float) -> float:
    """Mean context of the next ``tokens`` prompt tokens, in order of admission."""
    left = tokens
    total = 0.0
    for i in range(s.worker[w].n_pre):
        request = s.request[s.pre_request[w, i]]
        if request.phase == PREFILL and left > 0.0:
            now = min(left, request.target - request.computed)
            total += now * (request.computed + 0.5 * now)
            left -= now
    return total / tokens


@kernel
def run(s: State, w: int, t: float, dt: float, device_s: float) -> None:
    """Compute for ``device_s`` seconds of the card's time, spread over the sub-step [t, t + dt]."""
    worker = s.worker[w]
    decoding = float(worker.n_dec)
    pending = 0.0
    joining = 0.0
    joining_kv = 0.0
    for i in range(worker.n_pre):
        request = s.request[s.pre_request[w, i]]
        if request.phase == PREFILL:
            rest = request.target - request.computed
            pending += rest
            joining += 1.0
            joining_kv += request.target
    kv = worker.kv_decode
    chunk = 0.0
    n_mix = 0.0
    n_dec = 0.0
    mix_s = 0.0
    dec_s = 0.0
    if pending > 0.0:
        chunk = min(pending, max(1.0, worker.batch_tokens - decoding))
        mix_s = iteration_s(s, w, decoding, kv, chunk, _context(s, w, chunk))
        n_mix = min(pending / chunk, device_s / mix_s)
        if n_mix > 1.0:
            mix_s = iteration_s(s, w, decoding, kv, chunk, _context(s, w, n_mix * chunk))
            n_mix = min(pending / chunk, device_s / mix_s)
        if n_mix * mix_s < device_s - EPS:
            decoding += joining
            kv += joining_kv
    worker.activation = worker.act_base + worker.act_token * (worker.n_dec + chunk) + worker.act_sequence * decoding
    if decoding > 0.0 and n_mix * mix_s < device_s - EPS:
        dec_s = iteration_s(s, w, decoding, kv, 0.0, 0.0)
        n_dec = (device_s - n_mix * mix_s) / dec_s
    stretch = dt / device_s
    mix_s *= stretch
    dec_s *= stretch
    worker.last_iteration = dec_s if dec_s > 0.0 else mix_s
    if worker.n_dec > 0:
        worker.gap_time += n_mix * mix_s + n_dec * dec_s
        worker.gap_iterations += n_mix + n_dec
    if chunk >= 0.5 * worker.batch_tokens:
        worker.prefill_rate = prefill_rate(worker.prefill_rate, chunk / mix_s)
    v_start = worker.v
    v_mix = v_start + n_mix
    worker.v = v_mix + n_dec
    worker.output_tokens += worker.n_dec * (n_mix + n_dec)
    worker.kv_decode += worker.n_dec * (n_mix + n_dec)
    if pending > 0.0:
        _spent(s, w, mix_s, n_mix)
        _prefill(s, w, t, v_start, n_mix, chunk, mix_s)
    if n_dec > 0.0:
        _spent(s, w, dec_s, n_dec)
    _decode(s, w, t, v_start, v_mix, mix_s, dec_s, dt)


@kernel
def _prefill(s: State, w: int, t: float, v_start: float, iterations: float, chunk: float, wall_s: float) -> None:
    """Advance prompts by ``iterations`` of ``chunk`` tokens; those that are done give their first token."""
    worker = s.worker[w]
    left = iterations * chunk
    seen = 0.0
    kept = 0
    for i in range(worker.n_pre):
        r = s.pre_request[w, i]
        request = s.request[r]
        if request.phase != PREFILL:
            s.pre_request[w, kept] = r
            kept += 1
            continue
        rest = request.target - request.computed
        if seen + rest <= left + EPS:
            seen += rest
            at = min(iterations, math.ceil(seen / chunk - EPS))
            worker.prompt_tokens += rest
            request.computed = float(request.target)
            if math.isnan(request.first_token):
                request.first_token = t + at * wall_s
                ratio = (request.first_token - request.arrival) / request.ttft_limit
                s.ttft[w, latency_bin(ratio)] += 1.0
            join_decode(s, w, r, v_start + at)
        else:
            got = max(0.0, min(rest, left - seen))
            request.computed += got
            worker.prompt_tokens += got
            seen += rest
            s.pre_request[w, kept] = r
            kept += 1
    worker.n_pre = kept


@kernel
def _decode(s: State, w: int, t: float, v_start: float, v_mix: float, mix_s: float, dec_s: float, dt: float) -> None:
    """End requests that have their last token, then give the others the blocks that they need."""
    worker = s.worker[w]
    v = worker.v
    short = 0
    i = 0
    while i < worker.n_dec:
        if s.dec_next[w, i] > v:
            i += 1
            continue
        r = s.dec_request[w, i]
        end = s.request[r].v_finish
        if end <= v:
            if end <= v_mix:
                finish(s, w, r, t + (end - v_start) * mix_s)
            else:
                finish(s, w, r, t + (v_mix - v_start) * mix_s + (end - v_mix) * dec_s)
            continue
        s.scratch[w, short] = r
        short += 1
        i += 1
    for j in range(short):
        grow(s, w, s.scratch[w, j], t + dt)
