"""One tenant's engine in the reclaim benchmark: waiting, prefill, decode, idle sessions, over an arena of blocks.

All sequences of a batch decode at one pace, so a sequence's growth and end are instants of a common count of decoded
tokens: the engine handles those events and nothing per token. Pure and deterministic.
"""

from __future__ import annotations

import collections
import heapq
from typing import Final, Protocol

from loadgen.bench.reclaim_tenants import Idle, Request, Results, Session, TenantSpec
from loadgen.engine.calibration import IterationTime

BLOCK_TOKENS: Final = 16
SUBSTEP_S: Final = 0.1
GROWTH_BLOCKS: Final = 2
"""A decoding sequence takes this many blocks at a time: one would be truer and takes twice the calls."""
PREFILL_TOKENS: Final = 1024
"""Prompt tokens of a card's iteration, shared by the engines that have a prompt to compute: long prompts must not
hold up the decoding sequences of all of them."""
DECODE_LIMIT_S: Final = 0.034
"""The running cap: nobody is admitted while one token of all the card's decoding sequences takes longer than this,
so that more memory never costs the limit of the time per token."""
MAX_RUNNING: Final = 256
OVERHEAD_S: Final = 0.001


def blocks_for(tokens: float) -> int:
    """Blocks that hold so many tokens."""
    return -(-int(tokens) // BLOCK_TOKENS)


class Arena(Protocol):
    """Where a tenant's blocks lie."""

    def room(self) -> int:
        """Free blocks in what is mapped now."""

    def take(self, owner: int, blocks: int) -> None:
        """``blocks`` more for a running ``owner``; the caller has looked at ``room``."""

    def rest(self, owner: int) -> None:
        """The owner's turn ended; its blocks are idle."""

    def wake(self, owner: int) -> None:
        """An idle owner runs again."""

    def drop(self, owner: int) -> None:
        """All blocks of a running or idle owner are free."""


class Memory(Protocol):
    """What the card does for an engine."""

    def find(self, tenant: Engine, blocks: int, now: float) -> bool:
        """Make ``blocks`` usable at once out of the reserve or the tenant's own idle KV."""

    def away_tokens(self, session: int) -> int:
        """Tokens of a session in the host tier, 0 if none."""

    def load(self, now: float, session: int) -> float:
        """When the session's KV would be back in the arena."""


class Engine:
    """Continuous batching with chunked prefill, first come first served."""

    def __init__(
        self, number: int, spec: TenantSpec, timing: IterationTime, arena: Arena, sessions: tuple[Session, ...]
    ) -> None:
        self.number, self.spec, self.timing, self.arena = number, spec, timing, arena
        self.waiting: collections.deque[Request] = collections.deque()
        self.idle: collections.OrderedDict[int, Idle] = collections.OrderedDict()
        """By session, least recently used first."""
        self.results = Results()
        self.running_blocks = 0
        self.decode_s = 0.0
        """Seconds in which all engines of the card decode one token each; the card says so."""
        self._loading: list[Request] = []
        self._prefill: collections.deque[Request] = collections.deque()
        self._decoded = 0.0
        self._events: list[tuple[float, int, int, Request]] = []
        """(count of decoded tokens, order, preemptions then, request): it needs a block, or has ended."""
        self._order = 0
        self._running: dict[int, Request] = {}
        """Decoding, by session, oldest first."""
        self._kv_tokens = 0.0
        self._coming = [(session.arrival_s, session.number, 0, session) for session in sessions]
        heapq.heapify(self._coming)

    @property
    def running(self) -> int:
        """Admitted requests."""
        return len(self._running) + len(self._prefill) + len(self._loading)

    def arrive(self, now: float) -> None:
        """Queue what has come; clients without a first token give up after twice their limit."""
        while self._coming and self._coming[0][0] <= now:
            at, _, turn, session = heapq.heappop(self._coming)
            asked = session.turns[turn]
            before = session.turns[turn - 1] if turn else None
            history = before.prompt_tokens + before.output_tokens if before else 0
            self.waiting.append(
                Request(session, turn, at, asked.prompt_tokens, asked.prompt_tokens - history, asked.output_tokens)
            )
            if session.number in self.idle:
                self.idle.move_to_end(session.number)
        if self.waiting:
            gone = [r for r in self.waiting if r.first_token_s < 0 and now - r.arrival_s > self._patience_s(r)]
            for request in gone:
                self.waiting.remove(request)
                self.results.gave_up += 1
                self.results.waits_s.append(now - request.arrival_s)

    def _limit_s(self, request: Request) -> float:
        return self.spec.limits.ttft_base_s + self.spec.limits.ttft_per_token_s * request.fresh_tokens

    def _patience_s(self, request: Request) -> float:
        return self.spec.limits.timeout_factor * self._limit_s(request)

    def needed(self, request: Request) -> int:
        """Blocks that a waiting request needs beyond those its session still has."""
        idle = self.idle.get(request.session.number)
        return blocks_for(request.tokens + 1) - (idle.blocks if idle else 0)

    def headroom(self) -> int:
        """Blocks that admission leaves for the growth of what runs."""
        return GROWTH_BLOCKS * (1 + len(self._running) // 4)

    def queued_blocks(self, most: int) -> int:
        """Blocks for the queue and the growth of what runs, looked at until ``most``; 0 while nobody may run."""
        if not self.wants_admission():
            return 0
        wanted = self.headroom()
        for request in self.waiting:
            if wanted >= most:
                return most
            wanted += max(self.needed(request), 0)
        return min(wanted, most)

    def short_blocks(self, most: int) -> int:
        """Of these, what the room there is does not give, looked at until ``most``."""
        room = self.arena.room()
        return max(self.queued_blocks(room + most) - room, 0)

    def wants_admission(self) -> bool:
        """Somebody waits and may run as far as the cap on running requests goes."""
        return bool(self.waiting) and self.running < MAX_RUNNING and self.decode_s < DECODE_LIMIT_S

    def expired(self, before_s: float) -> list[int]:
        """Forget the sessions that are idle since before this instant; the caller drops their blocks."""
        gone: list[int] = []
        while self.idle:
            session, idle = next(iter(self.idle.items()))
            if idle.since_s >= before_s:
                break
            del self.idle[session]
            gone.append(session)
        return gone

    def admit(self, now: float, memory: Memory) -> None:
        """Admit from the head of the queue while its blocks fit in what is mapped."""
        while self.wants_admission():
            request = self.waiting[0]
            needed = self.needed(request)
            if needed + self.headroom() > self.arena.room():
                return
            self.waiting.popleft()
            number = request.session.number
            idle = self.idle.pop(number, None)
            away = memory.away_tokens(number)
            if idle is not None:
                self.arena.wake(number)
                request.prefill_left = max(request.tokens - idle.tokens, 1)
            elif away:
                request.ready_s = memory.load(now, number)
                request.prefill_left = max(request.tokens - away, 1)
            else:
                request.prefill_left = request.tokens
            if needed > 0:
                self.arena.take(number, needed)
            request.blocks = max(needed, 0) + (idle.blocks if idle else 0)
            self.running_blocks += request.blocks
            if request.admitted_s < 0:
                request.admitted_s = now
                self.results.waits_s.append(now - request.arrival_s)
            self._loading.append(request)

    def prefills(self, now: float) -> bool:
        """Whether a prompt can be computed now; loads that are done join."""
        if any(request.ready_s <= now for request in self._loading):
            self._prefill.extend(request for request in self._loading if request.ready_s <= now)
            self._loading = [request for request in self._loading if request.ready_s > now]
        return bool(self._prefill)

    def iteration_s(self, prefill_tokens: float) -> float:
        """Seconds of an iteration with so many prompt tokens at most; 0 when nothing can run."""
        decoding = len(self._running)
        chunk = self._chunk(prefill_tokens)
        if not decoding and not chunk:
            return 0.0
        context = 0.5 * self._prefill[0].tokens if self._prefill else 0.0
        return self.timing.iteration_s(decoding, self._kv_tokens, chunk, context) + OVERHEAD_S

    def _chunk(self, most: float) -> float:
        total = 0.0
        for request in self._prefill:
            total += request.prefill_left
            if total >= most:
                return most
        return total

    def advance(self, now: float, until: float, iterations: float, prefill_tokens: float, memory: Memory) -> None:
        """Run ``iterations`` of the batch, each with so many prompt tokens at most, between two instants."""
        budget = prefill_tokens * iterations
        self._decoded += iterations
        self._kv_tokens += iterations * len(self._running)
        self._happen(now, until, memory)
        spent = 0.0
        while self._prefill and budget > spent:
            request = self._prefill[0]
            step = min(request.prefill_left, budget - spent)
            request.prefill_left -= step
            spent += step
            if request.prefill_left > 0:
                break
            self._prefill.popleft()
            at = now + (until - now) * min(spent / budget, 1.0)
            if request.first_token_s < 0:
                request.first_token_s = at
            request.began = self._decoded
            request.running = True
            self._running[request.session.number] = request
            self._kv_tokens += request.tokens
            self._schedule(request)

    def _schedule(self, request: Request) -> None:
        """The next instant at which a decoding request needs blocks or ends."""
        grows = request.blocks * BLOCK_TOKENS - request.tokens
        at = request.began + min(float(grows), request.left)
        self._order += 1
        heapq.heappush(self._events, (at, self._order, request.preemptions, request))

    def _happen(self, now: float, until: float, memory: Memory) -> None:
        while self._events and self._events[0][0] <= self._decoded:
            at, _, preemptions, request = heapq.heappop(self._events)
            if not request.running or request.preemptions != preemptions:
                continue
            if at - request.began >= request.left - 1e-9:
                self._finish(request, until)
                continue
            while request.running and self.arena.room() < GROWTH_BLOCKS:
                if memory.find(self, GROWTH_BLOCKS, now):
                    break
                self._preempt()
            if request.running:
                self.arena.take(request.session.number, GROWTH_BLOCKS)
                request.blocks += GROWTH_BLOCKS
                self.running_blocks += GROWTH_BLOCKS
                self._schedule(request)

    def _preempt(self) -> None:
        """The newest decoding request gives up its blocks and starts anew at the head of the queue."""
        number, request = next(reversed(self._running.items()))
        done = min(self._decoded - request.began, request.left)
        self._leave(request)
        self.arena.drop(number)
        request.tokens += int(done)
        request.left = max(request.left - int(done), 1.0)
        request.preemptions += 1
        self.results.preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, request: Request) -> None:
        del self._running[request.session.number]
        request.running = False
        self.running_blocks -= request.blocks
        self._kv_tokens -= request.tokens + min(self._decoded - request.began, request.left)
        if not self._running:
            self._kv_tokens = 0.0

    def _finish(self, request: Request, now: float) -> None:
        session, turn = request.session, request.session.turns[request.turn]
        self._leave(request)
        if self.spec.keeps:
            self.arena.rest(session.number)
            self.idle[session.number] = Idle(request.blocks, request.tokens + int(request.left), now)
        else:
            self.arena.drop(session.number)
        limits, results = self.spec.limits, self.results
        gap_s = (now - request.first_token_s) / max(turn.output_tokens - 1, 1)
        good = (
            request.first_token_s - request.arrival_s <= self._limit_s(request)
            and gap_s <= limits.tpot_s
            and now - request.arrival_s <= limits.completion_s
        )
        results.finished += 1
        results.met += good
        results.tokens += turn.output_tokens
        results.good_tokens += turn.output_tokens if good else 0
        if request.turn + 1 < len(session.turns):
            heapq.heappush(self._coming, (now + turn.think_s, session.number, request.turn + 1, session))

    def end(self, now: float) -> None:
        """Requests still waiting count with their wait so far."""
        for request in self.waiting:
            if request.admitted_s < 0:
                self.results.waits_s.append(now - request.arrival_s)
