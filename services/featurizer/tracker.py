"""Tracker: samples in, states out; the only holder of history.

Everything is done for all workers of a drained batch at once: rows of many nodes in one set of arrays. A
sample is a duplicate, older than what is known, or a step forward; forward it moves its workers' windows. A
new boot, a clock that jumps, a counter that went back or a starting engine begin the windows anew, and the
worker is held until they are full again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, Hold
from schemas.codec import DecodeError, fit_columns
from schemas.identity import STEP_NS
from schemas.metrics import COLUMN, METRICS
from schemas.telemetry import NodeSample, metrics_of
from services.featurizer import features, kernels, reward, window
from services.featurizer.roster import MAX_NUMBER, Layout, Node, Roster
from services.featurizer.validate import Counts, check

_ROW_BYTES: Final = 8 * len(METRICS)


class TrackerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much past the featurizer holds."""

    window_steps: int = 30
    """Length of the long window, steps, 1 or more: 60 s."""
    forget_steps: int = 60
    """Steps after which a worker that its node no longer lists is forgotten, 1 or more."""
    max_workers: int = 131_072
    """Workers that are followed at most; each takes about 4 KB. Samples beyond are counted and dropped."""


class Span(NamedTuple):
    """The rows of one node's sample in a :class:`States`."""

    node: Node
    sample: NodeSample
    layout: Layout
    start: int
    stop: int


class States(NamedTuple):
    """The states of some nodes, at most one sample each, rows in the order of ``spans``."""

    spans: list[Span]
    rows: NDArray[np.int64]
    """int64 [n]: the tracker's row of each worker."""
    steps: NDArray[np.int64]
    features: NDArray[np.float32]
    """float32 [n, FEATURE_COUNT]; NaN = absent."""
    holds: NDArray[np.uint8]
    classes: NDArray[np.int64]
    generations: NDArray[np.int64]
    rewards: NDArray[np.float32]
    """float32 [n, REWARD_PARTS]: of the step that ended with this sample; NaN where there is none."""
    fresh: NDArray[np.int64]
    """Rows that were given to new workers: what others keep of them is no longer true."""


class Tracker:
    """History of all workers. Not thread-safe; does no I/O."""

    def __init__(
        self,
        settings: TrackerSettings | None = None,
        rewards: reward.RewardSettings | None = None,
    ) -> None:
        self.settings = settings or TrackerSettings()
        self.rewards = rewards or reward.RewardSettings()
        self.counts: Counts = {}
        """Events by (reason, metric); metric is empty where the reason concerns a whole sample or worker."""
        self._roster = Roster(self.settings.max_workers)
        self._windows = window.Windows(self.settings.window_steps)
        self._capacity = 0
        self._generations = np.empty(0, np.int64)
        self._executed = np.empty((0, ACTION_COUNT), np.int64)

    @property
    def capacity(self) -> int:
        """Rows are below this number."""
        return self._capacity

    @property
    def workers(self) -> int:
        return self._roster.workers

    @property
    def nodes(self) -> int:
        return len(self._roster.nodes)

    def node(self, name: str) -> Node | None:
        return self._roster.nodes.get(name)

    def observe(self, sample: NodeSample, metrics: NDArray[np.float64] | None = None, now_ns: int = 0) -> States | None:
        """One node's sample; None when it is ignored. ``metrics`` stands for the sample's bytes where given."""
        states = self.observe_many([sample], [metrics], now_ns)
        return states[0] if states else None

    def observe_many(
        self,
        samples: Sequence[NodeSample],
        metrics: Sequence[NDArray[np.float64] | None] | None = None,
        now_ns: int = 0,
    ) -> list[States]:
        """All samples of a drained batch, in order: one States for each round of at most one sample a node.

        ``metrics``: float64 [workers, len(METRICS)] per sample, None where the sample's bytes hold them;
        ``now_ns``: the caller's clock, for :meth:`forget_silent`. Never raises for what a sample says.
        """
        given: Sequence[NDArray[np.float64] | None] = metrics if metrics is not None else [None] * len(samples)
        out: list[States] = []
        pending = list(zip(samples, given, strict=True))
        while pending:
            taken: set[str] = set()
            later: list[tuple[NodeSample, NDArray[np.float64] | None]] = []
            accepted: list[tuple[Node, NodeSample, Layout, NDArray[np.float64] | bytes]] = []
            fresh: list[int] = []
            anew: list[NDArray[np.int64]] = []
            for pair in pending:
                sample = pair[0]
                if sample.node in taken:
                    later.append(pair)
                    continue
                taken.add(sample.node)
                known = self._accept(sample, pair[1], now_ns, fresh, anew)
                if known is not None:
                    accepted.append(known)
            if accepted:
                out.append(self._advance(accepted, fresh, anew))
            pending = later
        return out

    def executed(
        self, node: str, actions: Sequence[int] | NDArray[np.integer], step: int, workers: Sequence[str] | None = None
    ) -> None:
        """Actions that were executed in a step, for the steps since each; of the node's listed workers in
        order unless ``workers`` names others. Unknown ones are passed over."""
        known = self._roster.nodes.get(node)
        if known is None or known.layout is None:
            return
        named = known.layout.workers if workers is None else workers
        places = [(known.rows[w], int(a)) for w, a in zip(named, actions, strict=True) if w in known.rows]
        self.executed_rows(
            np.array([row for row, _ in places], np.int64), np.array([a for _, a in places], np.int64), step
        )

    def executed_rows(
        self, rows: NDArray[np.int64], actions: NDArray[np.int64], steps: int | NDArray[np.int64]
    ) -> None:
        """As :meth:`executed`, by rows; actions 0 to 4."""
        self._executed[rows, actions] = steps

    def forget_silent(self, before_ns: int) -> list[str]:
        """Forget nodes whose last sample came before ``before_ns``; their names."""
        return self._roster.forget_nodes(before_ns)

    def _accept(
        self,
        sample: NodeSample,
        metrics: NDArray[np.float64] | None,
        now_ns: int,
        fresh: list[int],
        anew: list[NDArray[np.int64]],
    ) -> tuple[Node, NodeSample, Layout, NDArray[np.float64] | bytes] | None:
        """Order, shape and rows of one sample; None and a count when it is ignored."""
        known = self._roster.nodes.get(sample.node)
        fault = _order_fault(sample, known) or self._shape_fault(sample, known)
        if fault:
            self._count(fault)
            return None
        table: NDArray[np.float64] | bytes = sample.metrics
        if metrics is not None:
            if metrics.ndim != 2 or len(metrics) != len(sample.workers):
                raise ValueError(f"metrics of shape {metrics.shape} for {len(sample.workers)} workers")
            table = fit_columns(metrics, len(METRICS))
        elif len(sample.metrics) != _ROW_BYTES * len(sample.workers):
            try:
                table = metrics_of(sample)
            except DecodeError as error:
                self._count(error.reason)
                return None
        node = known or self._roster.node(sample.node)
        layout = node.layout
        if layout is None or not layout.same(sample.workers, sample.cards, sample.classes):
            layout, new = self._roster.lay_out(node, sample.workers, sample.cards, sample.classes, sample.step)
            self._grow()
            if new:
                self._clear(np.array(new, np.int64))
                fresh.extend(new)
        self._follow(node, sample, anew)
        node.seen_ns = now_ns
        if node.gone:
            self._count("forgotten", self._roster.forget_gone(node, sample.step, self.settings.forget_steps))
        return node, sample, layout, table

    def _shape_fault(self, sample: NodeSample, known: Node | None) -> str:
        """Why the sample's lists cannot be taken; empty when they can."""
        layout = known.layout if known is not None else None
        if layout is not None and layout.same(sample.workers, sample.cards, sample.classes):
            return ""
        workers = sample.workers
        if not len(workers) == len(sample.cards) == len(sample.classes):
            return "bad_shape"
        if len(set(workers)) != len(workers) or "" in workers:
            return "repeated_worker"
        if known is None and not workers:
            return "no_workers"
        listed = known.rows if known is not None else {}
        if not self._roster.room_for(sum(worker not in listed for worker in workers)):
            return "too_many_workers"
        return ""

    def _follow(self, node: Node, sample: NodeSample, anew: list[NDArray[np.int64]]) -> None:
        """Move the node's order and clock forward; its workers begin anew where time is not continuous."""
        if sample.boot_id != node.boot_id:
            if node.boot_id >= 0:
                self._count("new_boot")
                self._rebase(node, sample.step)
                node.gone = dict.fromkeys(node.gone, sample.step)
                anew.append(node.all_rows())
            node.boot_id, node.outcome_step, node.t0_ns = sample.boot_id, -1, sample.t_ns
        else:
            gap = sample.step - node.step
            passed = sample.t_ns - node.t_ns
            if gap > 1:
                self._count("lost_steps", gap - 1)
            if passed <= 0 or passed > max(window.MAX_GAP_STEPS, 2 * gap) * STEP_NS:
                self._count("clock_jump")
                anew.append(node.all_rows())
        node.step, node.t_ns = sample.step, sample.t_ns

    def _rebase(self, node: Node, step: int) -> None:
        """Keep the steps since each action where a new boot counts its steps from the beginning."""
        if step <= node.step and node.rows:
            rows = node.all_rows()
            since = self._executed[rows]
            self._executed[rows] = np.where(since == kernels.NEVER, since, since + (step - node.step - 1))

    def _advance(
        self,
        accepted: list[tuple[Node, NodeSample, Layout, NDArray[np.float64] | bytes]],
        fresh: list[int],
        anew: list[NDArray[np.int64]],
    ) -> States:
        """One step of all accepted nodes."""
        spans: list[Span] = []
        start = card_count = 0
        offsets: list[int] = []
        sizes: list[int] = []
        for node, sample, layout, _ in accepted:
            size = len(layout.rows)
            spans.append(Span(node, sample, layout, start, start + size))
            offsets.append(card_count)
            sizes.append(size)
            start += size
            card_count += layout.card_count
        rows = np.concatenate([span.layout.rows for span in spans])
        classes = np.concatenate([span.layout.class_numbers for span in spans])
        cards = np.concatenate([span.layout.local_cards for span in spans])
        cards += np.array(offsets, np.int64).repeat(sizes)
        steps = np.array([span.sample.step for span in spans], np.int64).repeat(sizes)
        t_s = np.array([(span.sample.t_ns - span.node.t0_ns) / 1e9 for span in spans]).repeat(sizes)
        metrics = _stack([a[3] for a in accepted], start)
        values, rejected, starting, odd = check(metrics, classes, cards, card_count, self.counts)
        if anew:
            self._windows.restart(np.concatenate(anew))
        moved = self._windows.advance(values, rows, steps, t_s, rejected, starting)
        self._count("counter_reset", moved.resets)
        holds = moved.filling * np.uint8(Hold.WINDOW_FILLING)
        generation = values[:, COLUMN["generation"]]
        if odd:
            holds[rejected] = Hold.SAMPLE_REJECTED
            holds[starting] = Hold.ENGINE_STARTING
            said = ~np.isnan(generation)
            self._generations[rows[said]] = generation[said]
        else:
            self._generations[rows] = generation
        return States(
            spans=spans,
            rows=rows,
            steps=steps,
            features=features.build(values, moved.windows, cards, card_count, classes, rows, steps, self._executed),
            holds=holds,
            classes=classes,
            generations=self._generations[rows],
            rewards=reward.card_rewards(
                moved.gained,
                values.take(reward.GAUGE_COLUMNS, axis=1),
                cards,
                card_count,
                moved.dt_s,
                self.rewards,
            ),
            fresh=np.array(fresh, np.int64),
        )

    def _clear(self, rows: NDArray[np.int64]) -> None:
        self._windows.clear(rows)
        self._generations[rows] = 0
        self._executed[rows] = kernels.NEVER

    def _grow(self) -> None:
        more = self._roster.capacity - self._capacity
        if more <= 0:
            return
        self._windows.grow(self._roster.capacity)
        self._generations = np.concatenate((self._generations, np.zeros(more, np.int64)))
        self._executed = np.concatenate((self._executed, np.full((more, ACTION_COUNT), kernels.NEVER)))
        self._capacity = self._roster.capacity

    def _count(self, reason: str, number: int = 1) -> None:
        if number:
            self.counts[reason, ""] = self.counts.get((reason, ""), 0) + number


def _order_fault(sample: NodeSample, known: Node | None) -> str:
    """Why the sample is not news; empty when it is."""
    boot_id, step = sample.boot_id, sample.step
    if not (0 <= boot_id < MAX_NUMBER and 0 <= step < MAX_NUMBER and -MAX_NUMBER < sample.t_ns < MAX_NUMBER):
        return "bad_order"
    if known is None or (boot_id, step) > known.order:
        return ""
    return "duplicate" if (boot_id, step) == known.order else "older"


def _stack(tables: list[NDArray[np.float64] | bytes], rows: int) -> NDArray[np.float64]:
    """float64 [rows, len(METRICS)], C-ordered and writable (the only kind that the kernels take), of all tables;
    joined as bytes, which is one copy for the whole batch."""
    if len(tables) == 1 and not isinstance(tables[0], bytes):
        return np.require(tables[0], np.float64, ["C", "A", "W"])
    joined = bytearray().join(table if isinstance(table, bytes) else table.astype("<f8").tobytes() for table in tables)
    return np.frombuffer(joined, "<f8").reshape(rows, len(METRICS))
