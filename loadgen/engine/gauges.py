"""The METRICS row of each worker, read off the fleet's state."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from loadgen.engine.compaction import fragmentation
from loadgen.engine.jit import entry, kernel
from loadgen.engine.link import backlog_bytes
from loadgen.engine.records import BINS, BLOCKED_MEMORY, FINISHED, LANES, State
from loadgen.engine.room import hard_groups, return_in_s
from schemas.metrics import COLUMN, CONTEXT_EDGES_TOKENS, CONTEXT_SLICE, TPOT_SLICE, TTFT_SLICE

F8 = npt.NDArray[np.float64]

EDGES: Final = CONTEXT_EDGES_TOKENS
CONTEXT: Final = CONTEXT_SLICE.start
TTFT: Final = TTFT_SLICE.start
TPOT: Final = TPOT_SLICE.start
KV, KV_IDLE, MAPPED = COLUMN["kv_bytes"], COLUMN["kv_idle_bytes"], COLUMN["kv_mapped_bytes"]
RESERVED, ACTIVATION, CARD_FREE = (
    COLUMN["kv_reserved_bytes"],
    COLUMN["activation_bytes"],
    COLUMN["card_free_bytes"],
)
FLOOR, FRAG, WAITING = COLUMN["floor_bytes"], COLUMN["frag"], COLUMN["waiting"]
WAITING_MEMORY, RUNNING, PREFILLING = COLUMN["waiting_for_memory"], COLUMN["running"], COLUMN["prefilling"]
SWAPPED, IDLE, IDLE_RETURN = COLUMN["swapped"], COLUMN["idle_sessions"], COLUMN["idle_return_s"]
HOST_USED, LINK_USED, ITERATION = (
    COLUMN["host_used_bytes"],
    COLUMN["link_used_bytes_per_s"],
    COLUMN["iteration_s"],
)
GENERATION, RHO, SOFT, HARD = (
    COLUMN["generation"],
    COLUMN["rho"],
    COLUMN["quota_soft_bytes"],
    COLUMN["quota_hard_bytes"],
)
MAX_RUNNING, CAP, STARTING = COLUMN["max_running"], COLUMN["running_cap"], COLUMN["starting"]
FIRST_COUNTER: Final = COLUMN["finished"]
"""First of METRICS' counters, whose order :func:`_counters` follows."""


@kernel
def context_bin(tokens: float) -> int:
    """Bin of METRICS' context histogram: edges 128 x 2^(k x 10/15), the first also holds what is shorter."""
    k = 0
    while k < BINS - 1 and tokens >= EDGES[k + 1]:
        k += 1
    return k


@kernel
def _counters(s: State, w: int, row: F8) -> None:
    """Counters in METRICS' order, and the latency histograms."""
    worker = s.worker[w]
    k = FIRST_COUNTER
    row[k] = worker.finished
    row[k + 1] = worker.finished_context
    row[k + 2] = worker.finished_context_sq
    row[k + 3] = worker.rejected
    row[k + 4] = worker.output_tokens
    row[k + 5] = worker.prompt_tokens
    row[k + 6] = worker.recomputed
    row[k + 7] = worker.good_tokens
    row[k + 8] = worker.judged
    row[k + 9] = worker.violations
    row[k + 10] = worker.preemptions
    row[k + 11] = worker.oom
    row[k + 12] = worker.evicted_bytes
    row[k + 13] = worker.loaded_bytes
    row[k + 14] = worker.compacted_bytes
    for b in range(BINS):
        row[TTFT + b] = s.ttft[w, b]
        row[TPOT + b] = s.tpot[w, b]


@kernel
def _sequences(s: State, w: int, t: float, row: F8) -> None:
    """Context histogram of running and idle sequences, idle sessions and their expected return."""
    worker = s.worker[w]
    for i in range(worker.n_dec):
        request = s.request[s.dec_request[w, i]]
        row[CONTEXT + context_bin(request.target + worker.v - request.v_start)] += 1.0
    for i in range(worker.n_pre):
        row[CONTEXT + context_bin(s.request[s.pre_request[w, i]].target)] += 1.0
    expected = 0.0
    q = worker.l_head
    while q >= 0:
        expected += return_in_s(s, q, t)
        row[CONTEXT + context_bin(s.sequence[q].tokens)] += 1.0
        q = s.sequence[q].l_next
    row[IDLE] = worker.n_idle
    row[IDLE_RETURN] = expected / worker.n_idle if worker.n_idle > 0 else math.nan
    row[SWAPPED] = worker.n_away


@entry
def gauges(s: State, step_s: float, out: F8) -> None:
    """Fill all but the constants of ``out`` float64 [W, len(METRICS)]."""
    for w in range(len(s.worker)):
        worker = s.worker[w]
        card = s.card[worker.card]
        t = card.substeps * card.substep
        row = out[w]
        for k in range(BINS):
            row[CONTEXT + k] = 0.0
        _sequences(s, w, t, row)
        _counters(s, w, row)
        prefilling = float(worker.n_pre)
        row[FLOOR] = worker.floor_blocks * worker.block_bytes
        row[KV] = (worker.mapped * worker.bpg - worker.free - worker.aside) * worker.block_bytes
        row[KV_IDLE] = worker.idle_blocks * worker.block_bytes
        row[MAPPED] = worker.mapped * worker.group_bytes
        row[RESERVED] = worker.reserved * worker.block_bytes
        row[ACTIVATION] = worker.activation
        row[CARD_FREE] = max(0.0, card.capacity - card.mapped_bytes)
        row[FRAG] = fragmentation(s, w)
        row[WAITING] = worker.q_len
        row[WAITING_MEMORY] = worker.q_len if worker.blocked == BLOCKED_MEMORY else 0
        row[RUNNING] = worker.n_dec + prefilling
        row[PREFILLING] = prefilling
        row[HOST_USED] = card.host_used
        row[LINK_USED] = card.moved / step_s
        row[ITERATION] = worker.recent_time / worker.recent_iterations if worker.recent_iterations > 0.0 else math.nan
        row[GENERATION] = worker.generation
        row[RHO] = worker.rho
        row[SOFT] = worker.rho * worker.q0_net
        row[HARD] = hard_groups(s, w) * worker.group_bytes
        row[MAX_RUNNING] = worker.max_running
        row[CAP] = min(worker.max_running, math.floor(worker.cap)) if worker.capped == 1 else worker.max_running
        row[STARTING] = 1.0 if t < worker.starting_until else 0.0


@entry
def idle_sessions(s: State, w: int, t: float, out: F8) -> int:
    """Fill rows of ``out`` float64 [n_idle, 7] least recently used first: sequence, blocks, idle since, expected
    seconds until return, copied to the host tier (0/1), in a transfer or its turn waits (0/1), tokens; returns their
    number."""
    n = 0
    q = s.worker[w].l_head
    while q >= 0:
        seq = s.sequence[q]
        out[n, 0] = q
        out[n, 1] = seq.blocks
        out[n, 2] = seq.idle_since
        out[n, 3] = return_in_s(s, q, t)
        out[n, 4] = 1.0 if seq.host_tokens >= seq.tokens else 0.0
        out[n, 5] = 1.0 if seq.lane >= 0 or s.request[seq.request].phase < FINISHED else 0.0
        out[n, 6] = seq.tokens
        n += 1
        q = seq.l_next
    return n


@entry
def link_backlog(s: State, c: int) -> float:
    """Bytes queued on the card's link, all lanes and weights together."""
    total = 0.0
    for lane in range(LANES):
        total += backlog_bytes(s, c, lane)
    card = s.card[c]
    if card.asleep > 0:
        for w in range(card.first, card.first + card.workers):
            total += s.worker[w].w_left
    return total
