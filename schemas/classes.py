"""Service classes and their limits (DESIGN section 8, article 2).

A class is a promise to a kind of client: when its first token comes, how fast the others follow, and
whether its KV may leave the card. The numbers are settings; these are the defaults.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec


class ServiceClass(enum.IntEnum):
    """Order is part of the wire format and of the feature table: append only."""

    CHAT = 0
    AGENT = 1
    BATCH = 2
    COPILOT = 3
    TRAINING = 4


class ClassLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a class promises and allows.

    A request meets its SLO when its time to first token is within ``ttft_base_s + ttft_per_token_s x
    uncached prompt tokens`` and the mean time per output token within ``tpot_s``.
    """

    ttft_base_s: float
    """Limit of the time to first token for an empty prompt, seconds; inf = no limit."""
    ttft_per_token_s: float
    """What each prompt token that must be computed adds to it, seconds a token."""
    tpot_s: float
    """Limit of the mean time per output token, seconds; inf = no limit."""
    completion_s: float = float("inf")
    """Limit from arrival to the last token, seconds; batch is judged by it."""
    default_max_tokens: int = 4096
    """What a request reserves for its output when it does not say, tokens."""
    swap_allowed: bool = True
    """Whether KV of this class may leave the card at all."""
    idle_before_evict_s: float = 5.0
    """How long a conversation is left on the card after a turn before it counts as idle, seconds."""
    rho_max: float = 1.6
    """Highest overcommit factor for this class, a multiple of Q0."""
    shed_margin: float = 0.1
    """Where shedding is on, a request is refused when its first token would come later than its limit by more than this
    share of it: a prediction's error for one-off requests, more where refusing saves nothing."""

    @property
    def timeout_factor(self) -> float:
        """A client gives up without a first token after this many times its limit."""
        return 2.0


_INF = float("inf")

DEFAULT_LIMITS: Final[dict[ServiceClass, ClassLimits]] = {
    ServiceClass.CHAT: ClassLimits(ttft_base_s=2.0, ttft_per_token_s=0.25e-3, tpot_s=0.050),
    ServiceClass.AGENT: ClassLimits(
        ttft_base_s=5.0, ttft_per_token_s=0.25e-3, tpot_s=0.060, idle_before_evict_s=3.0, shed_margin=_INF
    ),
    ServiceClass.BATCH: ClassLimits(
        ttft_base_s=_INF, ttft_per_token_s=0.0, tpot_s=_INF, completion_s=600.0, idle_before_evict_s=0.0
    ),
    ServiceClass.COPILOT: ClassLimits(
        ttft_base_s=0.5,
        ttft_per_token_s=0.25e-3,
        tpot_s=0.050,
        default_max_tokens=512,
        swap_allowed=False,
        rho_max=1.3,
    ),
    ServiceClass.TRAINING: ClassLimits(
        ttft_base_s=_INF, ttft_per_token_s=0.0, tpot_s=_INF, swap_allowed=False, rho_max=1.0
    ),
}
