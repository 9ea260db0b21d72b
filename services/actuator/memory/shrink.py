"""Bring a worker down to a quota by a deadline, and say what each means gave (DESIGN section 5).

:class:`Shrinker` does what :func:`shrink_plan.plan_shrink` decides, one means at a time, and plans anew after each:
the engine goes on serving meanwhile, so sessions come back, requests end and blocks fill while KV is on its way.
The bytes are moved by the effects it is given; the pool is changed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import msgspec

from services.actuator.memory.departures import Departures, Effects
from services.actuator.memory.planner import plan_blocks
from services.actuator.memory.pool import Pool, SessionState
from services.actuator.memory.shrink_plan import plan_shrink
from services.actuator.memory.shrink_terms import (
    DEFAULT_LIMITS,
    DEFAULT_RATES,
    Limits,
    Rates,
    Reason,
    ShrinkPlan,
    ShrinkReceipt,
    Stage,
    Victim,
)
from services.clock import Clock

SLACK_S: Final = 1e-6
"""Differences in time that mean nothing."""


class Shrinker:
    """Shrinks one pool. ``clock`` is the node's; ``rates`` and ``limits`` what it counts on and what it may do."""

    def __init__(
        self,
        pool: Pool,
        effects: Effects,
        clock: Clock,
        *,
        rates: Rates = DEFAULT_RATES,
        limits: Limits = DEFAULT_LIMITS,
    ) -> None:
        self._pool = pool
        self._effects = effects
        self._clock = clock
        self._rates = rates
        self._limits = limits

    def shrink(
        self,
        target_groups: int,
        soft_blocks: int | None,
        generation: int,
        *,
        deadline_ns: int,
        idle: Sequence[Victim] = (),
        running: Sequence[int] = (),
    ) -> ShrinkReceipt:
        """Put the quota in force at once and bring the mapped groups down to it by ``deadline_ns`` of the clock.

        ``idle``: sessions that may leave, the best victim first (longest idle, or latest expected back); those with
        a copy in a lower tier go first anyway. ``running``: owners that may be preempted, the newest first. Owners
        that are not idle or running when it is their turn are left alone. StaleGeneration or BadGeometry, and
        nothing happens, for a quota that the pool refuses.
        """
        in_force = self._pool.set_quota(target_groups, soft_blocks, generation)
        run = _Run(self._pool, self._effects, self._clock, self._rates, self._limits, target_groups, deadline_ns)
        run.until(deadline_ns, idle, running)
        reason = run.reason
        if run.missing() > 0 and self._limits.late_limit_s > 0:
            run.until(deadline_ns + round(self._limits.late_limit_s * 1e9), idle, running)
        return run.receipt(in_force, reason)


class _Run:
    """One shrink under way."""

    def __init__(
        self, pool: Pool, effects: Effects, clock: Clock, rates: Rates, limits: Limits, target: int, deadline_ns: int
    ) -> None:
        self._pool, self._effects, self._clock = pool, effects, clock
        self._rates, self._limits = rates, limits
        self._target = target
        self._start_ns = self._mark_ns = clock.now_ns()
        self._deadline_ns = self._horizon_ns = deadline_ns
        self._from = pool.mapped_groups
        self._in_time = 0
        """Groups given back by the deadline."""
        self._dropped_moves = 0
        self._mover_failed = False
        self._departures = Departures(pool, effects)
        self.stages = {
            "empty": Stage(),
            "eviction": self._departures.evicted,
            "compaction": Stage(),
            "preemption": self._departures.preempted,
        }
        self.reason: Reason = ""

    def missing(self) -> int:
        """Groups still to give back."""
        return max(self._pool.mapped_groups - self._target, 0)

    def until(self, horizon_ns: int, idle: Sequence[Victim], running: Sequence[int]) -> None:
        """Work until the target is reached, the horizon has come, or nothing can be done."""
        self._horizon_ns = horizon_ns
        self._give_back("empty")
        while self.missing() > 0 and self._left_s() > 0:
            plan = self._plan(idle, running)
            self._note(plan.reason)
            if self._act(plan):
                continue
            before_ns = self._clock.now_ns()
            if not self._limits.may_wait or self._left_s() < self._rates.boundary_s:
                return
            self._effects.boundary()
            self._give_back("empty")
            if self._clock.now_ns() <= before_ns:
                return  # a clock that stands still would have us wait for ever

    def receipt(self, generation: int, reason: Reason) -> ShrinkReceipt:
        end_ns = self._clock.now_ns()
        short = max(self._from - self._target - self._in_time, 0)
        reached = self.missing() == 0
        late_s = max(self._mark_ns - self._deadline_ns, 0) / 1e9 if short else 0.0
        return ShrinkReceipt(
            generation=generation,
            from_groups=self._from,
            target_groups=self._target,
            mapped_groups=self._pool.mapped_groups,
            empty=self.stages["empty"],
            eviction=self.stages["eviction"],
            compaction=self.stages["compaction"],
            preemption=self.stages["preemption"],
            copied_out_bytes=self._departures.copied_out_bytes,
            forgotten_bytes=self._departures.forgotten_bytes,
            dropped_moves=self._dropped_moves,
            given_s=max(self._deadline_ns - self._start_ns, 0) / 1e9,
            took_s=(end_ns - self._start_ns) / 1e9,
            short_groups=short,
            late_s=late_s if reached else math.inf,
            reason=(reason or self._slowest()) if short else "",
        )

    def _slowest(self) -> Reason:
        """What took longer than was predicted, for a shrink that was to hold by its plan."""
        took = {name: stage.seconds for name, stage in self.stages.items()}
        slowest = max(took, key=lambda name: took[name])
        if slowest == "eviction" and self._departures.copied_out_bytes:
            return "link"
        return "copy" if slowest == "compaction" else "time"

    def _left_s(self) -> float:
        return (self._horizon_ns - self._clock.now_ns()) / 1e9

    def _plan(self, idle: Sequence[Victim], running: Sequence[int]) -> ShrinkPlan:
        limits = self._limits
        room = 0.0 if self._departures.tier_failed else limits.host_free_bytes - self._departures.copied_out_bytes
        return plan_shrink(
            self._pool.blocks,
            self.missing(),
            within_s=self._left_s() + SLACK_S,  # a plan that ends right at the deadline holds in spite of rounding
            idle=[one for one in idle if self._departures.may_go(one.owner, SessionState.IDLE)],
            running=[owner for owner in running if self._departures.may_go(owner, SessionState.LIVE)],
            rates=self._rates,
            limits=msgspec.structs.replace(limits, host_free_bytes=max(room, 0.0)),
        )

    def _act(self, plan: ShrinkPlan) -> bool:
        """Do the first thing that the plan asks for; False when there was nothing to do."""
        if plan.drops or plan.swaps or plan.forgets:
            self._evict(plan)
        elif plan.preempts:
            for owner in plan.preempts:
                self._departures.preempt(owner)
            self._effects.boundary()
            self._give_back("preemption")
        else:
            return self._compact(plan.groups)
        return True

    def _evict(self, plan: ShrinkPlan) -> None:
        for owner in plan.drops:
            self._departures.drop(owner, has_copy=True)
        for owner in plan.forgets:
            self._departures.drop(owner, has_copy=False)
        sizes = [self._departures.bytes_of(owner) for owner in plan.swaps]
        for at, owner in enumerate(plan.swaps):
            needed_s = sum(sizes[at:]) / self._rates.link_bytes_per_s + plan.copy_s + plan.other_s
            if self._left_s() < needed_s - SLACK_S:
                break  # slower than predicted: plan anew with what is left
            started_ns = self._clock.now_ns()
            self._departures.swap(owner)
            self._learn("link_bytes_per_s", sizes[at], started_ns)
        self._effects.boundary()
        self._give_back("eviction")

    def _compact(self, groups: int) -> bool:
        """Empty as many groups as were planned for the time that is left."""
        pool = self._pool
        plan = plan_blocks(pool.blocks, want_groups=groups, copy_bytes_per_s=self._rates.copy_bytes_per_s)
        if self._mover_failed or not len(plan.moves):
            return False
        ticket = pool.prepare(plan.moves)
        started_ns = self._clock.now_ns()
        if not self._effects.move(plan.moves):
            pool.abort(ticket)
            self._mover_failed = True
            self.reason = "mover"
            return False
        self._learn("copy_bytes_per_s", plan.bytes, started_ns)
        self._effects.boundary()
        done = pool.commit(ticket)
        self._effects.boundary()
        self._dropped_moves += done.dropped
        stage = self.stages["compaction"]
        stage.bytes += plan.bytes
        stage.pieces += len(plan.moves)
        self._give_back("compaction")
        return True

    def _learn(self, rate: str, size_bytes: int, started_ns: int) -> None:
        """Count on no more than what a transfer just reached."""
        took_s = (self._clock.now_ns() - started_ns) / 1e9
        if took_s > SLACK_S and size_bytes / took_s < getattr(self._rates, rate):
            self._rates = msgspec.structs.replace(self._rates, **{rate: size_bytes / took_s})

    def _note(self, reason: Reason) -> None:
        """The last reason, but in the end there is always too little time: what led there counts."""
        if reason and self.reason != "mover" and (reason != "time" or not self.reason):
            self.reason = reason

    def _give_back(self, means: str) -> None:
        """Give back what is empty, as far as it is wanted, and book it and the time since the last on ``means``."""
        spare = self._pool.groups.spare()
        count = min(self.missing(), len(spare))
        if count:
            self._effects.unmap(self._pool.give_back(spare[len(spare) - count :]))
        now_ns = self._clock.now_ns()
        stage = self.stages[means]
        stage.groups += count
        stage.seconds += (now_ns - self._mark_ns) / 1e9
        self._mark_ns = now_ns
        if now_ns <= self._deadline_ns:
            self._in_time += count
