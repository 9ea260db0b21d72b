"""The quota of one worker as the engine itself keeps it: generations, leases, refusals. Pure.

This is the part of the safety rules that must hold with no actuator, bus or network: a raised quota nobody
renews goes back to rho 1.0 by itself (DESIGN section 1, *lease*).
"""

from __future__ import annotations

import math
from typing import Final

import msgspec

from schemas.actions import MAX_RUNNING_HIGH, MAX_RUNNING_LOW, MAX_RUNNING_START, RHO_MAX, RHO_MIN
from schemas.engine import Failure, GrantPages, SetQuota
from schemas.identity import STEP_NS, Order

LEASE_LIMIT_NS: Final = 5 * STEP_NS
"""Longest lease an engine gives, whatever was asked: 3 steps are usual."""

RHO_SLACK: Final = 1e-6


class QuotaLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What this worker can be told at all; bytes."""

    q0_bytes: int
    capacity_bytes: int
    """KV capacity of the card."""
    rho_max: float = RHO_MAX
    """Of the fleet and of the worker's class, whichever is lower."""
    max_running_start: int = MAX_RUNNING_START
    hard_limit_bytes: int = 0
    """Highest hard quota; 0: the card's capacity. A pool that can grow may use what a neighbour's weights leave."""
    keeps_pool: bool = False
    """Its memory is committed whatever it uses, as a stock vLLM's: a hard quota that no lease covers any more protects
    nobody, and goes as well."""


class Quota:
    """Quota in force of one worker. ``now_ns`` is always the node clock, and never goes back."""

    def __init__(self, limits: QuotaLimits) -> None:
        self.limits = limits
        self.generation = 0
        self.rho = RHO_MIN
        self.soft_bytes = limits.q0_bytes
        self.hard_bytes = limits.capacity_bytes
        self.max_running = limits.max_running_start
        self.lease_until_ns = 0
        self.granted_bytes = 0
        self.order = Order(-1, -1)
        """Of the last command accepted."""
        self.expired = 0
        """Leases that ran out with something to take back."""

    def set_quota(self, command: SetQuota, now_ns: int, floor_bytes: int) -> Failure | None:
        """Put in force, renew, or refuse; None = accepted. A repeat of the last command changes nothing."""
        order = Order(command.boot_id, command.step)
        if order == self.order:
            return None
        failure = self._refusal(command, order, now_ns, floor_bytes)
        if failure is not None:
            return failure
        wanted = (command.rho, command.soft_bytes, command.hard_bytes, command.max_running)
        if wanted != (self.rho, self.soft_bytes, self.hard_bytes, self.max_running):
            self.rho, self.soft_bytes, self.hard_bytes, self.max_running = wanted
            # A caller may know a higher one, from before this engine restarted: never fall behind it.
            self.generation = max(self.generation, command.generation) + 1
        self.order = order
        self.lease_until_ns = min(command.lease_ns, now_ns + LEASE_LIMIT_NS)
        return None

    def expire(self, now_ns: int) -> bool:
        """Take back what no lease covers any more; True when something was raised.

        The quota returns to what an operator would promise without overcommit: rho 1.0 and the ceiling of
        the start, under a new generation, so that commands decided before are refused. The hard quota stays, since a
        neighbour may have mapped what it leaves, except where the memory is this engine's anyway.
        """
        if now_ns < self.lease_until_ns or not self._raised:
            return False
        self.rho = RHO_MIN
        self.soft_bytes = self.limits.q0_bytes
        self.max_running = self.limits.max_running_start
        if self.limits.keeps_pool:
            self.hard_bytes = self.limits.capacity_bytes
        self.generation += 1
        self.expired += 1
        return True

    def grant(self, command: GrantPages, mapped_bytes: int) -> Failure | None:
        """Let the worker map that much in all; what is mapped already stays its own."""
        if not 0 <= command.bytes <= self.limits.capacity_bytes:
            return _failure("out_of_range", bytes=command.bytes, capacity_bytes=self.limits.capacity_bytes)
        if command.generation < self.generation:
            return _failure("stale_generation", generation=command.generation, own=self.generation)
        self.granted_bytes = max(command.bytes, mapped_bytes)
        return None

    @property
    def _raised(self) -> bool:
        own = (RHO_MIN, self.limits.q0_bytes, self.limits.max_running_start)
        lowered = self.limits.keeps_pool and self.hard_bytes != self.limits.capacity_bytes
        return (self.rho, self.soft_bytes, self.max_running) != own or lowered

    def _refusal(self, command: SetQuota, order: Order, now_ns: int, floor_bytes: int) -> Failure | None:
        limits = self.limits
        if order < self.order:
            return _failure(
                "stale_generation", boot_id=command.boot_id, step=command.step, own_boot_id=self.order.boot_id,
                own_step=self.order.step,
            )  # fmt: skip
        if not (math.isfinite(command.rho) and RHO_MIN - RHO_SLACK <= command.rho <= RHO_MAX + RHO_SLACK):
            return _failure("out_of_range", rho=command.rho, low=RHO_MIN, high=RHO_MAX)
        if not MAX_RUNNING_LOW <= command.max_running <= MAX_RUNNING_HIGH:
            return _failure("out_of_range", max_running=command.max_running, high=MAX_RUNNING_HIGH)
        if command.soft_bytes > command.rho * limits.q0_bytes * (1 + RHO_SLACK) + 1:
            return _failure("out_of_range", soft_bytes=command.soft_bytes, q0_bytes=limits.q0_bytes)
        if command.hard_bytes > max(limits.capacity_bytes, limits.hard_limit_bytes):
            return _failure("out_of_range", hard_bytes=command.hard_bytes, capacity_bytes=limits.capacity_bytes)
        if now_ns > command.deadline_ns or now_ns >= command.lease_ns:
            return _failure("late", now_ns=now_ns, deadline_ns=command.deadline_ns, lease_ns=command.lease_ns)
        if command.generation < self.generation:
            return _failure("stale_generation", generation=command.generation, own=self.generation)
        if command.rho > limits.rho_max + RHO_SLACK:
            return _failure("class_forbids", rho=command.rho, rho_max=limits.rho_max)
        if min(command.soft_bytes, command.hard_bytes) < floor_bytes:
            return _failure(
                "below_floor", soft_bytes=command.soft_bytes, hard_bytes=command.hard_bytes, floor_bytes=floor_bytes
            )
        return None


def _failure(reason: str, **numbers: float) -> Failure:
    return Failure(reason, numbers={key: float(value) for key, value in numbers.items()})
