"""What moves between the card and host memory, and what an engine has done so far: evictions, loads, counters."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm import SamplingParams
from vllm.v1.request import Request

from schemas.engine import Evict, Failure, Prefetch, Receipt, ReplyBody
from services.actuator.engines.vllm import labels

if TYPE_CHECKING:
    from services.actuator.engines.vllm.steward import Steward

KEPT: Final = 64
"""Receipts remembered for who asks again."""


class Load(msgspec.Struct):
    """Sessions on their way back for one action."""

    requests: set[str]
    receipt: Receipt


class Counters(msgspec.Struct):
    """Since the engine's start."""

    finished: int = 0
    rejected: int = 0
    context_tokens: float = 0.0
    context_tokens_sq: float = 0.0
    output_tokens: int = 0
    prompt_tokens: int = 0
    recomputed_tokens: int = 0
    evicted_bytes: int = 0
    loaded_bytes: int = 0


class Traffic:
    """Of one engine."""

    def __init__(self, steward: Steward) -> None:
        self._steward = steward
        self.counters = Counters()
        self._loads: dict[str, Load] = {}
        self._done: dict[str, Receipt] = {}
        self._number = 0
        self._busy_s = time.monotonic()
        self._last_step_s = 0.0

    def scheduled(self, now_s: float, prompt_tokens: int, decoding: int, waiting: bool) -> None:
        """A step was scheduled: the time since the one before is what that one took, if it had work."""
        if decoding:
            if self._last_step_s:
                step_s = now_s - self._last_step_s
                self._steward.admission.stepped(now_s, step_s, prompt_tokens, decoding, waiting)
            self._busy_s = now_s
        self._last_step_s = now_s if decoding else 0.0

    def finished(self, request: Any, reason: str) -> None:
        """A client's request ended."""
        counters = self.counters
        tokens = float(request.num_tokens)
        if reason in ("stop", "length", "repetition"):
            counters.finished += 1
            counters.context_tokens += tokens
            counters.context_tokens_sq += tokens * tokens
        else:
            counters.rejected += 1
        counters.output_tokens += request.num_output_tokens
        counters.prompt_tokens += request.num_prompt_tokens

    def quiet_s(self, now_s: float) -> float:
        """Since when nothing ran or waited, 0 while something does."""
        scheduler = self._steward.scheduler
        return 0.0 if scheduler.running or scheduler.waiting else max(now_s - self._busy_s, 0.0)

    def evict(self, order: Evict) -> ReplyBody:
        """Drop idle blocks from the card that host memory has, of the sessions named or of who is quiet longest. What
        has no copy yet stays: it would have to be computed again, which nobody asked for."""
        steward = self._steward
        if steward.offloaded is None:
            return Failure("unsupported", "no host tier: start vLLM with Tidegate's KV offloading")
        known = steward.sessions.known
        unknown = [number for number in order.sessions if number not in known]
        if unknown:
            return Failure("unknown_session", numbers={"session": float(unknown[0]), "unknown": float(len(unknown))})
        chosen = [known[number] for number in order.sessions] or list(known.values())
        most = order.bytes // steward.block_bytes if not order.sessions else steward.pool.size_blocks
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
        return self._keep(said)

    def prefetch(self, order: Prefetch) -> ReplyBody:
        """Ask the engine for one token of each session's context: the connector loads what the card lacks, and it
        idles there afterwards. Done when the last of these requests is."""
        steward, core = self._steward, self._steward.core
        if steward.offloaded is None:
            return Failure("unsupported", "no host tier: start vLLM with Tidegate's KV offloading")
        known = steward.sessions.known
        unknown = [number for number in order.sessions if number not in known]
        if unknown:
            return Failure("unknown_session", numbers={"session": float(unknown[0]), "unknown": float(len(unknown))})
        started: set[str] = set()
        size = 0
        for number in dict.fromkeys(order.sessions):
            session = known[number]
            blocks = steward.missing(session)
            if session.turns or not blocks or not len(session.tokens):
                continue
            self._number += 1
            request_id = f"{labels.PREFETCH}{self._number}"
            # One token more than the context: a prompt that is cached whole would have its last block computed again.
            tokens = [*session.tokens.tolist(), int(session.tokens[-1])][: steward.scheduler.max_model_len - 1]  # type: ignore[attr-defined]
            request = Request(
                request_id,
                tokens,
                SamplingParams(max_tokens=1, temperature=0.0, detokenize=False),
                None,
                block_hasher=core.request_block_hasher,
            )
            steward.scheduler.add_request(request)
            started.add(request_id)
            size += blocks * steward.block_bytes
        said = msgspec.structs.replace(
            steward.receipt(order.action_id), done=not started, prefetched_bytes=size if started else 0
        )
        if not started:
            return self._keep(said)
        self._loads[order.action_id] = Load(started, said)
        return said

    def fetched(self, request: Any) -> None:
        """One of those requests ended."""
        for action_id, load in list(self._loads.items()):
            load.requests.discard(request.request_id)
            if not load.requests:
                del self._loads[action_id]
                self.counters.loaded_bytes += load.receipt.prefetched_bytes
                self._keep(msgspec.structs.replace(load.receipt, done=True))

    def receipt_of(self, action_id: str) -> Receipt | None:
        load = self._loads.get(action_id)
        return load.receipt if load is not None else self._done.get(action_id)

    def _keep(self, said: Receipt) -> Receipt:
        self._done[said.action_id] = said
        while len(self._done) > KEPT:
            del self._done[next(iter(self._done))]
        return said
