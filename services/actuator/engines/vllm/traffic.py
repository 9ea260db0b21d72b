"""What moves between the card and host memory, and what an engine has done so far: evictions, loads, counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from schemas.engine import Evict, Failure, Prefetch, Receipt, ReplyBody
from services.actuator.engines.vllm import labels
from services.actuator.engines.vllm.admission import LAST
from services.actuator.engines.vllm.sessions import Session

if TYPE_CHECKING:
    from services.actuator.engines.vllm.steward import Steward

COMPLETE: Final = ("stop", "length", "repetition")
"""What vLLM calls the end of a request that was not cut."""
LOAD_S: Final = 10.0
"""How long a load may wait to be admitted and to arrive; then whoever it was meant for is there, or will not be."""


class Load(msgspec.Struct):
    """Sessions on their way back for one action."""

    requests: dict[str, int]
    """Bytes of each request that has not ended."""
    sessions: set[int]
    receipt: Receipt
    """As it was begun."""
    until_s: float
    arrived_bytes: int = 0
    given_up: int = 0


class Counters(msgspec.Struct):
    """Since the engine's start."""

    finished: int = 0
    rejected: int = 0
    context_tokens: float = 0.0
    context_tokens_sq: float = 0.0
    evicted_bytes: int = 0
    loaded_bytes: int = 0


class Traffic:
    """Of one engine."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self.counters = Counters()
        self._loads: dict[str, Load] = {}
        self._number = 0
        self._busy_s = time.monotonic()
        self._last: tuple[float, int, int, bool] | None = None
        """The step before: when it was scheduled, its prompt tokens, requests that decoded, whether others waited."""

    def scheduled(self, now_s: float, prompt_tokens: int, decoding: int, waiting: bool) -> None:
        """A step was scheduled: the time since the one before is what that one took, if both had work."""
        if not prompt_tokens and not decoding:
            self._last = None
            return
        if self._last is not None:
            since_s, prompt_before, decoding_before, waiting_before = self._last
            self._steward.admission.stepped(now_s - since_s, prompt_before, decoding_before, waiting_before)
        self._last = now_s, prompt_tokens, decoding, waiting
        self._busy_s = now_s

    def finished(self, request: Any, reason: str) -> None:
        """A client's request ended."""
        counters = self.counters
        tokens = float(request.num_tokens)
        if reason in COMPLETE:
            counters.finished += 1
            counters.context_tokens += tokens
            counters.context_tokens_sq += tokens * tokens
        else:
            counters.rejected += 1

    def quiet_s(self, now_s: float) -> float:
        """Since when nothing ran or waited, 0 while something does."""
        scheduler = self._steward.scheduler
        busy = scheduler.running or scheduler.waiting or scheduler.kv_holding_waiting
        return 0.0 if busy else max(now_s - self._busy_s, 0.0)

    def evict(self, order: Evict) -> ReplyBody:
        """Drop idle blocks from the card that host memory has, of the sessions named or of who is quiet longest. What
        has no copy yet stays: it would have to be computed again, which nobody asked for."""
        steward = self._steward
        refused = self._refusal(order.sessions)
        if refused is not None:
            return refused
        known = steward.sessions.known
        if order.sessions:
            chosen = [known[number] for number in dict.fromkeys(order.sessions)]
            most = steward.pool.size_blocks
        else:
            chosen = [one for one in known.values() if one.idle_blocks]
            most = order.bytes // steward.block_bytes
        numbers: set[int] = set()
        uncopied = 0
        for block_hash in steward.sessions.leaving(chosen):
            if len(numbers) >= most:
                break
            (block,) = steward.pool.get_cached_block(block_hash, [0]) or (None,)
            if block is None or block.ref_cnt > 0:
                continue
            if steward.copied(block_hash):
                numbers.add(block.block_id)
            else:
                uncopied += 1
        steward.pool.evict_blocks(numbers)
        size = len(numbers) * steward.block_bytes
        self.counters.evicted_bytes += size
        detail = f"{uncopied} blocks have no copy in host memory yet" if uncopied else ""
        said = msgspec.structs.replace(steward.receipt(order.action_id), evicted_bytes=size, detail=detail)
        return steward.receipts.keep(said)

    def prefetch(self, order: Prefetch) -> ReplyBody:
        """Ask the engine for one token of each session's context: the connector loads what the card lacks, and it
        idles there afterwards. Done when the last of these requests is."""
        steward = self._steward
        refused = self._refusal(order.sessions)
        if refused is not None:
            return refused
        if steward.scheduler.pause_state.value:
            return Failure("busy", "the engine is paused or asleep: it would load nothing before it goes on")
        on_their_way = {number for load in self._loads.values() for number in load.sessions}
        started: dict[str, int] = {}
        loading: set[int] = set()
        for number in dict.fromkeys(order.sessions):
            session = steward.sessions.known[number]
            if session.turns or not len(session.tokens) or number in on_their_way:
                continue
            blocks = steward.missing(session)
            if not blocks:
                continue
            request = self._one_token(session)
            if not same_prefix(steward.chain_of(request), session.chain):
                continue  # an adapter, images, a salt: the tokens alone would be computed, and be of no use to it
            steward.scheduler.add_request(request)
            started[request.request_id] = blocks * steward.block_bytes
            loading.add(number)
        said = msgspec.structs.replace(
            steward.receipt(order.action_id), done=not started, prefetched_bytes=sum(started.values())
        )
        if not started:
            return steward.receipts.keep(said)
        self._loads[order.action_id] = Load(started, loading, said, time.monotonic() + LOAD_S)
        return said

    def fetched(self, request: Any) -> None:
        """One of those requests ended."""
        for action_id, load in list(self._loads.items()):
            size = load.requests.pop(request.request_id, 0)
            if str(request.get_finished_reason()) in COMPLETE:
                load.arrived_bytes += size
                self.counters.loaded_bytes += size
            elif size:
                load.given_up += 1
            if not load.requests:
                del self._loads[action_id]
                detail = f"{load.given_up} sessions did not arrive within {LOAD_S:g} s" if load.given_up else ""
                self._steward.receipts.keep(
                    msgspec.structs.replace(load.receipt, done=True, prefetched_bytes=load.arrived_bytes, detail=detail)
                )

    def drop_late(self, now_s: float) -> None:
        """End loads that were not admitted, or did not arrive, in time: vLLM calls :meth:`fetched` for each."""
        for load in [one for one in self._loads.values() if now_s >= one.until_s]:
            self._steward.scheduler.finish_requests(set(load.requests), RequestStatus.FINISHED_ABORTED)

    def under_way(self, action_id: str) -> Receipt | None:
        """As a load was begun that has not ended."""
        load = self._loads.get(action_id)
        return load.receipt if load is not None else None

    def _refusal(self, sessions: Sequence[int]) -> Failure | None:
        steward = self._steward
        if steward.offloaded is None:
            return Failure("unsupported", "no host tier: start vLLM with Tidegate's KV offloading")
        unknown = [number for number in sessions if number not in steward.sessions.known]
        if unknown:
            return Failure("unknown_session", numbers={"session": float(unknown[0]), "unknown": float(len(unknown))})
        return None

    def _one_token(self, session: Session) -> Request:
        """A request for one token after the conversation's context; behind everybody whom a client waits for."""
        steward = self._steward
        self._number += 1
        # One token more than the context: a prompt that is cached whole would have its last block computed again.
        tokens = [*session.tokens.tolist(), int(session.tokens[-1])][: steward.scheduler.max_model_len - 1]
        return Request(
            f"{labels.PREFETCH}{self._number}",
            tokens,
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
            None,
            priority=LAST,
            block_hasher=steward.core.request_block_hasher,
        )


def same_prefix(hashes: Sequence[bytes], chain: Sequence[bytes]) -> bool:
    """Whether a prompt of these block hashes finds what a conversation of this chain holds, as far as it goes."""
    return all(one == other for one, other in zip(hashes, chain, strict=False))
