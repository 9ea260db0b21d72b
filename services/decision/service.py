"""Wiring of the decision service: states in, actions out, policies swapped while it runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from schemas.actions import ACTION_BATCH, OPERATOR_HOLDS, Action, Hold, MaskReason
from schemas.subjects import BUCKET_CONFIG, subject, wildcard
from services.bus import Bus, KvEntry, Message, Subscription
from services.decision.book import KEYS, Book, InForce
from services.decision.commands import Decided, Decider
from services.decision.intake import Admitted, Intake
from services.decision.library import Library
from services.decision.modes import Modes, Standing
from services.decision.settings import Settings
from services.observe import Observe
from services.shell import Shell
from services.spans import NULL_SPAN, Span

log = logging.getLogger(__name__)

__all__ = ["Decision", "Settings", "build"]

CHUNK_MESSAGES = 256
"""Messages decided at once: enough to share numpy's overhead, few enough that the first nodes of a large
step need not wait for the last, and that a chunk's layers stay in the cache."""

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


class Metrics:
    """What decision shows on /metrics."""

    def __init__(self, observe: Observe) -> None:
        counter = observe.counter
        self._batches = counter("batches", "Action batches published")
        self._rejected = counter("rejected", "State messages dropped, by reason", ["reason"])
        self._refused = counter("policies_refused", "Policy pointers that could not be honoured", ["pointer"])
        decided = counter("decisions", "Worker decisions, by action", ["action"])
        masked = counter("masked", "Actions forbidden by the shield, by action and reason", ["action", "reason"])
        self._decided = [decided.labels(action.name.lower()) for action in Action]
        self._masked = masked
        self._orders_refused = counter("orders_refused", "Entries of tg_config that say nothing sensible")
        self._revision = observe.gauge("config_revision", "Newest revision of tg_config that was taken up")
        held = counter("operator_holds", "Worker decisions that an operator's order stands against", ["order"])
        self._held = {hold: held.labels(hold.name.lower()) for hold in OPERATOR_HOLDS}
        self._policy = observe.gauge("policy_info", "1 for the policies in force", ["role", "version"])
        self._latency = observe.histogram(
            "latency_seconds", "From receipt of a state to the publishing of its actions", buckets=LATENCY_BUCKETS
        )

    def reject(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def refuse(self, pointer: str) -> None:
        self._refused.labels(pointer).inc()

    def refuse_order(self) -> None:
        self._orders_refused.inc()

    def configured(self, revision: int) -> None:
        self._revision.set(revision)

    def in_force(self, policies: InForce) -> None:
        self._policy.clear()
        self._policy.labels("acting", policies.acting.version).set(1)
        if policies.former is not None:
            self._policy.labels("former", policies.former.version).set(1)
        if policies.shadow is not None:
            self._policy.labels("shadow", policies.shadow.version).set(1)

    def decided(self, decided: Decided, latency_s: float) -> None:
        self._batches.inc(len(decided.batches))
        for action, count in enumerate(np.bincount(decided.actions, minlength=len(Action)).tolist()):
            self._decided[action].inc(count)
        for action in Action:
            counts = np.bincount(decided.reasons[:, action])
            for reason, count in enumerate(counts.tolist()):
                if reason and count:
                    self._masked.labels(action.name.lower(), MaskReason(reason).name.lower()).inc(count)
        if decided.holds.any():
            for hold, count in enumerate(np.bincount(decided.holds).tolist()):
                if count and hold in self._held:
                    self._held[Hold(hold)].inc(count)
        self._latency.observe(latency_s)


class Orders:
    """Keeps :class:`Modes` up to date with ``tg_config``. While the bus is away, what was known goes on counting
    and orders still expire."""

    def __init__(self, bus: Bus, modes: Modes, metrics: Metrics) -> None:
        self._bus = bus
        self._modes = modes
        self._metrics = metrics
        self._read: set[tuple[str, bytes | None, int]] = set()
        """What :meth:`read` took up and the watch will bring once more."""

    async def read(self) -> None:
        """Take up what stands now. BusError when it cannot be read: who does not know what operators forbade must
        not begin to command."""
        for entry in await self._bus.kv_history(BUCKET_CONFIG):
            self._read.add(entry[:3])
            self._take_up(entry)

    async def follow(self) -> None:
        """Take up every change; runs until cancelled."""
        async for entry in self._bus.kv_watch(BUCKET_CONFIG, ">"):
            if entry[:3] in self._read:
                self._read.discard(entry[:3])
            else:
                self._take_up(entry)

    def _take_up(self, entry: KvEntry) -> None:
        try:
            order = self._modes.enter(entry.key, entry.value, entry.revision)
        except ValueError as error:
            self._metrics.refuse_order()
            log.warning("order refused", extra={"fields": {"key": entry.key, "why": str(error)}})
            return
        self._metrics.configured(entry.revision)
        told = {} if order is None else {"who": order.who, "why": order.why}
        log.info("order taken up", extra={"fields": {"key": entry.key, "revision": entry.revision, **told}})


class Decision:
    """The service. Holds no history: the order of messages, the policies in force and the operators' orders are all
    it knows. ``wall_ns``: the clock that orders expire by."""

    def __init__(self, settings: Settings, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._settings = settings
        self._wall_ns = wall_ns
        self._modes = Modes(settings.mode)
        rng = np.random.default_rng(settings.seed)
        self._rng = rng
        self._book = Book(settings.policy, settings.heuristic, rng)
        self._decider = Decider(settings, rng)
        self._subjects: dict[str, str] = {}
        self._subscription: Subscription | None = None

    async def start(self, shell: Shell) -> None:
        self._shell = shell
        self._metrics = metrics = Metrics(shell.observe)
        self._intake = Intake(metrics.reject)
        metrics.in_force(self._book.in_force)
        library = Library(shell.bus, self._book, self._settings, self._rng, metrics.refuse, metrics.in_force)
        for key in KEYS:
            shell.spawn(library.follow(key), f"policy {key}")
        orders = Orders(shell.bus, self._modes, metrics)
        await orders.read()
        shell.spawn(orders.follow(), "orders")
        self._subscription = await shell.bus.subscribe(wildcard("state"), self._on_batch, queue=self._settings.queue)

    async def stop(self) -> None:
        """Nothing of its own to keep: the bus finishes what was received."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def _on_batch(self, messages: list[Message]) -> None:
        received_ns = self._shell.clock.now_ns()
        for start in range(0, len(messages), CHUNK_MESSAGES):
            await self._answer(messages[start : start + CHUNK_MESSAGES], received_ns)

    async def _answer(self, messages: list[Message], received_ns: int) -> None:
        admitted: list[Admitted] = []
        answered: list[Message] = []
        for message in messages:
            taken = self._intake.take(message.subject, message.data)
            if taken is not None:
                admitted.append(taken)
                answered.append(message)
        if not admitted:
            return
        with ExitStack() as stack:
            spans = [stack.enter_context(self._span(message)) for message in answered]
            decided = self._decider.decide(admitted, self._book.in_force, self._standings(admitted))
            publish = self._shell.bus.publish
            for batch, span in zip(decided.batches, spans, strict=True):
                if span.recording:
                    span.set("tidegate.step", batch.step)
                    span.set("tidegate.workers", len(batch.workers))
                    span.set("tidegate.policy", batch.policy_version)
                await publish(self._subject(batch.node), ACTION_BATCH.encode(batch), span.headers())
        self._metrics.decided(decided, (self._shell.clock.now_ns() - received_ns) / 1e9)

    def _standings(self, admitted: list[Admitted]) -> list[Standing] | None:
        """What counts for each worker; None where nobody ordered anything, which is nearly always."""
        now_ns = self._wall_ns()
        if self._modes.plain(now_ns):
            return None
        workers = [worker for one in admitted for worker in one.batch.workers]
        return self._modes.standings(workers, [kind for one in admitted for kind in one.classes], now_ns)

    def _span(self, message: Message) -> Span:
        """The null span for the many messages that nobody traces: the flag is checked before any work."""
        observe = self._shell.observe
        if not observe.tracing and not message.headers:
            return NULL_SPAN
        return observe.span("decide", kind="consumer", parent=message.headers or {}, subject=message.subject)

    def _subject(self, node: str) -> str:
        known = self._subjects.get(node)
        if known is None:
            known = self._subjects[node] = subject("action", node)
        return known


def build(settings: Settings) -> Decision:
    """The service of these settings; SettingsError for a policy or class that there is not."""
    return Decision(settings)
