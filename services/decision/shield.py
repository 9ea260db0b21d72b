"""The decision shield: which actions a worker may be given now, and why not the others (DESIGN 4.3).

Pure and vectorised over workers. The mask applies when acting, in the Bellman maximum and in evaluation
alike. Hold is always allowed. Memory safety does not rest here: the guard beside the engine keeps the card
from running out whatever is commanded; the shield keeps the policy from asking for what cannot help.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import (
    ACTION_COUNT,
    MAX_RUNNING_HIGH,
    MAX_RUNNING_LOW,
    MAX_RUNNING_START,
    RHO_MAX,
    RHO_MIN,
    RHO_STEP,
    Action,
    MaskReason,
)
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.features import FEATURE, FEATURE_COUNT

_HALF_STEP: Final = RHO_STEP / 2
_BITS: Final = (1 << np.arange(ACTION_COUNT)).astype(np.uint8)
ALLOWED: Final[NDArray[np.bool_]] = ((np.arange(1 << ACTION_COUNT)[:, None] >> np.arange(ACTION_COUNT)) & 1) == 1
"""bool [32, 5]: row m tells which actions mask m allows."""

_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0.0)]
_Steps = Annotated[int, msgspec.Meta(ge=0)]
_Ceiling = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class ShieldSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When an action is out of the question. The defaults are loose: the policy should learn the rest."""

    rho_max: Annotated[float, msgspec.Meta(ge=RHO_MIN, le=RHO_MAX)] = RHO_MAX
    """Highest overcommit factor for any class, a multiple of Q0, 1.0 to 1.6; a class may have less."""
    max_running_start: _Ceiling = MAX_RUNNING_START
    """Ceiling of the running cap that an engine starts with, requests. At the highest rho, widen stays
    allowed while the ceiling is below it, or a ceiling once tightened could never open again."""
    max_running_low: _Ceiling = MAX_RUNNING_LOW
    """Lowest ceiling, requests, 1 or more: an engine that runs nothing finishes nothing."""
    max_running_high: _Ceiling = MAX_RUNNING_HIGH
    """Highest ceiling, requests."""
    widen_after_tighten_steps: _Steps = 5
    """Cool-down of widen after a tighten, steps: 10 s is the window that latency is seen through."""
    compact_every_steps: _Steps = 3
    """Cool-down of compact after a compact, steps."""
    horizon_s: _NotNegative = 4.0
    """How far the growth of physical KV is extrapolated, seconds; two steps, the time a command needs."""
    exhaustion: _NotNegative = 0.98
    """Forecast live KV over the hard quota from which widen is forbidden, 0 to 1."""
    latency_limit: _NotNegative = 1.0
    """p95 of time per output token over the class limit from which widen is forbidden, 1 = at the limit."""
    first_token_late: _NotNegative = 0.5
    """p95 of time to first token over the class limit from which late tokens no longer forbid widen: requests that
    wait too long for a slot are late as well, and which lateness weighs more is the policy's to say."""
    frag_low: _Share = 0.05
    """f_frag up to which nothing counts as fragmented, 0 to 1."""
    idle_low: _Share = 0.01
    """Share of KV that must be idle for evict to have a victim, 0 to 1."""
    host_full: _Share = 0.98
    """Share of the host tier in use from which it is full, 0 to 1."""
    host_free_low: _NotNegative = 0.001
    """Free host tier over the card's KV capacity up to which it is full."""
    link_busy: _Share = 0.95
    """Share of the host link in use from which evict waits, 0 to 1."""
    training_opted_in: bool = False
    """Whether training workers may be touched at all (article 2: with great caution)."""
    limits: dict[ServiceClass, ClassLimits] = msgspec.field(default_factory=lambda: dict(DEFAULT_LIMITS))
    """What each class promises and allows."""


def rho_caps(classes: NDArray[np.integer], settings: ShieldSettings) -> NDArray[np.float64]:
    """Highest rho of each worker, float64 [n], from its class [n] and the setting; 1.0 for an unknown class."""
    table = np.full(256, RHO_MIN)
    for kind, limits in settings.limits.items():
        table[kind] = max(RHO_MIN, min(settings.rho_max, limits.rho_max))
    return table[np.asarray(classes, np.uint8)]


@np.errstate(invalid="ignore", over="ignore")
def masks(
    features: NDArray[np.float32],
    classes: NDArray[np.integer],
    holds: NDArray[np.integer],
    settings: ShieldSettings,
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Allowed actions and the reasons against the others.

    ``features`` float32 [n, FEATURE_COUNT] raw (NaN = absent), ``classes`` and ``holds`` [n] in 0..255.
    Gives the mask uint8 [n] (bit k is action k) and the reasons uint8 [n, 5] (:class:`MaskReason`, 0 where
    allowed). Of several reasons the first that was checked stands: held, class, unknown, then the state's.
    """
    rows = len(features)
    if features.shape != (rows, FEATURE_COUNT) or len(classes) != rows or len(holds) != rows:
        raise ValueError(
            f"features {features.shape}, {len(classes)} classes, {len(holds)} holds: "
            f"expected [n, {FEATURE_COUNT}], [n], [n]"
        )
    kinds = np.asarray(classes, np.uint8)
    reasons = np.zeros((rows, ACTION_COUNT), np.uint8)
    _forbid_all(reasons, np.asarray(holds) != 0, MaskReason.HELD)
    known = np.zeros(256, np.bool_)
    known[[int(kind) for kind in settings.limits]] = True
    _forbid_all(reasons, ~known[kinds], MaskReason.UNKNOWN_STATE)
    if not settings.training_opted_in:
        _forbid_all(reasons, kinds == ServiceClass.TRAINING, MaskReason.TRAINING_NOT_OPTED_IN)
    _widen(reasons[:, Action.WIDEN], features, kinds, settings)
    _tighten(reasons[:, Action.TIGHTEN], features, settings)
    _compact(reasons[:, Action.COMPACT], features, settings)
    _evict(reasons[:, Action.EVICT], features, kinds, settings)
    mask = ((reasons == MaskReason.ALLOWED) * _BITS).sum(axis=1, dtype=np.uint8)
    return mask, reasons


def _forbid_all(reasons: NDArray[np.uint8], where: NDArray[np.bool_], reason: MaskReason) -> None:
    """Forbid everything but hold in the rows ``where``."""
    if where.any():
        others = reasons[:, 1:]
        others[where[:, None] & (others == 0)] = reason


def _forbid(column: NDArray[np.uint8], where: NDArray[np.bool_], reason: MaskReason) -> None:
    """Forbid one action in the rows ``where`` that have no reason yet; comparisons with NaN are false."""
    column[where & (column == 0)] = reason


def _widen(
    column: NDArray[np.uint8], features: NDArray[np.float32], kinds: NDArray[np.uint8], settings: ShieldSettings
) -> None:
    u, slope, hard, share, idle, rho, ceiling, tpot, ttft, iteration, running, prefill, since = _columns(
        features, "u_alloc", "du_alloc", "quota_hard", "q0_share", "idle_share", "rho", "max_running",
        "tpot_p95", "ttft_p95", "iteration", "running", "p_prefill", "since_tighten",
    )  # fmt: skip
    timed = np.zeros(256, np.bool_)
    for kind, limits in settings.limits.items():
        timed[kind] = np.isfinite(limits.tpot_s)
    judged = timed[kinds]
    # The p95 is of requests that ended in the window: where none did, the time of an iteration stands for it. A
    # source that gives neither while requests decode hides trouble.
    decoding = running * (1.0 - np.where(np.isfinite(prefill), prefill, 0.0)) > 0
    unknown = ~np.isfinite(u + slope + hard + share + rho + ceiling + running + since)
    _forbid(column, unknown | (judged & decoding & np.isnan(tpot) & np.isnan(iteration)), MaskReason.UNKNOWN_STATE)
    cap = rho_caps(kinds, settings)
    at_top = (rho >= cap - _HALF_STEP) & (ceiling >= settings.max_running_start)
    _forbid(column, at_top & (cap <= RHO_MIN), MaskReason.CLASS_FORBIDS_OVERCOMMIT)
    _forbid(column, at_top, MaskReason.AT_RHO_MAX)
    _forbid(column, since < settings.widen_after_tighten_steps, MaskReason.COOL_DOWN)
    # Idle KV does not count against the forecast: the guard drops it before anything running is touched.
    live = u * (1.0 - np.where(np.isfinite(idle), idle, 0.0))
    forecast = live + np.maximum(slope, 0.0) * settings.horizon_s
    _forbid(column, forecast * share >= settings.exhaustion * hard, MaskReason.FORECAST_EXHAUSTION)
    late = (tpot > settings.latency_limit) & ~(ttft >= settings.first_token_late)
    _forbid(column, judged & late, MaskReason.LATENCY_AT_LIMIT)


def _tighten(column: NDArray[np.uint8], features: NDArray[np.float32], settings: ShieldSettings) -> None:
    rho, ceiling = _columns(features, "rho", "max_running")
    _forbid(column, ~np.isfinite(rho + ceiling), MaskReason.UNKNOWN_STATE)
    # Forbidden only when neither of the two things it lowers can go lower.
    lowest = (rho <= RHO_MIN + _HALF_STEP) & (ceiling <= settings.max_running_low)
    _forbid(column, lowest, MaskReason.AT_MAX_RUNNING_LOW)


def _compact(column: NDArray[np.uint8], features: NDArray[np.float32], settings: ShieldSettings) -> None:
    frag, since = _columns(features, "f_frag", "since_compact")
    _forbid(column, ~np.isfinite(frag + since), MaskReason.UNKNOWN_STATE)
    _forbid(column, frag <= settings.frag_low, MaskReason.NOTHING_FRAGMENTED)
    _forbid(column, since < settings.compact_every_steps, MaskReason.COOL_DOWN)


def _evict(
    column: NDArray[np.uint8], features: NDArray[np.float32], kinds: NDArray[np.uint8], settings: ShieldSettings
) -> None:
    idle, used, free, link = _columns(features, "idle_share", "host_use", "host_free", "link_use")
    forbidden = np.zeros(256, np.bool_)
    for kind, limits in settings.limits.items():
        forbidden[kind] = not limits.swap_allowed
    _forbid(column, forbidden[kinds], MaskReason.CLASS_FORBIDS_SWAP)
    # A machine without a host tier has no share of it in use: what is free decides.
    _forbid(column, (free <= settings.host_free_low) | (used >= settings.host_full), MaskReason.HOST_FULL)
    _forbid(column, ~np.isfinite(idle + free + link), MaskReason.UNKNOWN_STATE)
    _forbid(column, idle <= settings.idle_low, MaskReason.NOTHING_IDLE)
    _forbid(column, link >= settings.link_busy, MaskReason.LINK_BUSY)


def _columns(features: NDArray[np.float32], *names: str) -> tuple[NDArray[np.float32], ...]:
    return tuple(features[:, FEATURE[name]] for name in names)
