"""The actuator's wiring: ActionBatch in, engines over their sockets, OutcomeBatch out, audit beside."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from prometheus_client import Histogram

from schemas.actions import ACTION_BATCH, ActionBatch, Columns, columns_of
from schemas.codec import DecodeError
from schemas.outcomes import OUTCOME_BATCH
from schemas.subjects import subject, wildcard
from services.actuator.audit import AuditTrail
from services.actuator.cold_weights import ColdWeightSettings
from services.actuator.effects import EffectSettings
from services.actuator.engines import emulated
from services.actuator.engines.connecting import Connector, EngineSettings, check_engines
from services.actuator.engines.loopback import LoopbackEngine
from services.actuator.engines.observed import ObservedEngine
from services.actuator.engines.protocol import Engine
from services.actuator.leases import Orders
from services.actuator.measures import Counts, Latencies, MovementMetrics
from services.actuator.memory.receipts import Ledger
from services.actuator.steps import NodeSteps
from services.bus.api import Message, Subscription
from services.errors import SettingsError
from services.shell import Shell

log = logging.getLogger(__name__)

LATENCY_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table ``[actuator]``, variables ``TIDEGATE_ACTUATOR_<KEY>``."""

    node: str = ""
    """The node whose engines this process commands; empty: see ``nodes``."""
    nodes: tuple[str, ...] = ()
    """Several nodes in one process (emulation). Loopback engines need none: they are there for every node."""
    engine: Literal["socket", "loopback", "observed"] = "socket"
    """``socket``: engines behind Unix sockets; ``loopback``: engines inside this process that accept all;
    ``observed``: servers that are only watched, whatever sockets there are."""
    observe: bool = False
    """With ``socket``: a worker that has none is one that is only watched, not an unknown one."""
    sockets: str = "/run/tidegate/{node}"
    """Folder with the node's engine sockets ``<gpu>-<name>.sock``; ``{node}`` stands for the node's name."""
    engines: tuple[EngineSettings, ...] = ()
    """What single engines can beside their sockets: tables ``[[actuator.engines]]``; as JSON in a variable or after
    ``--set engines=``."""
    engine_timeout_s: Annotated[float, msgspec.Meta(gt=0.0, le=60.0)] = 1.0
    """How long an engine may take to answer, seconds: half a step, so that a silent engine does not cost its
    neighbours theirs."""
    audit_backlog: Annotated[int, msgspec.Meta(ge=1)] = 20_000
    """Audit records that may wait for the stream, messages; more are lost and counted as gaps."""
    audit_max_age_s: Annotated[float, msgspec.Meta(gt=0.0)] = 7 * 86_400.0
    """How long the audit stream keeps records, seconds."""
    audit_max_bytes: Annotated[int, msgspec.Meta(ge=1_000_000)] = 1 << 30
    """How much it keeps, bytes."""
    latency_file: str = ""
    """File that receives the newest latencies from a sample's time to the receipt of its action at the end:
    float64 milliseconds in NumPy's format, for benchmarks with loopback engines; empty: none."""
    effects: EffectSettings = EffectSettings()
    """What an action moves."""
    cold_weights: ColdWeightSettings = ColdWeightSettings()
    """When an idle model's weights leave their card."""

    def __post_init__(self) -> None:
        check_engines(self.engines)

    def all_nodes(self) -> tuple[str, ...]:
        """Every node named, each once."""
        return tuple(dict.fromkeys(((self.node,) if self.node else ()) + self.nodes))


class _Node:
    """A node's steps and the newest batch that waits for them: whatever it replaces is late anyway."""

    def __init__(self, name: str, steps: NodeSteps) -> None:
        self.steps = steps
        self.outcome_subject = subject("outcome", name)
        self.waiting: tuple[ActionBatch, Columns, Message] | None = None
        self.arrived = asyncio.Event()
        self.idle = asyncio.Event()
        self.idle.set()


class ActuatorService:
    """One task per node with real engines; loopback engines are served in the callback itself."""

    def __init__(self, settings: Settings) -> None:
        if settings.engine != "loopback" and not settings.all_nodes():
            raise SettingsError("settings [actuator]", "node", "nothing", "the node whose engines to command")
        self._settings = settings
        self._nodes: dict[str, _Node] = {}
        self._orders = Orders()
        self._subscriptions: list[Subscription] = []
        self._latency: Histogram | None = None
        self._stopping = False
        self._quiet = asyncio.Event()
        """No callback is at work."""
        self._quiet.set()
        self.counts = Counts()
        self.ledger = Ledger()
        """What the movements of all nodes came to."""
        self.latencies = Latencies()

    async def start(self, shell: Shell) -> None:
        """Describe the engines that are there and rebuild the card accounts, then listen."""
        self._shell = shell
        settings = self._settings
        self._connector = Connector(settings.engines, settings.engine_timeout_s, shell.clock)
        self._latency = shell.observe.histogram(
            "telemetry_to_action_seconds",
            "from a sample's time to the receipt of its action, the slowest of those taken together; loopback engines",
            buckets=LATENCY_BUCKETS_S,
        )
        self._audit = AuditTrail(
            shell.bus,
            backlog=settings.audit_backlog,
            max_age_s=settings.audit_max_age_s,
            max_bytes=settings.audit_max_bytes,
        )
        shell.observe.counters_from("events", self._events)
        self._movements = MovementMetrics(shell.observe)
        for name in settings.all_nodes():
            node = self._node(name)
            if settings.engine == "socket":
                silent = await node.steps.rebuild(emulated.workers_in(self._folder(name), name))
                for worker in silent:
                    log.warning("engine does not answer", extra={"fields": {"worker": worker}})
            if settings.engine != "loopback":
                shell.spawn(self._run(node), f"actuate-{name}")
        shell.spawn(self._audit.run(), "audit")
        names = settings.all_nodes()
        subjects = [subject("action", name) for name in names] if names else [wildcard("action")]
        for one in subjects:
            self._subscriptions.append(await shell.bus.subscribe(one, self._on_batch))

    async def stop(self) -> None:
        """Take nothing new, finish the steps under way, hand over the audit."""
        self._stopping = True
        await self._quiet.wait()  # unsubscribing at once would cut a callback in the middle of a step
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        for node in self._nodes.values():
            await node.idle.wait()
        await self._audit.flush(1.0)
        for node in self._nodes.values():
            await node.steps.close()
        await self._connector.close()
        if self._settings.latency_file:
            _write(Path(self._settings.latency_file), self.latencies)

    def _events(self) -> Mapping[str, int]:
        steps = [node.steps for node in self._nodes.values()]
        return {
            **msgspec.structs.asdict(self.counts),
            "audit_stored": self._audit.stored,
            "audit_gaps": self._audit.gaps,
            "over_quota": sum(one.over_quota for one in steps),
            "changed_quota": sum(one.changed_quota for one in steps),
            **{f"kvcached_{name}": count for name, count in msgspec.structs.asdict(self._connector.kvcached).items()},
        }

    def _folder(self, node: str) -> Path:
        return Path(self._settings.sockets.replace("{node}", node))

    def _node(self, name: str) -> _Node:
        node = self._nodes.get(name)
        if node is None:
            steps = NodeSteps(
                name,
                lambda worker: self._engine(name, worker),
                self._settings.effects,
                ledger=self.ledger,
                cold=self._settings.cold_weights,
            )
            node = self._nodes[name] = _Node(name, steps)
        return node

    def _engine(self, node: str, worker: str) -> Engine | None:
        if self._settings.engine == "loopback":
            return LoopbackEngine(worker)
        folder = self._folder(node)
        if self._settings.engine == "observed" or not emulated.socket_path(folder, worker).exists():
            watched = self._settings.engine == "observed" or self._settings.observe
            return ObservedEngine(worker, self._shell.clock.now_ns) if watched else None
        return self._connector.connect(folder, worker)

    async def _on_batch(self, messages: list[Message]) -> None:
        self._quiet.clear()
        try:
            await self._take(messages)
        finally:
            self._quiet.set()

    async def _take(self, messages: list[Message]) -> None:
        loopback = self._settings.engine == "loopback"
        known = self._settings.all_nodes()
        slowest_ms = 0.0
        for message in messages:
            if self._stopping:
                return
            try:
                batch = ACTION_BATCH.decode(message.data)
                columns = columns_of(batch)
            except DecodeError:
                self.counts.decode_errors += 1
                continue
            if loopback:  # only there is the node's clock for certain this machine's monotonic one
                latency_ms = (self._shell.clock.now_ns() - batch.t_ns) * 1e-6
                self.latencies.add(latency_ms)
                slowest_ms = max(slowest_ms, latency_ms)
            if known and batch.node not in known:
                self.counts.foreign += 1
            elif not self._orders.admit(batch.node, batch.boot_id, batch.step):
                self.counts.duplicates += 1
            elif loopback:
                await self._handle(self._node(batch.node), batch, columns, message)
            else:
                node = self._node(batch.node)
                self.counts.superseded += node.waiting is not None
                node.waiting = (batch, columns, message)
                node.idle.clear()
                node.arrived.set()
        if slowest_ms and self._latency is not None:
            self._latency.observe(slowest_ms * 1e-3)

    async def _run(self, node: _Node) -> None:
        while True:
            await node.arrived.wait()
            node.arrived.clear()
            while node.waiting is not None:
                (batch, columns, message), node.waiting = node.waiting, None
                await self._handle(node, batch, columns, message)
            node.idle.set()

    async def _handle(self, node: _Node, batch: ActionBatch, columns: Columns, message: Message) -> None:
        observe, bus = self._shell.observe, self._shell.bus
        with observe.span("actuate", kind="consumer", parent=message.headers, subject=message.subject) as span:
            if span.recording:
                span.set("tidegate.node", batch.node)
                span.set("tidegate.step", batch.step)
            outcomes = await node.steps.execute(batch, columns, span)
            data = OUTCOME_BATCH.encode(outcomes)
            await bus.publish(node.outcome_subject, data, span.headers())
        self._audit.add(outcomes, message.data, data)
        self.counts.batches += 1
        self.counts.outcomes(outcomes)
        if outcomes.effects:
            self._movements.show(self.ledger)


def _write(path: Path, latencies: Latencies) -> None:
    """All or nothing: the reader may look at any moment."""
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".npy", delete=False) as part:
        np.save(part, latencies.values_ms())
    os.replace(part.name, path)


def build(settings: Settings) -> ActuatorService:
    """The service for ``runtime.main``."""
    return ActuatorService(settings)
