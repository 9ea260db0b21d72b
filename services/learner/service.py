"""Wiring of the learner: TG_TRANSITIONS in, candidates to ``tg_weights`` and ``tg_policy`` out.

The event loop fetches, acknowledges and publishes; everything that computes runs in one thread of its own.
A fetch is acknowledged when its rows are in the replay; what that means after a kill is told in ``checkpoint``.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch

from schemas.features import FEATURE_HASH
from schemas.policies import KEY_CANDIDATE, KEY_CHAMPION, PolicyPointer
from schemas.subjects import BUCKET_POLICY, BUCKET_WEIGHTS, STREAM_SUBJECTS, STREAM_TRANSITIONS
from services.bus import Bus, Delivery, PullConsumer
from services.clock import Clock
from services.errors import BusError, Conflict, PolicyError
from services.learner import checkpoint
from services.learner.intake import Taken
from services.learner.measures import Measures
from services.learner.settings import Settings
from services.learner.training import Candidate, Learned, Trainer
from services.observe import Observe
from services.qnet import QNet, digest
from services.shell import Shell
from services.spans import TRACEPARENT

__all__ = ["KEY_LINEAGE", "LearnerService", "Settings", "build"]

KEY_LINEAGE: Final = "learner-stream"
"""Entry of ``tg_policy`` that names this life of the stream: it vanishes with the server's store, as the stream
does, and then the sequence in a checkpoint means nothing any more."""
MAX_LINKS: Final = 128

log = logging.getLogger(__name__)
T = TypeVar("T")


class LearnerService:
    """One learner; there is one a system. ``wall_ns``: the clock by which rows are too old and candidates dated."""

    def __init__(self, settings: Settings, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self.settings = settings
        self._wall_ns = wall_ns
        self._stopping = threading.Event()
        self._queue: asyncio.Queue[Sequence[Delivery]] = asyncio.Queue(settings.queue_fetches)
        self._folder = Path(settings.checkpoint_dir) if settings.checkpoint_dir else None
        self._pending: Candidate | None = None
        self._lineage = ""
        self._checkpoint_due_ns = 0
        self._bus: Bus
        self._clock: Clock
        self._observe: Observe
        self._measures: Measures
        self._executor: ThreadPoolExecutor
        self._consumer: PullConsumer
        self.trainer: Trainer
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, shell: Shell) -> None:
        """Restore, bind the consumer where the checkpoint ends, begin to fetch and learn."""
        self._bus, self._clock, self._observe = shell.bus, shell.clock, shell.observe
        self._measures = Measures(shell.observe)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="learner")
        # One thread: the services share few cores, and at these sizes more would only wait for each other.
        await self._in_thread(lambda: torch.set_num_threads(1))
        await self._bus.ensure_stream(
            STREAM_TRANSITIONS,
            STREAM_SUBJECTS[STREAM_TRANSITIONS],
            max_age_s=self.settings.stream_max_age_s,
            max_bytes=self.settings.stream_max_bytes,
        )
        self._lineage = await self._find_lineage(f"{shell.instance}-{self._clock.now_ns():x}")
        start, parent = await self._champion()
        sequence = await self._in_thread(lambda: self._restore(start, parent))
        self._consumer = await self._bus.pull_consumer(
            STREAM_TRANSITIONS, self.settings.durable, start_sequence=sequence
        )
        log.info(
            "learning from the stream",
            extra={"fields": {"sequence": sequence, "transitions": self.trainer.transitions}},
        )
        self._checkpoint_due_ns = self._clock.now_ns() + int(self.settings.checkpoint_every_s * 1e9)
        self._tasks = [shell.spawn(self._fetch(), "fetch"), shell.spawn(self._learn(), "learn")]

    async def stop(self) -> None:
        """Finish the gradient step in hand and write a checkpoint; what was fetched and not taken in comes again."""
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._in_thread(self._save)
        await self._consumer.stop()
        self._executor.shutdown(wait=True)

    async def _fetch(self) -> None:
        while not self._stopping.is_set():
            # An empty fetch goes on too: it is when waiting candidates and checkpoints have their turn.
            fetched = await self._consumer.fetch(self.settings.fetch_messages, self.settings.fetch_timeout_s)
            await self._queue.put(fetched)

    async def _learn(self) -> None:
        while not self._stopping.is_set():
            deliveries = await self._queue.get()
            self._measures.queued.set(self._queue.qsize())
            if deliveries:
                await self._work(deliveries)
            elif self._clock.now_ns() >= self._checkpoint_due_ns:
                await self._in_thread(self._save)
            await self._publish()

    async def _work(self, deliveries: Sequence[Delivery]) -> None:
        links: list[Mapping[str, str]] = []
        if self._observe.tracing:
            links = [d.headers for d in deliveries if d.headers and TRACEPARENT in d.headers][:MAX_LINKS]
        with self._observe.span("learn", kind="consumer", links=links) as span:
            taken = await self._in_thread(lambda: self._ingest_in_thread(deliveries))
            try:
                await self._consumer.ack(deliveries)
            except BusError as error:  # they come again, are recognised as duplicates and acknowledged then
                log.warning("not acknowledged", extra={"fields": {"messages": len(deliveries), "error": str(error)}})
            learned, candidate = await self._in_thread(self._learn_in_thread)
            if span.recording:
                span.set("messaging.batch.message_count", len(deliveries))
                span.set("tidegate.transitions", taken.fresh)
                span.set("tidegate.updates", learned.updates)
        self._measures.note(taken, learned, self.trainer)
        self._pending = candidate or self._pending

    def _ingest_in_thread(self, deliveries: Sequence[Delivery]) -> Taken:
        self.trainer.intake.now_ns = self._wall_ns()
        return self.trainer.ingest(deliveries)

    def _learn_in_thread(self) -> tuple[Learned, Candidate | None]:
        with self._measures.learn_seconds.time():
            learned = self.trainer.learn(self._stopping.is_set)
        candidate = None
        if self.trainer.candidate_due:
            try:
                candidate = self.trainer.make_candidate()
            except PolicyError as error:
                self._measures.candidates.labels("unfit").inc()
                log.error("candidate not published", extra={"fields": {"error": str(error)}})
        if candidate is not None or self._clock.now_ns() >= self._checkpoint_due_ns:
            self._save()  # before the candidate: what is published can be gone on from
        return learned, candidate

    async def _publish(self) -> None:
        """The object first, then the pointer; while the bus is away the newest candidate waits."""
        candidate = self._pending
        if candidate is None:
            return
        pointer = PolicyPointer(
            version=candidate.version,
            kind="dqn",
            sha256=candidate.sha256,
            parent=candidate.parent,
            feature_hash=FEATURE_HASH,
            transitions=candidate.transitions,
            created_ns=self._wall_ns(),
        )
        try:
            await self._bus.object_put(BUCKET_WEIGHTS, candidate.version, candidate.data)
            await self._bus.kv_put(BUCKET_POLICY, KEY_CANDIDATE, msgspec.json.encode(pointer))
        except BusError as error:
            self._measures.candidates.labels("delayed").inc()
            log.warning("candidate waits", extra={"fields": {"version": candidate.version, "error": str(error)}})
            return
        self._pending = None
        self._measures.candidates.labels("published").inc()
        log.info("candidate", extra={"fields": {"version": candidate.version, "parent": candidate.parent}})

    async def _find_lineage(self, fresh: str) -> str:
        entry = await self._bus.kv_get(BUCKET_POLICY, KEY_LINEAGE)
        if entry is None or entry.value is None:
            try:
                await self._bus.kv_put(BUCKET_POLICY, KEY_LINEAGE, fresh.encode(), revision=0)
            except Conflict:  # somebody was quicker: theirs counts
                entry = await self._bus.kv_get(BUCKET_POLICY, KEY_LINEAGE)
            else:
                return fresh
        return entry.value.decode(errors="replace") if entry is not None and entry.value else fresh

    async def _champion(self) -> tuple[QNet | None, str]:
        """Weights and version of a DQN champion of the same shape, (None, "") without one."""
        if not self.settings.start_from_champion:
            return None, ""
        entry = await self._bus.kv_get(BUCKET_POLICY, KEY_CHAMPION)
        if entry is None or entry.value is None:
            return None, ""
        try:
            pointer = msgspec.json.decode(entry.value, type=PolicyPointer)
            if pointer.kind != "dqn" or pointer.feature_hash != FEATURE_HASH:
                return None, ""
            data = await self._bus.object_get(BUCKET_WEIGHTS, pointer.version)
            if data is None or digest(data) != pointer.sha256:
                raise PolicyError(f"champion {pointer.version!r}: no object with sha256 {pointer.sha256[:12]}")
            net = QNet.load(data)
        except (msgspec.DecodeError, PolicyError) as error:
            log.warning("champion not taken as a start", extra={"fields": {"error": str(error)}})
            return None, ""
        same = net.sizes == tuple(self.settings.hidden)
        return (net, pointer.version) if same else (None, "")

    def _restore(self, start: QNet | None, parent: str) -> int:
        """Make the trainer from the newest usable checkpoint; the stream sequence to read from."""
        if self._folder is not None:
            found = checkpoint.load(self._folder)
            for reason in found.refused:
                self._measures.checkpoints.labels("refused").inc()
                log.error("checkpoint refused, the one before it is used", extra={"fields": {"reason": reason}})
            for usable in found.usable:
                trainer = Trainer(self.settings)
                try:
                    sequence = trainer.restore(usable, self._lineage)
                except PolicyError as error:
                    self._measures.checkpoints.labels("refused").inc()
                    log.error("checkpoint does not fit", extra={"fields": {"reason": str(error)}})
                    continue
                self.trainer = trainer
                return sequence
        self.trainer = Trainer(self.settings, start=start, parent=parent)
        return 1

    def _save(self) -> None:
        self._checkpoint_due_ns = self._clock.now_ns() + int(self.settings.checkpoint_every_s * 1e9)
        if self._folder is None:
            return
        try:
            checkpoint.save(self._folder, self.trainer.checkpoint(self._lineage))
        except OSError as error:  # the one before it is still there
            self._measures.checkpoints.labels("failed").inc()
            log.error("checkpoint not written", extra={"fields": {"error": str(error)}})
        else:
            self._measures.checkpoints.labels("written").inc()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def build(settings: Settings) -> LearnerService:
    """The service; starts nothing."""
    return LearnerService(settings)
