"""Which commands may act: order of a node's batches, deadlines, ranges, generations, classes. Pure.

A lease is renewed by a command and by nothing else: the actuator has no timer that would keep a quota alive
when decision is gone (DESIGN section 1, *lease*). Two silent steps later the engine's own lease runs out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from schemas.actions import ACTION_COUNT, MAX_RUNNING_HIGH, MAX_RUNNING_LOW, RHO_MAX, RHO_MIN, Action, MaskReason
from schemas.identity import Order
from schemas.outcomes import Refusal

RHO_SLACK: Final = 1e-6
"""Rho travels as a multiple of 0.1 that went through float32."""

_RHO_LOW: Final = RHO_MIN - RHO_SLACK
_RHO_HIGH: Final = RHO_MAX + RHO_SLACK

# Plain numbers, since the checks run for every worker and step: naming an enum's member costs as much as a check.
EVICT: Final = int(Action.EVICT)
LATENCY_AT_LIMIT: Final = int(MaskReason.LATENCY_AT_LIMIT)
NONE: Final = int(Refusal.NONE)
LATE: Final = int(Refusal.LATE)
OUT_OF_RANGE: Final = int(Refusal.OUT_OF_RANGE)
OLDER_GENERATION: Final = int(Refusal.OLDER_GENERATION)
CLASS_FORBIDS: Final = int(Refusal.CLASS_FORBIDS)
BELOW_FLOOR: Final = int(Refusal.BELOW_FLOOR)
UNKNOWN_WORKER: Final = int(Refusal.UNKNOWN_WORKER)
ENGINE_UNREACHABLE: Final = int(Refusal.ENGINE_UNREACHABLE)
ENGINE_REFUSED: Final = int(Refusal.ENGINE_REFUSED)
BUDGET_EXHAUSTED: Final = int(Refusal.BUDGET_EXHAUSTED)

REFUSAL_OF_REASON: Mapping[str, int] = {
    "late": LATE,
    "out_of_range": OUT_OF_RANGE,
    "stale_generation": OLDER_GENERATION,
    "below_floor": BELOW_FLOOR,
    "class_forbids": CLASS_FORBIDS,
    "tier_full": int(Refusal.TIER_FULL),
}
"""What an engine's Failure reason is called in an outcome; others are ENGINE_REFUSED."""


class Orders:
    """The latest (boot_id, step) of each node; whatever is not newer is a duplicate."""

    def __init__(self) -> None:
        self._latest: dict[str, Order] = {}

    def admit(self, node: str, boot_id: int, step: int) -> bool:
        """True, once, for an order newer than all before it."""
        order = Order(boot_id, step)
        latest = self._latest.get(node)
        if latest is not None and order <= latest:
            return False
        self._latest[node] = order
        return True


def refusal_of(
    action: int,
    target_rho: float,
    target_max_running: int,
    base_generation: int,
    deadline_ns: int,
    lease_ns: int,
    *,
    t_ns: int,
    generation: int,
    swap_allowed: bool,
    q0_bytes: float,
    floor_bytes: float,
) -> int:
    """Why a command must not act at node clock ``t_ns`` on a worker whose quota has ``generation``: a Refusal's
    number, 0 if it may. The engine checks the same again: the actuator's view may be a moment old."""
    if not (
        0 <= action < ACTION_COUNT
        and _RHO_LOW <= target_rho <= _RHO_HIGH
        and MAX_RUNNING_LOW <= target_max_running <= MAX_RUNNING_HIGH
        and base_generation >= 0
    ):
        return OUT_OF_RANGE
    if t_ns > deadline_ns or t_ns >= lease_ns:
        return LATE
    if base_generation < generation:
        return OLDER_GENERATION
    if not swap_allowed and action == EVICT:
        return CLASS_FORBIDS
    if target_rho * q0_bytes < floor_bytes:
        return BELOW_FLOOR
    return NONE
