"""The published figures that the built-in workloads are fitted to.

Sources: Azure LLM inference trace 2023 (Patel et al., Splitwise, ISCA 2024); Mooncake's conversation trace
(FAST 2025); agentic coding sessions (callanjfox/kv-cache-tester). What is an assumption says so.
"""

from __future__ import annotations

from typing import Final

import msgspec

from schemas.classes import ServiceClass


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic. Lengths are (mean, p50, p99) in tokens."""

    service_class: ServiceClass
    prompt: tuple[float, float, float]
    output: tuple[float, float, float]
    rate_per_s: float
    """Requests (turns included) a second."""
    cv: float = 1.0
    """Coefficient of variation of the gaps between arrivals; of sessions' starts where there are sessions."""
    prefix_reuse: float = 0.0
    """Share of prompt tokens that repeat the session's previous turn; 0 = no sessions."""
    turns_mean: float = 1.0
    """Mean turns of a session."""
    think_p50_s: float = 0.0
    think_p90_s: float = 0.0
    assumed: str = ""
    """What of this is not published."""


FIGURES: Final[dict[str, Figures]] = {
    "chat": Figures(
        service_class=ServiceClass.CHAT,
        prompt=(1155, 1020, 4142),
        output=(211, 129, 601),
        rate_per_s=5.5,
        cv=1.1,
    ),
    "code": Figures(
        service_class=ServiceClass.COPILOT,
        prompt=(2048, 1469, 7436),
        output=(28, 13, 251),
        rate_per_s=2.6,
        cv=13.0,
    ),
    "long": Figures(
        service_class=ServiceClass.CHAT,
        prompt=(12_035, 6_909, 85_400),
        output=(343, 350, 1_119),
        rate_per_s=3.4,
        prefix_reuse=0.37,
        turns_mean=2.2,
        think_p50_s=40.0,
        think_p90_s=260.0,
        assumed="turns a session (2.2) and think time (p50 40 s, p90 260 s) are assumed",
    ),
    "agent": Figures(
        service_class=ServiceClass.AGENT,
        prompt=(122_000, 104_000, 499_000),
        output=(440, 216, 3_686),
        rate_per_s=1.0,
        prefix_reuse=0.96,
        turns_mean=60.0,
        think_p50_s=10.0,
        think_p90_s=166.0,
        assumed="the rate (1 call/s) and turns a session (60) are assumed",
    ),
}

MIXED_SHARES: Final[dict[str, float]] = {"chat": 0.5, "code": 0.25, "long": 0.1, "agent": 0.25}
"""What the mixed workload takes of each kind's rate (an assumption: nobody publishes a mix)."""

THINK_MAX_S: Final = 3600.0
"""A session that stays away longer is over, seconds."""
