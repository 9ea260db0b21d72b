"""Which commands may act: order of a node's batches, deadlines, ranges, generations, classes. Pure.

A lease is renewed by a command and by nothing else: the actuator has no timer that would keep a quota alive
when decision is gone (DESIGN section 1, *lease*). Two silent steps later the engine's own lease runs out.
"""

from __future__ import annotations

from collections.abc import Mapping

from schemas.actions import MAX_RUNNING_HIGH, MAX_RUNNING_LOW, RHO_MAX, RHO_MIN, Action, WorkerAction
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.identity import Order
from schemas.outcomes import Refusal

RHO_SLACK = 1e-6
"""Rho travels as a multiple of 0.1 that went through float32."""

REFUSAL_OF_REASON: Mapping[str, Refusal] = {
    "late": Refusal.LATE,
    "out_of_range": Refusal.OUT_OF_RANGE,
    "stale_generation": Refusal.OLDER_GENERATION,
    "below_floor": Refusal.BELOW_FLOOR,
    "class_forbids": Refusal.CLASS_FORBIDS,
    "tier_full": Refusal.TIER_FULL,
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
    action: WorkerAction,
    *,
    t_ns: int,
    generation: int,
    service_class: int,
    q0_bytes: float,
    floor_bytes: float,
    limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
) -> Refusal:
    """Why a command must not act at node clock ``t_ns`` on a worker whose quota has ``generation``; NONE if
    it may. The engine checks the same again: the actuator's view may be a moment old."""
    if not (
        0 <= action.action < len(Action)
        and RHO_MIN - RHO_SLACK <= action.target_rho <= RHO_MAX + RHO_SLACK
        and MAX_RUNNING_LOW <= action.target_max_running <= MAX_RUNNING_HIGH
        and action.base_generation >= 0
    ):
        return Refusal.OUT_OF_RANGE
    if t_ns > action.deadline_ns or t_ns >= action.lease_ns:
        return Refusal.LATE
    if action.base_generation < generation:
        return Refusal.OLDER_GENERATION
    if action.action == Action.EVICT and not limits[ServiceClass(service_class)].swap_allowed:
        return Refusal.CLASS_FORBIDS
    if action.target_rho * q0_bytes < floor_bytes:
        return Refusal.BELOW_FLOOR
    return Refusal.NONE


def bounded_rho(
    target_rho: float, service_class: int, limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS
) -> float:
    """The target within the class's own maximum."""
    return min(target_rho, limits[ServiceClass(service_class)].rho_max)
