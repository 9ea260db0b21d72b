"""Tidegate inside EngineCore: keeps one engine's quota and leases and steers its scheduler by them.

Everything here runs in vLLM's engine loop, between two steps, one call at a time; commands come by ``commands``. When
nobody commands any more the quota's lease runs out at the next step and rho is 1.0 again, whatever became of actuator
and bus. Before the first command that changes anything vLLM admits whom it always did,
under priority scheduling in the order of their deadlines.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.endings import Ending, ending_of
from schemas.engine import Failure, Receipt, SetQuota
from services.actuator.engines.quota import Quota, QuotaLimits
from services.actuator.engines.vllm import labels
from services.actuator.engines.vllm.admission import Admission, set_priorities
from services.actuator.engines.vllm.compaction import Compaction
from services.actuator.engines.vllm.offload import Offloaded
from services.actuator.engines.vllm.pool import BoundedPool, block_bytes_of
from services.actuator.engines.vllm.receipts import Receipts
from services.actuator.engines.vllm.sessions import Session, Sessions
from services.actuator.engines.vllm.settings import PluginSettings
from services.actuator.engines.vllm.traffic import Traffic
from services.actuator.memory.geometry import Geometry

WATERMARK_SHARE: Final = 0.3
"""Share of a bound below the pool's size that admission leaves free for those who run: without it nearly every
growing request preempts another."""
GROUP_BYTES: Final = 2 << 20
"""Of one layer's K, or V, in a page group (DESIGN section 1)."""
RECKON_S: Final = 0.25
"""How long a reservation stands: it grows by less than a block, and 256 of them take half a millisecond."""


class Steward:
    """Of one scheduler, made by it once it is complete."""

    def __init__(self, scheduler: Any, settings: PluginSettings) -> None:
        self.scheduler = scheduler
        self.settings = settings
        self.core: Any = None
        """The EngineCore, known from the first call on."""
        manager = scheduler.kv_cache_manager
        self.pool = BoundedPool.adopt(manager.block_pool)
        self.block_tokens = int(scheduler.block_size)
        self._hashes_per_block = self.block_tokens // int(scheduler.hash_block_size)
        config = scheduler.kv_cache_config
        self.block_bytes = block_bytes_of(config)
        self.geometry = Geometry(self.block_bytes, *self._groups(config))
        groups = manager.coordinator.single_type_managers
        self.floor_bytes = (sum(-(-scheduler.max_model_len // one.block_size) for one in groups) + 1) * self.block_bytes
        capacity = settings.card_kv_bytes or self.pool.size_blocks * self.block_bytes
        self.quota = Quota(
            QuotaLimits(
                q0_bytes=int(capacity * settings.q0_share),
                capacity_bytes=capacity,
                rho_max=settings.rho_max,
                max_running_start=min(256, scheduler.max_num_running_reqs),
                hard_limit_bytes=self.pool.size_blocks * self.block_bytes,
                keeps_pool=True,
            )
        )
        self.offloaded = Offloaded.of(scheduler)
        held = self.pool.size_blocks + (self.offloaded.capacity_bytes // self.block_bytes if self.offloaded else 0)
        self.sessions = Sessions(self.block_bytes, self.block_tokens, blocks_most=2 * held)
        self.pool.watcher = self.sessions
        self.admission = Admission(scheduler.max_model_len, self.block_tokens)
        self.receipts = Receipts()
        self.compaction = Compaction(self)
        self.traffic = Traffic(self)
        self.priorities = scheduler.policy.value == "priority"
        """Whether vLLM's queue goes by priorities, which are Tidegate's then where the client chose none."""
        self._watermark = manager.watermark_blocks
        self.kinds: dict[str, ServiceClass] = {}
        """Class of each request under way whose priority is ours to set."""
        self._sessions_of: dict[str, Session] = {}
        self._gate_blocks: int | None = None
        """What admission has left in this step; None until somebody asks."""
        self._reckoned: dict[str, int] = {}
        self._reckoned_s = 0.0
        self.gate_closed = False
        self._held_out: set[str] = set()
        self.preemptions = 0
        self._most_active = int(scheduler.max_num_active_reqs)
        self.running_cap = self._most_active

    def before_step(self) -> None:
        """Put in force what this step is to run under."""
        scheduler, now_ns = self.scheduler, time.monotonic_ns()
        now_s = now_ns * 1e-9
        self._held_out.clear()
        self.quota.expire(now_ns)
        self._bind()
        self._preempt_beyond_bound(now_s)
        self.traffic.drop_late(now_s)
        self._gate_blocks, self.gate_closed = None, False
        if self.quota.generation > 0:
            kind = self.settings.service_class
            cap = self.admission.running_cap(
                now_s, self.quota.max_running, len(scheduler.running), DEFAULT_LIMITS[kind].tpot_s
            )
            self.running_cap = scheduler.max_num_active_reqs = min(cap, self._most_active)
        if self.priorities:
            self.admission.order(scheduler.waiting, self.kinds, time.time())

    def after_schedule(self, output: Any) -> None:
        """Count what the step that was just scheduled does. A request's last chunk is prompt too, and vLLM counts what
        it scheduled as computed already."""
        scheduled, prompt, decoding = output.num_scheduled_tokens, 0, 0
        for request in self.scheduler.running:
            tokens = scheduled.get(request.request_id)
            if tokens is None:
                continue
            if request.num_computed_tokens - tokens < request.num_prompt_tokens:
                prompt += tokens
            else:
                decoding += 1
        self.traffic.scheduled(time.monotonic(), prompt, decoding, bool(self.scheduler.waiting))

    def holds_out(self, request: Any) -> bool:
        """Whether the request was preempted for this very step."""
        return request.request_id in self._held_out

    def may_admit(self, request: Any) -> bool:
        """Whether a request that vLLM would admit may enter in this step; once one may not, nobody behind it may, so
        that small requests do not starve a large one. Who holds KV already (loaded, or a session that streams) is
        reckoned with already and goes on: the others may wait for its end."""
        scheduler = self.scheduler
        if self.quota.generation == 0 or scheduler._holds_kv_blocks(request):
            return True
        if self.gate_closed:
            return False
        if self._gate_blocks is None:
            self._gate_blocks = self.quota.soft_bytes // self.block_bytes - self.all_reserved_blocks(time.monotonic())
        need = self.reserved_blocks(request)
        alone = not scheduler.running and not scheduler.kv_holding_waiting
        if need > self._gate_blocks and not alone:
            if request.request_id.startswith(labels.PREFETCH):
                return False  # no client waits for it
            self.gate_closed = True
            scheduler.max_num_active_reqs = 0  # vLLM's loop ends here instead of asking for everybody
            return False
        self._gate_blocks -= need
        return True

    def arrived(self, request: Any) -> None:
        """A request is about to enter the queue."""
        if request.request_id.startswith(labels.PREFETCH):
            return
        kind, name = labels.parse(request.session_id, self.settings.service_class)
        if self.priorities and request.priority == 0:
            self.kinds[request.request_id] = kind
            request.priority = self.admission.first_priority(request, kind)
        session = self.sessions.started(name, self.chain_of(request), kind, time.monotonic())
        self._sessions_of[request.request_id] = session

    def ended(self, request: Any) -> None:
        """A request ended, its blocks still its own."""
        self.kinds.pop(request.request_id, None)
        session = self._sessions_of.pop(request.request_id, None)
        if session is None:
            self.traffic.fetched(request)
            return
        # Ahead of the device vLLM counts tokens as computed that are not there yet, and some that never will be.
        computed = request.num_computed_tokens - request.num_output_placeholders
        full = max(min(computed, request.num_tokens), 0) // self.block_tokens
        reason = request.get_finished_reason()
        # vLLM's engine says "stop" of a tool call too, so a stop says nothing of who is next.
        ending = ending_of(str(reason)) if str(reason) != "stop" else Ending.UNKNOWN
        if chain := self.chain_of(request)[:full]:
            kept = full * self.block_tokens if self.offloaded is not None else 0
            tokens = labels.token_array(request.all_token_ids, kept)
            self.sessions.finished(session, chain, tokens, time.monotonic(), ending)
        else:
            self.sessions.abandoned(session, time.monotonic())
        kind = ServiceClass(session.kind)
        self.traffic.finished(request, str(reason))
        if ending is not Ending.CUT:
            self.admission.finished[kind].add(request.num_output_tokens)

    def reserved_blocks(self, request: Any) -> int:
        session = self._sessions_of.get(request.request_id)
        kind = ServiceClass(session.kind) if session is not None else self.settings.service_class
        return self.admission.reserved_blocks(request, kind)

    def all_reserved_blocks(self, now_s: float) -> int:
        """Of everybody who was admitted and has not ended; each is reckoned anew every RECKON_S."""
        if now_s - self._reckoned_s >= RECKON_S:
            self._reckoned, self._reckoned_s = {}, now_s
        total, reckoned = 0, self._reckoned
        for request in (*self.scheduler.running, *self.scheduler.kv_holding_waiting):
            blocks = reckoned.get(request.request_id)
            if blocks is None:
                blocks = reckoned[request.request_id] = self.reserved_blocks(request)
            total += blocks
        return total

    def chain_of(self, request: Any) -> Sequence[bytes]:
        """Hash of each full block; vLLM may hash finer than its blocks, and each hash stands for the whole prefix."""
        hashes: Sequence[bytes] = request.block_hashes
        each = self._hashes_per_block
        return hashes if each == 1 else hashes[each - 1 :: each]

    def release(self) -> None:
        """Let vLLM go on as if Tidegate were not there: bound, watermark, running cap and priorities are its own
        again."""
        scheduler = self.scheduler
        self.pool.release()
        scheduler.kv_cache_manager.watermark_blocks = self._watermark
        scheduler.max_num_active_reqs = self._most_active
        for request in scheduler.running:
            if request.request_id in self.kinds:
                request.priority = 0
        for queue in (scheduler.waiting, scheduler.kv_holding_waiting):
            set_priorities(queue, [(one, 0) for one in queue if one.request_id in self.kinds])

    @property
    def mapped_bytes(self) -> int:
        """Blocks that hold anything; a stock vLLM has the rest of its pool committed all the same."""
        return (self.pool.live_blocks + len(self.pool.idle)) * self.block_bytes

    @property
    def hard_bytes(self) -> int:
        """The hard quota, as far as the pool goes."""
        return min(self.quota.hard_bytes, self.pool.size_blocks * self.block_bytes)

    def receipt(self, action_id: str) -> Receipt:
        """Of a command that is in force."""
        quota = self.quota
        return Receipt(
            action_id, True, quota.generation, quota.rho, quota.soft_bytes, self.hard_bytes, quota.max_running,
            self.mapped_bytes,
        )  # fmt: skip

    def set_quota(self, command: SetQuota, now_ns: int) -> Receipt | Failure:
        """In force from now on, also for who runs; a Failure says why not."""
        failure = self.quota.set_quota(command, now_ns, self.floor_bytes)
        if failure is not None:
            return failure
        self._bind()
        return self.receipt(command.action_id)

    def _bind(self) -> None:
        bound = self.hard_bytes // self.block_bytes
        if bound != self.pool.bound_blocks:
            self.pool.bind(bound)
            capped = bound < self.pool.size_blocks
            watermark = int(WATERMARK_SHARE * bound) if capped else 0
            self.scheduler.kv_cache_manager.watermark_blocks = max(self._watermark, watermark)

    def _preempt_beyond_bound(self, now_s: float) -> None:
        """The newest running requests, or as in vLLM itself those of the lowest priority, give way until the rest
        fits; the last one stays: it fits alone, the bound is at least the floor. Who is preempted waits for a later
        step: resumed in the same one it would kill vLLM."""
        scheduler = self.scheduler
        while self.pool.live_blocks > self.pool.bound_blocks and len(scheduler.running) > 1:
            victim = scheduler.running[-1]
            if self.priorities:
                victim = max(scheduler.running, key=lambda one: (one.priority, one.arrival_time))
            if not scheduler._request_blocks_can_be_freed(victim):
                return
            scheduler.running.remove(victim)
            scheduler._preempt_request(victim, now_s, drop_stale_output=scheduler.requires_kv_delivery)
            self._held_out.add(victim.request_id)

    def _groups(self, config: Any) -> tuple[int, int]:
        """(blocks a page group, page groups)."""
        per_layer = self.block_bytes // max(sum(len(one.layer_names) for one in config.kv_cache_groups), 1)
        blocks = self.settings.group_blocks or max(2 * GROUP_BYTES // max(per_layer, 1), 1)
        return blocks, -(-config.num_blocks // blocks)

    def copied(self, block_hash: bytes) -> bool:
        """Whether host memory has a whole copy of the block."""
        return self.offloaded is not None and self.offloaded.has(block_hash)

    def missing(self, session: Session) -> int:
        """Blocks of a conversation that only host memory has."""
        pool = self.pool
        absent = [one for one in session.chain if pool.get_cached_block(one, [0]) is None]
        return sum(map(self.copied, absent))
