"""One movement budget for a card: what may be moved in a step, and at most in one decode gap. Pure.

Two bounds in seconds of movement: a share of the step, and so many milliseconds in each gap between two decode
iterations, which is what a client feels. Both halve when TPOT leaves its limit and recover slowly (budget.py).
Prefetch comes first since somebody will wait for it, then swap-out, then compaction. A class whose KV may not leave
the card has no swap budget at all.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.identity import STEP_S
from services.actuator import budget

F8 = NDArray[np.float64]
Bool = NDArray[np.bool_]


class MovementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long a card may move KV."""

    step_share: float = 0.5
    """Share of a step, 0 to 1."""
    gap_ms: float = 4.0
    """Most milliseconds of movement in one decode gap: a tenth of a 40 ms iteration."""


DEFAULTS: Final = MovementSettings()


class Grants(msgspec.Struct, frozen=True):
    """What a card's n workers may move in this step, float64 [n] bytes each, and what all together may move in one
    decode gap over the link or in the card."""

    prefetch_bytes: F8
    swap_bytes: F8
    compact_bytes: F8
    gap_link_bytes: float
    gap_copy_bytes: float


class CardMovement:
    """The budget of one card from step to step."""

    def __init__(self, settings: MovementSettings = DEFAULTS) -> None:
        self.settings = settings
        self.scale = 1.0
        """Share of the budget in force, budget.SCALE_LOW to 1."""

    def saw_tpot(self, over_limit: bool) -> None:
        """Once a step: whether a worker of the card had its TPOT beyond its class's limit."""
        self.scale = budget.next_scale(self.scale, over_limit)

    def seconds(self, decode_gap_s: float, step_s: float = STEP_S) -> float:
        """Seconds of movement in a step whose decode iterations take ``decode_gap_s`` (inf: nothing decodes, so
        only the step bounds)."""
        whole = step_s * self.settings.step_share
        if np.isfinite(decode_gap_s):
            whole = min(whole, step_s / max(decode_gap_s, 1e-4) * self.settings.gap_ms * 1e-3)
        return whole * self.scale

    def grants(
        self,
        prefetch_want: F8,
        swap_want: F8,
        compact_want: F8,
        swap_allowed: Bool,
        *,
        link_bytes_per_s: float,
        copy_bytes_per_s: float,
        decode_gap_s: float,
        step_s: float = STEP_S,
    ) -> Grants:
        """Deal the step out. Wants: float64 [n] bytes; ``swap_allowed``: bool [n], of the worker's class: False
        gives it neither swap nor prefetch, whatever is left. ValueError for a rate that is not positive."""
        if not (link_bytes_per_s > 0 and copy_bytes_per_s > 0):
            raise ValueError(f"rates {link_bytes_per_s}, {copy_bytes_per_s} bytes/s: expected positive")
        count = len(swap_allowed)
        dealt = budget.split(
            np.zeros(count, dtype=np.int64),
            np.array([self.seconds(decode_gap_s, step_s)]),
            np.full(count, link_bytes_per_s),
            copy_bytes_per_s,
            np.where(swap_allowed, prefetch_want, 0.0),
            np.where(swap_allowed, swap_want, 0.0),
            compact_want,
        )
        gap_s = self.settings.gap_ms * 1e-3 * self.scale
        return Grants(
            dealt.prefetch_bytes,
            dealt.evict_bytes,
            dealt.compact_bytes,
            gap_s * link_bytes_per_s,
            gap_s * copy_bytes_per_s,
        )
