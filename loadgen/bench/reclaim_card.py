"""The card of the reclaim benchmark: who gets which page groups, by which method, and when they are there.

A tenant takes memory from its reserve first, which is mapped ahead; then groups that nobody has; then empty groups
of its neighbours; then whatever the method offers. Groups that a donor empties are unmapped there and mapped in the
taker, one after another on the card's clocks; a want that cannot be met at once is tried again every sub-step.
Empty groups that a tenant's queue cannot use go back to the card unasked, by every method.
"""

from __future__ import annotations

import heapq
from typing import Final

from loadgen.bench.reclaim_arena import PoolArena
from loadgen.bench.reclaim_engine import SUBSTEP_S, Engine
from loadgen.bench.reclaim_methods import (
    FOR_NEED,
    FOR_RESERVE,
    FOR_WANT,
    Account,
    Clocks,
    Costs,
    Host,
    Mapping,
    Method,
    Want,
)

NEED_GROUPS: Final = 4
"""A tenant that needs a neighbour's memory asks for at least this many groups: one round for several blocks."""
NEED_MOST_GROUPS: Final = 32
FLOOR_GROUPS: Final = 8
"""A donor keeps this many."""
SLACK_BLOCKS: Final = 64
"""Free blocks that compaction leaves a donor per 16 running sequences, so that it need not ask at once itself."""
IDLE_LIMIT_S: Final = 45.0
"""Idle KV is dropped after this long: by then most of its sessions have ended."""
ROUND_GROUPS: Final = 8
"""Eviction and compaction go in rounds of this many groups."""
CONTROL_SUBSTEPS: Final = 20
"""The control period, 2 s: so often a reserve may evict."""


class Card:
    """Tenants over one card's page groups."""

    def __init__(
        self, engines: list[Engine], arenas: list[PoolArena], method: Method, costs: Costs,
        capacity_groups: int, reserve_groups: int, kv_bytes_per_token: int, host: Host,
    ) -> None:  # fmt: skip
        self.engines, self.arenas, self.method, self.costs = engines, arenas, method, costs
        self.capacity_groups, self.reserve_groups = capacity_groups, reserve_groups
        self.free_groups = capacity_groups
        self.reserve = [0] * len(engines)
        """Groups mapped in a tenant ahead of need."""
        self.clocks = Clocks(costs)
        self.account = Account()
        self.wants: list[Want] = []
        self.done: list[Want] = []
        self._blocks = arenas[0].blocks_per_group
        self._token_bytes = kv_bytes_per_token
        self._host = host
        self._queue: list[Mapping] = []
        self._coming: list[tuple[float, int, Mapping]] = []
        """(instant, order, what for): groups being mapped or just mapped."""
        self._going: list[float] = []
        """When groups that tenants give back to the card are free."""
        self._on_the_way = [0] * len(engines)
        self._to_reserve = [0] * len(engines)
        self._order = 0
        self._cycle_s = 0.02
        self._control = False

    # What an engine asks (reclaim_engine.Memory).

    def find(self, tenant: Engine, blocks: int, now: float) -> bool:
        """Blocks for a running sequence, at once: the reserve, else the tenant's own idle KV."""
        arena = self.arenas[tenant.number]
        while arena.room() < blocks:
            if self.reserve[tenant.number]:
                self.reserve[tenant.number] -= 1
                arena.map(1)
            elif tenant.idle:
                self._evict(tenant, next(iter(tenant.idle)), now)
            else:
                return False
        return True

    def away_tokens(self, session: int) -> int:
        return self._host.has(session)

    def load(self, now: float, session: int) -> float:
        return self.clocks.loaded(now, self._host.has(session) * self._token_bytes)

    # The card's own step.

    def shift(self, tenant: int, groups: int, now: float) -> None:
        """``tenant`` is the busy one from now on and is to have ``groups`` more."""
        givable = self.free_groups + self.reserve[tenant]
        for donor in self._donors(tenant):
            arena = self.arenas[donor]
            packed = -(-self.engines[donor].running_blocks // self._blocks)
            givable += max(arena.mapped_groups() - max(packed + 1, FLOOR_GROUPS), 0)
        self.wants.append(Want(tenant, now, groups, givable >= groups, self.free_groups < groups))

    def step(self, now: float, cycle_s: float) -> None:
        """Hand over what is mapped by now, then serve wants, needs and reserves in this order."""
        self._cycle_s = cycle_s
        self._arrivals(now)
        for engine in self.engines:
            for session in engine.expired(now - IDLE_LIMIT_S):
                self.arenas[engine.number].drop(session)
        for want in self.wants:
            if want.given < want.groups:
                self._from_reserve(want.tenant, want.groups - want.given, now)
                self._gather(want.tenant, want.groups - want.given, now, FOR_WANT)
        for number in range(len(self.engines)):
            self._serve_need((number + round(now / SUBSTEP_S)) % len(self.engines), now)
        self._control = round(now / SUBSTEP_S) % CONTROL_SUBSTEPS == 0
        if not self.wants:
            for number in range(len(self.engines)):
                self._fill_reserve(number, now)
        self._give_back(now)
        self._map_until(now + SUBSTEP_S, now)

    def _fill_reserve(self, number: int, now: float) -> None:
        """The same rule for every method: the tenant's own spare groups, the card's free ones, the neighbours' empty
        ones, compaction where the method compacts; once a control period, where the method evicts, no more blocks
        are evicted than the reserve lacks. Waiting alone has the first three."""
        short = self.reserve_groups - self.reserve[number] - self._to_reserve[number]
        own = min(short, self._spare_empty(number))
        if own > 0:
            self.arenas[number].give_back(own)
            self.reserve[number] += own
            short -= own
        if short > 0:
            self._gather(number, short, now, FOR_RESERVE)

    def _give_back(self, now: float) -> None:
        """Empty groups that a tenant's queue cannot use are the card's again; what a want gathers is left alone."""
        for number in range(len(self.engines)):
            if all(want.tenant != number for want in self.wants):
                spare = self._spare_empty(number)
                self.arenas[number].give_back(spare)
                self._going.extend(self.clocks.unmapped(now) for _ in range(spare))

    def _spare_empty(self, number: int) -> int:
        """Empty groups beyond what the tenant's queue needs."""
        arena = self.arenas[number]
        most = min(arena.empty_groups(), arena.mapped_groups() - FLOOR_GROUPS)
        if most <= 0:
            return 0
        room = arena.room() - self.engines[number].queued_blocks(arena.room())
        return min(most, room // self._blocks)

    def _map_until(self, horizon: float, now: float) -> None:
        """Begin the mapping of what is free before ``horizon``: wants first, then needs, then reserves."""
        while self._queue and self.clocks.map.free_at_s < horizon:
            start = max(self.clocks.map.free_at_s, min(entry.ready_s for entry in self._queue), now)
            if start >= horizon:
                return
            chosen = min((e for e in self._queue if e.ready_s <= start), key=lambda e: (e.purpose, e.ready_s))
            self._queue.remove(chosen)
            done = self.clocks.mapped(start)
            self._order += 1
            heapq.heappush(self._coming, (done, self._order, chosen))
            want = self._want_of(chosen.tenant) if chosen.purpose != FOR_RESERVE else None
            if want is not None:
                want.ready_s.append(done)

    def _want_of(self, tenant: int) -> Want | None:
        """The tenant's want that still lacks groups."""
        return next((w for w in self.wants if w.tenant == tenant and len(w.ready_s) < w.groups), None)

    def _arrivals(self, now: float) -> None:
        gone = sum(at <= now for at in self._going)
        self._going = [at for at in self._going if at > now]
        self.free_groups += gone
        while self._coming and self._coming[0][0] <= now:
            entry = heapq.heappop(self._coming)[2]
            if entry.purpose == FOR_RESERVE:
                self._to_reserve[entry.tenant] -= 1
                self.reserve[entry.tenant] += 1
            else:
                self._on_the_way[entry.tenant] -= 1
                self.arenas[entry.tenant].map(1)
        for want in [want for want in self.wants if len(want.ready_s) >= want.groups and max(want.ready_s) <= now]:
            self.wants.remove(want)
            self.done.append(want)

    def _serve_need(self, number: int, now: float) -> None:
        """Room for the queue's head, as far as the groups on the way do not bring it."""
        engine = self.engines[number]
        short = engine.short_blocks(NEED_MOST_GROUPS * self._blocks)
        if short <= 0 or any(want.tenant == number and want.given < want.groups for want in self.wants):
            return
        taken = self._from_reserve(number, -(-short // self._blocks), now)
        groups = -(-short // self._blocks) - taken - self._on_the_way[number]
        if groups > 0:
            self._gather(number, max(groups, NEED_GROUPS), now, FOR_NEED)

    def _from_reserve(self, number: int, groups: int, now: float) -> int:
        taken = min(groups, self.reserve[number])
        if taken <= 0:
            return 0
        self.reserve[number] -= taken
        self.arenas[number].map(taken)
        for _ in range(taken):
            want = self._want_of(number)
            if want is not None:
                want.ready_s.append(now)
                want.given += 1
        return taken

    def _donors(self, taker: int) -> list[int]:
        return [number for number in range(len(self.engines)) if number != taker]

    def _gather(self, taker: int, groups: int, now: float, purpose: int) -> None:
        """Get up to ``groups`` for ``taker``: free ones, then the neighbours' empty ones, then by the method.

        For a need the taker's own idle KV comes before the neighbours', and before everything else while others
        wait for their mapping: it is usable at once. A reserve is filled last.
        """
        if purpose == FOR_NEED and self._queue:
            groups -= self._drop_own(taker, groups, now)
        if groups <= 0:
            return
        free = min(groups, self.free_groups)
        self.free_groups -= free
        ready = [now] * free
        begun = now + self.costs.plan_s
        if len(ready) < groups:
            ready.extend(self._empty(taker, groups - len(ready), now))
        if len(ready) < groups and self.method.compaction:
            ready.extend(self._compact(taker, groups - len(ready), begun))
        if len(ready) < groups and purpose == FOR_NEED:
            groups -= self._drop_own(taker, groups - len(ready), now)
        if len(ready) < groups and self.method.eviction != "none" and (purpose != FOR_RESERVE or self._control):
            short = groups - len(ready)
            most = short * self._blocks if purpose == FOR_RESERVE else self.capacity_groups * self._blocks
            ready.extend(self._evict_for(taker, short, begun, most))
        for at in ready:
            self._queue.append(Mapping(at, taker, purpose))
            if purpose == FOR_RESERVE:
                self._to_reserve[taker] += 1
            else:
                self._on_the_way[taker] += 1
        for want in self.wants:
            if want.tenant == taker and purpose != FOR_RESERVE and want.given < want.groups:
                want.given += len(ready)
                break

    def _unmap(self, donor: int, groups: int, ready_s: float) -> list[float]:
        """Take empty groups from a donor."""
        self.arenas[donor].give_back(groups)
        self.account.freed_groups += groups
        return [self.clocks.unmapped(ready_s) for _ in range(groups)]

    def _empty(self, taker: int, groups: int, ready_s: float) -> list[float]:
        """Empty groups of the neighbours, beyond what their own queues are about to use."""
        ready: list[float] = []
        for donor in self._donors(taker):
            arena = self.arenas[donor]
            keep = -(-self.engines[donor].headroom() // self._blocks) if self.engines[donor].waiting else 0
            count = min(groups - len(ready), arena.empty_groups() - keep, arena.mapped_groups() - FLOOR_GROUPS)
            if count > 0:
                ready.extend(self._unmap(donor, count, ready_s))
        return ready

    def _slack(self, donor: int) -> int:
        engine = self.engines[donor]
        return SLACK_BLOCKS * (1 + engine.running // 16)

    def _spare_groups(self, donor: int, slack: bool) -> int:
        """Groups that compaction could empty with the free blocks there are, less the slack for the donor's growth."""
        arena = self.arenas[donor]
        room = arena.room() - (self._slack(donor) if slack else 0)
        return min(room // self._blocks, arena.mapped_groups() - FLOOR_GROUPS)

    def _compact(self, taker: int, groups: int, ready_s: float, slack: bool = True) -> list[float]:
        """Empty groups of the neighbours by moves, the donor with the most free blocks first."""
        ready: list[float] = []
        spare = {donor: self._spare_groups(donor, slack) for donor in self._donors(taker)}
        for donor in sorted(spare, key=lambda d: -spare[d]):
            count = min(spare[donor], groups - len(ready))
            if count <= 0:
                continue
            emptied, moved = self.arenas[donor].compact(count)
            if emptied:
                self.account.moved_blocks += sum(moved)
                self.account.compacted_groups += emptied
                copied = self.clocks.moved(ready_s, sum(moved) * self.arenas[donor].block_bytes)
                # Re-pointed at the next iteration boundary, free one iteration later.
                ready.extend(self._unmap(donor, emptied, copied + 2.0 * self._cycle_s))
            empty = min(self.arenas[donor].empty_groups(), count - emptied)
            if empty > 0:
                ready.extend(self._unmap(donor, empty, ready_s))
        return ready

    def _drop_own(self, taker: int, groups: int, now: float) -> int:
        """The taker's own idle KV makes room for ``groups``, least recently used first: for how many it did."""
        engine, arena = self.engines[taker], self.arenas[taker]
        before = arena.room()
        while engine.idle and arena.room() - before < groups * self._blocks:
            self._evict(engine, next(iter(engine.idle)), now)
        return min((arena.room() - before) // self._blocks, groups)

    def _evict(self, engine: Engine, session: int, now: float) -> tuple[int, float]:
        """Drop an idle session, with a copy to the host tier: (blocks, when the copy is done)."""
        idle = engine.idle.pop(session)
        self.arenas[engine.number].drop(session)
        written = self._host.put(session, idle.tokens)
        return idle.blocks, self.clocks.swapped_out(now, written * self._token_bytes)

    def _evict_for(self, taker: int, groups: int, now: float, most_blocks: int) -> list[float]:
        """Idle KV of the neighbours gives the deficit: oldest first, or by what empties whole groups.

        In rounds: the first groups are being mapped while later sessions are still on the link.
        """
        if self.method.eviction == "pages":
            return self._evict_pages(taker, groups, now, most_blocks)
        ready: list[float] = []
        donors = self._donors(taker)
        copied, evicted = now, 0
        while len(ready) < groups:
            oldest = [
                (next(iter(self.engines[d].idle.values())).since_s, d)
                for d in donors
                if evicted < most_blocks and self.engines[d].idle and self.arenas[d].mapped_groups() > FLOOR_GROUPS
            ]
            if oldest:
                engine = self.engines[min(oldest)[1]]
                blocks, copied = self._evict(engine, next(iter(engine.idle)), now)
                self.account.evicted_blocks += blocks
                evicted += blocks
            round_groups = min(groups - len(ready), ROUND_GROUPS)
            if not self.method.compaction:
                ready.extend(self._empty(taker, groups - len(ready), copied))
            elif not oldest or sum(max(self._spare_groups(d, False), 0) for d in donors) >= round_groups:
                ready.extend(self._compact(taker, round_groups, copied, slack=False))
            if not oldest:
                break
        return ready

    def _evict_pages(self, taker: int, groups: int, now: float, most_blocks: int) -> list[float]:
        ready: list[float] = []
        evicted = 0
        for donor in self._donors(taker):
            arena, engine = self.arenas[donor], self.engines[donor]
            most = min(groups - len(ready), arena.mapped_groups() - FLOOR_GROUPS)
            if most <= 0 or not engine.idle:
                continue
            copied = now
            for session in arena.victims(list(engine.idle), most):
                if evicted >= most_blocks:
                    break
                blocks, copied = self._evict(engine, session, now)
                self.account.evicted_blocks += blocks
                evicted += blocks
            count = min(arena.empty_groups(), most)
            if count > 0:
                ready.extend(self._unmap(donor, count, copied))
        return ready

    def check(self) -> None:
        """Accounts add up: every group is free, mapped in a tenant, in a reserve, or on its way."""
        held = (
            sum(arena.mapped_groups() for arena in self.arenas)
            + sum(self.reserve)
            + len(self._coming)
            + len(self._queue)
            + len(self._going)
        )
        if held + self.free_groups != self.capacity_groups:
            raise AssertionError(f"{held} groups held + {self.free_groups} free of {self.capacity_groups}")
        for engine, arena in zip(self.engines, self.arenas, strict=True):
            idle = sum(entry.blocks for entry in engine.idle.values())
            if idle + engine.running_blocks != arena.occupied():
                raise AssertionError(
                    f"tenant {engine.number}: {engine.running_blocks} running + {idle} idle blocks, "
                    f"{arena.occupied()} in its pool"
                )
