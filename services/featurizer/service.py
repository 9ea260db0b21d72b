"""Wiring of the featurizer: samples in, states out; samples and outcomes in, transitions out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TypeVar

import msgspec
import numpy as np

from schemas.codec import Codec, DecodeError, pack
from schemas.features import FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION
from schemas.metrics import METRICS
from schemas.outcomes import OUTCOME_BATCH
from schemas.states import STATE_BATCH, StateBatch
from schemas.subjects import STREAM_SUBJECTS, STREAM_TRANSITIONS, Family, subject, wildcard
from schemas.telemetry import NODE_SAMPLE, NodeSample
from schemas.transitions import TRANSITION_BATCH, TransitionBatch
from services.bus import Message, Subscription
from services.featurizer.measures import Measures
from services.featurizer.settings import Settings
from services.featurizer.tracker import States, Tracker, TrackerSettings
from services.featurizer.transitions import Transitions
from services.shell import Shell
from services.spans import NULL_SPAN, Span

__all__ = ["Featurizer", "Settings", "build"]

CHUNK_MESSAGES = 256
"""Messages worked on at once: enough to share numpy's overhead, few enough to stay in the cache and to let
the first nodes of a large step go on early."""

_OUTCOME_STEPS_KEPT = 3
T = TypeVar("T", bound=msgspec.Struct)


class Featurizer:
    """The service; the only one that knows the past, so there is one for a node's samples."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tracker = Tracker(settings.tracker, settings.rewards)
        self._pairs = Transitions(self._tracker)
        self._subjects: dict[tuple[Family, str], str] = {}
        self._traces: dict[str, dict[int, Mapping[str, str]]] = {}
        """Headers of the last outcomes, by node and step: a transition belongs to the trace of its action."""
        self._subscriptions: list[Subscription] = []
        self._swept_ns = 0

    async def start(self, shell: Shell) -> None:
        self._shell = shell
        self._measures = Measures(shell.observe)
        self._swept_ns = shell.clock.now_ns()
        if self._settings.transitions:
            await shell.bus.ensure_stream(
                STREAM_TRANSITIONS,
                STREAM_SUBJECTS[STREAM_TRANSITIONS],
                max_age_s=self._settings.stream_max_age_s,
                max_bytes=self._settings.stream_max_bytes,
            )
        _warm()
        queue = self._settings.queue
        self._subscriptions = [
            await shell.bus.subscribe(wildcard("outcome"), self._on_outcomes, queue=queue),
            await shell.bus.subscribe(wildcard("telemetry"), self._on_samples, queue=queue),
        ]

    async def stop(self) -> None:
        """Take nothing new; hand over the transitions of what was received."""
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self._shell.bus.flush_stream(1.0)

    async def _on_samples(self, messages: list[Message]) -> None:
        received_ns = self._shell.clock.now_ns()
        for start in range(0, len(messages), CHUNK_MESSAGES):
            await self._sampled(messages[start : start + CHUNK_MESSAGES], received_ns)
        self._forget(received_ns)

    async def _sampled(self, messages: list[Message], received_ns: int) -> None:
        samples: list[NodeSample] = []
        spans: dict[int, Span] = {}
        with ExitStack() as stack:
            for message in messages:
                sample = self._decode(NODE_SAMPLE, "telemetry", message)
                if sample is not None:
                    samples.append(sample)
                    span = self._span("featurize", message)
                    if span is not NULL_SPAN:
                        spans[id(sample)] = stack.enter_context(span)
            rounds = self._tracker.observe_many(samples, now_ns=received_ns)
            for states in rounds:
                await self._publish_states(states, spans)
        latency_s = (self._shell.clock.now_ns() - received_ns) / 1e9
        for states in rounds:
            await self._publish_transitions(self._pairs.sampled(states))
        self._measures.sampled(rounds, self._tracker.nodes, self._tracker.workers, latency_s)
        self._measures.drain(self._tracker.counts, self._pairs.counts)

    async def _publish_states(self, states: States, spans: Mapping[int, Span]) -> None:
        features = pack(states.features, "<f4")
        width = 4 * FEATURE_COUNT
        holds, generations = states.holds.tolist(), states.generations.tolist()
        publish = self._shell.bus.publish
        for node, sample, _, start, stop in states.spans:
            batch = StateBatch(
                sample.node,
                sample.boot_id,
                sample.step,
                SCHEMA_VERSION,
                sample.t_ns,
                FEATURE_HASH,
                sample.workers,
                sample.classes,
                tuple(holds[start:stop]),
                tuple(generations[start:stop]),
                features[start * width : stop * width],
            )
            span = spans.get(id(sample), NULL_SPAN)
            if span.recording:
                span.set("tidegate.step", sample.step)
                span.set("tidegate.workers", stop - start)
                span.set("tidegate.held", int(np.count_nonzero(states.holds[start:stop])))
            await publish(self._subject("state", node.name), STATE_BATCH.encode(batch), span.headers())

    async def _on_outcomes(self, messages: list[Message]) -> None:
        for start in range(0, len(messages), CHUNK_MESSAGES):
            outcomes = []
            for message in messages[start : start + CHUNK_MESSAGES]:
                outcome = self._decode(OUTCOME_BATCH, "outcome", message)
                if outcome is not None:
                    outcomes.append(outcome)
                    if message.headers and self._tracker.node(outcome.node) is not None:
                        self._remember(outcome.node, outcome.step, message.headers)
            await self._publish_transitions(self._pairs.executed(outcomes))
        self._measures.drain(self._tracker.counts, self._pairs.counts)

    async def _publish_transitions(self, batches: list[TransitionBatch]) -> None:
        observe = self._shell.observe
        published = 0
        for batch in batches if self._settings.transitions else ():
            target = self._subject("transition", batch.node)
            parent = self._traces.get(batch.node, {}).get(batch.step) if self._traces else None
            span: Span = NULL_SPAN
            if parent is not None or observe.tracing:
                span = observe.span("transition", kind="producer", parent=parent or {}, subject=target)
            with span:
                if span.recording:
                    span.set("tidegate.step", batch.step)
                    span.set("tidegate.workers", len(batch.workers))
                await self._shell.bus.publish_stream(
                    target,
                    TRANSITION_BATCH.encode(batch),
                    message_id=f"{batch.node}:{batch.boot_id}:{batch.step}",
                    headers=span.headers(),
                )
            published += len(batch.workers)
        self._measures.transitions(published)

    def _decode(self, codec: Codec[T], family: Family, message: Message) -> T | None:
        """None and a count for bytes that are no such message, or one that came on another node's subject."""
        try:
            decoded = codec.decode(message.data)
        except DecodeError as error:
            self._measures.reject(family, error.reason)
            return None
        node: str = decoded.node  # type: ignore[attr-defined]  # all messages of these families have it
        try:
            expected = self._subject(family, node)
        except ValueError:
            expected = ""
        if message.subject != expected:
            self._subjects.pop((family, node), None)
            self._measures.reject(family, "wrong_subject")
            return None
        return decoded

    def _remember(self, node: str, step: int, headers: Mapping[str, str]) -> None:
        kept = self._traces.setdefault(node, {})
        kept[step] = headers
        if len(kept) > _OUTCOME_STEPS_KEPT:
            del kept[next(iter(kept))]

    def _span(self, name: str, message: Message) -> Span:
        """The null span for the many messages that nobody traces: the flag is checked before any work."""
        observe = self._shell.observe
        if not observe.tracing and not message.headers:
            return NULL_SPAN
        return observe.span(name, kind="consumer", parent=message.headers or {}, subject=message.subject)

    def _forget(self, now_ns: int) -> None:
        """Forget nodes that fell silent; looked for ten times as often as they may take."""
        after_ns = int(self._settings.forget_nodes_s * 1e9)
        if now_ns - self._swept_ns < after_ns // 10:
            return
        self._swept_ns = now_ns
        silent = self._tracker.forget_silent(now_ns - after_ns)
        self._pairs.forget(silent)
        for node in silent:
            self._traces.pop(node, None)
            families: tuple[Family, ...] = ("telemetry", "outcome", "state", "transition")
            for family in families:
                self._subjects.pop((family, node), None)

    def _subject(self, family: Family, node: str) -> str:
        known = self._subjects.get((family, node))
        if known is None:
            known = self._subjects[family, node] = subject(family, node)
        return known


def _warm() -> None:
    """Run every kernel once, so that the first real sample does not pay for loading them."""
    metrics = np.zeros((1, len(METRICS)))
    sample = NodeSample("warm", 1, 0, SCHEMA_VERSION, 0, ("warm/0/w0",), (0,), (0,), b"")
    Tracker(TrackerSettings(window_steps=1)).observe(sample, metrics)


def build(settings: Settings) -> Featurizer:
    """The service of these settings."""
    return Featurizer(settings)
