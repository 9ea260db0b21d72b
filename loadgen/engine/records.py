"""The fleet's state: one array of records per noun, and the numbers that stand for phases and reasons.

Everything is preallocated; kernels index, nothing is created while time passes. Lists are linked through
indices, -1 ending them. All request and sequence indices are fleet-wide; groups and chunks belong to a worker
(its first ones are ``group_at`` and ``chunk_at``). Page groups are numbered in the worker's own virtual address
space, so a higher index is a higher address.
"""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Records = npt.NDArray[Any]
I8 = npt.NDArray[np.int64]
F8 = npt.NDArray[np.float64]


def _number(value: int) -> int:
    """A constant that kernels pass on: numba compiles a function anew for every *plain* number it is given."""
    return cast(int, np.int64(value))


NONE: Final = _number(-1)
CLASSES: Final = 5
BINS: Final = 16
LANES: Final = 4
MAX_BATCH: Final = 1024


class Phase(enum.IntEnum):
    """Where a request is."""

    FUTURE = 0
    WAITING = 1
    LOADING = 2
    PREFILL = 3
    DECODE = 4
    FINISHED = 5
    REJECTED = 6


class Reason(enum.IntEnum):
    """Why a request was rejected; NONE otherwise."""

    NONE = 0
    NEVER_FITS = 1
    """prompt + max_tokens is more than the worker could ever hold."""
    TOO_LONG = 2
    """prompt + output is more than the model's context."""
    CLIENT_TIMEOUT = 3
    ENGINE_CRASH = 4
    """Lost in a crash once more than it may be retried."""
    PREEMPTED_TOO_OFTEN = 5
    SHED = 6
    """Could not meet its first-token limit any more."""


class Lane(enum.IntEnum):
    """Transfers of a card's link, in the order in which they are served. -1: none."""

    LOAD = 0
    PREFETCH = 1
    SWAP_OUT = 2
    WRITE_THROUGH = 3


class Blocked(enum.IntEnum):
    """Why the head of the queue was not admitted last time."""

    NO = 0
    MEMORY = 1
    CAP = 2
    STARTING = 3
    PREFILL = 4
    """The batch has prompts enough; who comes next is decided later."""
    ASLEEP = 5
    """The worker's weights are not on the card, or on their way."""


class Weights(enum.IntEnum):
    """Where a worker's weights are."""

    AWAKE = 0
    LEAVING = 1
    """Being copied to the host: on the card until all of them are."""
    ASLEEP = 2
    RETURNING = 3
    """Being copied back: their room on the card is taken."""


FUTURE: Final = _number(Phase.FUTURE)
WAITING: Final = _number(Phase.WAITING)
LOADING: Final = _number(Phase.LOADING)
PREFILL: Final = _number(Phase.PREFILL)
DECODE: Final = _number(Phase.DECODE)
FINISHED: Final = _number(Phase.FINISHED)
REJECTED: Final = _number(Phase.REJECTED)
LANE_LOAD: Final = _number(Lane.LOAD)
LANE_PREFETCH: Final = _number(Lane.PREFETCH)
LANE_SWAP: Final = _number(Lane.SWAP_OUT)
LANE_WRITE: Final = _number(Lane.WRITE_THROUGH)
LANES_END: Final = _number(LANES)
BLOCKED_NO: Final = _number(Blocked.NO)
BLOCKED_MEMORY: Final = _number(Blocked.MEMORY)
BLOCKED_CAP: Final = _number(Blocked.CAP)
BLOCKED_STARTING: Final = _number(Blocked.STARTING)
BLOCKED_PREFILL: Final = _number(Blocked.PREFILL)
BLOCKED_ASLEEP: Final = _number(Blocked.ASLEEP)
AWAKE: Final = _number(Weights.AWAKE)
LEAVING: Final = _number(Weights.LEAVING)
ASLEEP: Final = _number(Weights.ASLEEP)
RETURNING: Final = _number(Weights.RETURNING)
NEVER_FITS: Final = _number(Reason.NEVER_FITS)
CLIENT_TIMEOUT: Final = _number(Reason.CLIENT_TIMEOUT)
ENGINE_CRASH: Final = _number(Reason.ENGINE_CRASH)
PREEMPTED_TOO_OFTEN: Final = _number(Reason.PREEMPTED_TOO_OFTEN)
SHED: Final = _number(Reason.SHED)
MEDIAN, TABLE, ORACLE = _number(0), _number(1), _number(2)
"""Where a session's expected return comes from: ``EngineMode.returns``."""


def _dtype(**fields: str) -> np.dtype[Any]:
    names = [(name, code) for code, group in fields.items() for name in group.split()]
    return np.dtype(names, align=True)


REQUEST: Final = _dtype(
    f8="arrival think ttft_limit tpot_limit completion_limit patience expected"  # as given; patience: until it gives up
    " timeout deadline computed v_start v_finish first_token finish wait",
    i8="prompt output max_tokens cached klass next seq worker"  # as given
    " phase reason q_prev q_next slot admitted target produced done reserved preemptions retries need late",
)
"""One request. ``target``: tokens to compute before the next token comes (prompt + produced at admission);
``computed``: of them, so far; ``need``: blocks it reserves when admitted; ``v_start``/``v_finish``: the worker's
decode counter when its decode began and when it will have its last token; ``done``: tokens computed before the
last preemption; ``late``: in the late part of a queue that is kept by deadline."""

SEQUENCE: Final = _dtype(
    f8="x_left x_size idle_since due think",
    i8="worker klass request head tail blocks tokens host_blocks host_tokens"
    " lane x_prev x_next x_tokens idle l_prev l_next hosted h_prev h_next thinks copies loads",
)
"""The KV of one session. ``blocks`` on the card hold ``tokens``; the host tier holds ``host_tokens``; ``lane``:
the transfer it is in, bringing its side to ``x_tokens`` with ``x_left`` of ``x_size`` bytes to go. A sequence in a
transfer is pinned: not dropped, not moved, not resumed, except that a swap-out is called off when the session
returns. ``copies`` and ``loads`` count transfers completed towards the host tier and back."""

WORKER: Final = _dtype(
    f8="kv_token_bytes block_bytes group_bytes weights q0 q0_net map_s unmap_s guard_s load_patience overhead"
    " gemm_floor gemm_sequence gemm_base gemm_token decode_base decode_sequence decode_kv prefill_base"
    " prefill_token prefill_context act_base act_token act_sequence"
    " rho v kv_decode credit stall starting_until next_timeout premap_s activation"
    " recent_iterations recent_time finished finished_context finished_context_sq rejected output_tokens"
    " prompt_tokens recomputed good_tokens judged violations preemptions oom evicted_bytes loaded_bytes"
    " cap gap gap_time gap_iterations last_iteration prefill_rate"
    " compacted_bytes arrived timeouts crashed e_started e_evicted e_compacted e_groups e_pause_us e_loaded"
    " w_left quiet_since",
    i8="card request_at request_end first_at first_end chunk_at chunk_end group_at groups bpg block_tokens"
    " physical offload prefetch page_aware batch_tokens max_preemptions max_retries premapped"
    " max_running n_dec n_pre mapped free pool idle_blocks reserved chunk_free chunk_new"
    " q_head q_tail q_len l_head l_tail n_idle heap_len admissions blocked floor_blocks hint top freed_last generation"
    " seq_at seq_end aside quota_groups by_deadline sheds capped watermark returns q_late n_away expects spare"
    " asleep",
)
"""One worker. ``v`` counts decode iterations; ``e_*`` are effects since the last command; ``seq_at`` to ``seq_end``
are its sequences; ``aside``: blocks kept for moves, in no count of free ones; ``quota_groups``: commanded quota;
``cap``: running cap in force; ``gap``: smoothed time between tokens; ``q_late``: first of the queue's late part;
``n_away``: sequences in the host tier only;
``expects``: it reserves the output that is expected, not max_tokens; ``spare``: blocks that it keeps mapped and free
beside a neighbour in need while it is below its share; ``asleep``: a :class:`Weights`; ``w_left``: bytes of its weights
that are still to be copied; ``quiet_since``: end of the last sub-step that had a request of it."""

CARD: Final = _dtype(
    f8="hbm capacity weights runtime slack reserve host_capacity host_used link hbm_rate mapped_bytes"
    " stall moved utilisation utilisation_idle substep restart_s failures",
    i8="transfers failed n_hosted silent first workers guard control_every prefetch_every timeout_every last_mapper"
    " h_head h_tail timeouts substeps asleep",
)
"""One card: its memory account, host tier and link; ``weights`` and ``capacity`` are those of now, ``asleep`` counts
its workers that are not awake; ``failures``: share of ``transfers`` that fail."""

GROUP: Final = _dtype(u8="free aside", i8="mapped")
"""One page group: a bit per free block, and one per block kept as a move's destination; none while not mapped."""

CHUNK: Final = _dtype(u8="mask", i8="group next")
"""Blocks of one sequence in one page group."""


class State(NamedTuple):
    """All arrays of a fleet; W workers, C cards, N requests, M sequences."""

    request: Records
    """REQUEST [N]"""
    sequence: Records
    """SEQUENCE [M]"""
    worker: Records
    """WORKER [W]"""
    card: Records
    """CARD [C]"""
    group: Records
    """GROUP"""
    chunk: Records
    """CHUNK"""
    open: npt.NDArray[np.uint64]
    """uint64 [W, words]: bit k of word j = group 64 j + k has a free block"""
    first: I8
    """int64: requests with an arrival of their own, by worker and arrival"""
    heap_t: F8
    """float64 [N]: arrivals of later turns, a heap per worker"""
    heap_r: I8
    """int64 [N]: their requests"""
    dec_request: I8
    """int64 [W, 1024]: decoding requests"""
    dec_next: F8
    """float64 [W, 1024]: decode counter at which each needs a block or ends"""
    pre_request: I8
    """int64 [W, 1024]: requests in prefill or loading, in order of admission"""
    scratch: I8
    """int64 [W, 1024]: decoding requests that need a block"""
    mark: I8
    """int64, one per group: scratch of compaction"""
    sizes: I8
    """int64 [W, 65]: scratch of compaction"""
    pick: I8
    """int64 [M]: scratch of eviction, a heap per worker of sequences that may leave"""
    score: F8
    """float64 [M]: their scores"""
    lane: I8
    """int64 [C, 4, 2]: head and tail of each transfer lane"""
    ttft: F8
    """float64 [W, 16]: histogram of first tokens"""
    tpot: F8
    """float64 [W, 16]: histogram of finished requests' mean time per output token"""
    swap_allowed: I8
    """int64 [5]"""
    shed_margin: F8
    """float64 [5]: by how much of its limit a first token may be late before the request is refused"""
    idle_before: F8
    """float64 [5]: seconds before an idle session may be evicted"""
    think: F8
    """float64 [W, 5]: running median of think times per class, seconds"""
    finished: F8
    """float64 [W, 5, 3]: requests finished per class, mean and mean square of their output tokens"""
