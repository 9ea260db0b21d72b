"""Policies that need no network: the heuristic floor and the baselines it is compared with.

All are pure, vectorised over workers, take raw states and the shield's mask, and give one allowed action a
worker. The order of the heuristic's rules is its priority: first what hurts clients now, then room, then width.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import RHO_MAX, RHO_STEP, Action
from schemas.features import FEATURE
from services.decision.shield import ALLOWED

ONE_LINE_RHO: Final = RHO_MAX
ONE_LINE_EVICT: Final = 0.5

Actions = NDArray[np.int8]
_NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]


class HeuristicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Thresholds of :func:`choose`, made to be tuned per fleet."""

    latency_high: _NotNegative = 1.2
    """p95 of time per output token over the class limit from which to tighten; 1 = at the limit."""
    latency_low: _NotNegative = 0.9
    """The same ratio below which there is room to widen for a queue that waits for memory."""
    slots_low: _NotNegative = 0.8
    """The same ratio below which there is room to widen for a queue that waits for slots, whether its first tokens are
    late or not: more running requests would make the others' tokens late as well."""
    first_token_late: _NotNegative = 1.0
    """p95 of time to first token over the class limit from which late tokens are no reason to tighten: a smaller
    batch would only lengthen a queue that is late already (``tests/loadgen/test_replay.py``)."""
    preemption_high: _NotNegative = 0.05
    """Preemptions a second from which to tighten, and not to widen: one in the window of 10 s is 0.1."""
    tighten_every_steps: Annotated[int, msgspec.Meta(ge=0)] = 3
    """Steps between two tightens: one must show its effect before the next, or the ceiling collapses."""
    evict_high: _NotNegative = 0.60
    """Forecast physical KV over the hard quota from which idle contexts are evicted, 0 to 1."""
    evict_waiting: _NotNegative = 0.40
    """The same while requests wait for memory, 0 to 1."""
    evict_host_use: _NotNegative = 0.6
    """Host tier use from which idle contexts stay, 0 to 1: copies for which the tier drops others' bring nothing, and
    KV that is copied anyway leaves when its memory is needed."""
    evict_every_steps: Annotated[int, msgspec.Meta(ge=1)] = 2
    """Steps between two evictions, at least: with idle KV always at hand eviction would take every step, and the queue
    would never be given room. 1: no spacing."""
    horizon_s: _NotNegative = 4.0
    """How far the growth of physical KV is extrapolated, seconds."""
    reserved_high: _NotNegative = 0.95
    """Reserved KV over the soft quota from which a queue is taken to wait for rho, 0 to 1."""
    frag_high: _Share = 0.2
    """f_frag from which free memory is too scattered to hand over, 0 to 1. Page-aware allocation keeps one long run
    of free blocks, beside which some holes are already 0.1."""
    queue_low: _NotNegative = 1.0
    """Requests waiting for memory from which there is a queue, requests."""
    ceiling_near: _Share = 0.95
    """Running requests over the ceiling from which a queue is taken to wait for the ceiling, 0 to 1."""


@np.errstate(invalid="ignore", over="ignore")
def choose(features: NDArray[np.float32], mask: NDArray[np.uint8], settings: HeuristicSettings) -> Actions:
    """The heuristic's action int8 [n] for raw states float32 [n, F] under masks uint8 [n].

    Tighten on preemptions, and on late tokens while first tokens are in time (never for a neighbour's sake: it lowers
    the ceiling as well); evict when physical KV comes near the hard quota and the host tier has room; widen when the
    queue waits for slots and tokens are well in time, or for memory that no neighbour waits for and tokens are in time
    or first tokens late as well; compact when a neighbour waits for pages that are scattered here; else hold. An absent
    feature never triggers a rule.
    """
    columns = {name: features[:, FEATURE[name]] for name in _READ}
    s, c = settings, columns
    growth = np.where(np.isfinite(c["du_alloc"]), np.maximum(c["du_alloc"], 0.0), 0.0) * s.horizon_s
    hard = np.where(c["quota_hard"] > 0, c["quota_hard"], np.nan)
    filled = (c["u_alloc"] + growth) * c["q0_share"] / hard
    waiting = c["l_queue_memory"] >= s.queue_low
    # Nothing judged in the window is no trouble: NaN must not read as late.
    queue_in_time = ~(c["ttft_p95"] >= s.first_token_late)
    room = ~(c["tpot_p95"] >= s.latency_low) | ~queue_in_time
    neighbours_wait = c["neighbour_queue"] >= s.queue_low
    preempts = c["preemption_rate"] >= s.preemption_high
    hurts = ((c["tpot_p95"] >= s.latency_high) & queue_in_time) | preempts
    slack = ~(c["tpot_p95"] >= s.slots_low)
    full_slots = (c["l_queue"] >= s.queue_low) & (c["running"] >= s.ceiling_near * c["max_running"])
    rules = (
        (Action.TIGHTEN, hurts & (c["since_tighten"] >= s.tighten_every_steps)),
        (
            Action.EVICT,
            ((filled >= s.evict_high) | (waiting & (filled >= s.evict_waiting)))
            & ~(c["host_use"] >= s.evict_host_use)
            & (c["since_evict"] >= s.evict_every_steps),
        ),
        (
            Action.WIDEN,
            ~preempts
            & ((room & waiting & ~neighbours_wait & (c["u_reserved"] >= s.reserved_high)) | (slack & full_slots)),
        ),
        (Action.COMPACT, neighbours_wait & (c["f_frag"] >= s.frag_high)),
    )
    allowed = ALLOWED[mask]
    # The first rule that applies and is allowed wins; hold is what is left.
    chosen = np.zeros(len(features), np.int8)
    for action, rule in reversed(rules):
        chosen[rule & allowed[:, action]] = action
    return chosen


_READ: Final = (
    "u_alloc", "du_alloc", "q0_share", "quota_hard", "l_queue", "l_queue_memory", "tpot_p95", "ttft_p95",
    "preemption_rate", "since_tighten", "since_evict", "u_reserved", "running", "max_running", "neighbour_queue",
    "f_frag", "host_use",
)  # fmt: skip


def static(features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Actions:
    """Hold, always."""
    return np.zeros(len(features), np.int8)


def fixed(features: NDArray[np.float32], mask: NDArray[np.uint8], rho: float) -> Actions:
    """Widen or tighten until ``rho`` is in force, then hold; hold as well where the mask forbids the way.

    Hand ``rho`` to ``targets`` as ``goal_rho`` and the first command jumps there.
    """
    now = features[:, FEATURE["rho"]]
    wish = np.where(now < rho - RHO_STEP / 2, Action.WIDEN, np.where(now > rho + RHO_STEP / 2, Action.TIGHTEN, 0))
    return _or_hold(wish, mask)


def one_line(features: NDArray[np.float32], mask: NDArray[np.uint8]) -> Actions:
    """The one-line rule of DESIGN section 7: rho 1.6, and evict above 50 %."""
    up = fixed(features, mask, ONE_LINE_RHO)
    evict = _or_hold(np.where(features[:, FEATURE["u_alloc"]] > ONE_LINE_EVICT, Action.EVICT, 0), mask)
    return np.where(up != 0, up, evict).astype(np.int8)


def random_masked(mask: NDArray[np.uint8], rng: np.random.Generator) -> Actions:
    """One of the allowed actions of each row, all alike."""
    draws = np.where(ALLOWED[mask], rng.random((len(mask), ALLOWED.shape[1])), -1.0)
    best: NDArray[np.intp] = draws.argmax(axis=1)
    return best.astype(np.int8)


def _or_hold(wish: NDArray[np.integer], mask: NDArray[np.uint8]) -> Actions:
    allowed = ((mask >> wish.astype(np.uint8)) & 1) == 1
    chosen: Actions = np.where(allowed, wish, Action.HOLD).astype(np.int8)
    return chosen
