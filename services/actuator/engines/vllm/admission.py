"""Which waiting requests vLLM may admit now, and in which order: the fast control's rules on vLLM's own requests.

The rules themselves are ``services.actuator.fast``; the emulated engine runs the same functions.
"""

from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from services.actuator.fast import admission, reservation, running_cap

LOOK_S: Final = 1.0
"""Time between two looks of the running cap."""
RANK_S: Final = 0.25
"""Time between two orderings of the queue: a request that has become late gives way."""
RANK_QUEUE: Final = 500
"""A queue this long is ordered half as often: ordering takes some 5 us a request, between two steps."""
PRIORITY_SCALE: Final = 1e3
"""vLLM's priorities are whole numbers: milliseconds of the rank."""
FIRST: Final = -(2**40)
"""Priority of requests whose client already reads."""
LAST: Final = int(3 * admission.LATE * PRIORITY_SCALE)
"""Priority of what no client waits for."""


class Finished(msgspec.Struct):
    """Moments of what a class's requests produced, output tokens."""

    count: float = 0.0
    mean: float = 0.0
    mean_square: float = 0.0

    def add(self, tokens: int) -> None:
        weight = reservation.weight(self.count)
        self.count += 1
        self.mean += weight * (tokens - self.mean)
        self.mean_square += weight * (tokens * tokens - self.mean_square)


class Admission:
    """State of the fast control of one engine; ``context_tokens`` is the model's limit."""

    def __init__(self, context_tokens: int, block_tokens: int) -> None:
        self.context_tokens = context_tokens
        self.block_tokens = block_tokens
        self.finished = {one: Finished() for one in ServiceClass}
        self.prefill_tokens_per_s = 0.0
        self.gap_s = 0.0
        """Smoothed time between two steps in which something decoded."""
        self.cap = math.inf
        self._looked_s = -math.inf
        self._ranked_s = -math.inf

    def reserved_blocks(self, request: Any, kind: ServiceClass) -> int:
        """Blocks to reckon an admitted request with: its prompt and the output to be expected of it."""
        seen = self.finished[kind]
        produced = request.num_output_tokens
        output = reservation.expected_output_tokens(
            seen.count, seen.mean, seen.mean_square, produced, float(request.max_tokens)
        )
        tokens = min(max(request.num_prompt_tokens + output, request.num_tokens), self.context_tokens)
        blocks: int = math.ceil(tokens / self.block_tokens)
        return blocks

    def first_priority(self, request: Any, kind: ServiceClass) -> int:
        """Of a request that just arrived: by its deadline. With vLLM's 0 it would go before all that are ordered."""
        return as_priority(admission.rank(deadline_s(request, kind), True, False))

    def stepped(self, step_s: float, prompt_tokens: int, decoding: int, waiting: bool) -> None:
        """What one step came to: how long it took, the prompt tokens in it, the requests that decoded."""
        if decoding and step_s > 0:
            self.gap_s = running_cap.smoothed_gap_s(self.gap_s, step_s)
        if waiting and prompt_tokens and step_s > 0:
            self.prefill_tokens_per_s = admission.prefill_rate(self.prefill_tokens_per_s, prompt_tokens / step_s)

    def running_cap(self, now_s: float, ceiling: int, running: int, tpot_s: float) -> int:
        """The cap in force, at most ``ceiling``, at least 1."""
        if now_s - self._looked_s >= LOOK_S:
            self._looked_s = now_s
            self.cap = running_cap.next_cap(min(self.cap, ceiling), ceiling, running, self.gap_s, tpot_s)
        return max(1, int(min(self.cap, ceiling)))

    def order(self, queue: Any, kinds: dict[str, ServiceClass], now_s: float) -> None:
        """Order vLLM's priority queue: who can still be in time first, by deadline; the late behind. ``now_s`` is the
        wall clock, which vLLM's arrival times are in. Requests whose client chose a priority keep it."""
        if not queue or 0.0 <= now_s - self._ranked_s < RANK_S * (1.0 + len(queue) / RANK_QUEUE):
            return
        self._ranked_s = now_s
        queued = getattr(queue, "_heap", queue)  # its iterator pops a copy of the heap, in Python
        waiting = sorted(
            (one for one in queued if one.request_id in kinds), key=lambda one: deadline_s(one, kinds[one.request_id])
        )
        ahead = 0.0
        changed = []
        for request in waiting:
            kind = kinds[request.request_id]
            own = float(request.num_tokens)
            due_s = deadline_s(request, kind)
            first_s = admission.first_token_in_s(ahead, own, self.prefill_tokens_per_s, self.gap_s)
            meets = admission.can_meet(now_s, due_s, first_s)
            priority = as_priority(admission.rank(due_s, meets, request.num_output_tokens > 0))
            ahead += own
            if priority != request.priority:
                changed.append((request, priority))
        if not changed:
            return
        set_priorities(queue, changed)


def set_priorities(queue: Any, changed: list[tuple[Any, int]]) -> None:
    """Give requests of vLLM's queue other priorities: out, changed, in again, as its heap needs it."""
    queue.remove_requests([request for request, _ in changed])
    for request, priority in changed:
        request.priority = priority
        queue.add_request(request)


def deadline_s(request: Any, kind: ServiceClass) -> float:
    """When the class's promise to the request is broken, wall clock seconds."""
    limits: ClassLimits = DEFAULT_LIMITS[kind]
    first_s = limits.ttft_base_s + limits.ttft_per_token_s * request.num_prompt_tokens
    return admission.deadline_s(request.arrival_time, first_s, limits.completion_s)


def as_priority(rank: float) -> int:
    """vLLM's priority, an int64 of which the lowest goes first, for a rank of the fast control in seconds."""
    return FIRST if rank == -math.inf else int(min(rank, 2 * admission.LATE) * PRIORITY_SCALE)
