"""From stream messages to rows of the replay, vectorised over all messages of a fetch.

Messages are decoded one by one; their rows are then checked and stored together. Only where one node comes
more than once in a fetch do its messages go in turns, because a row's predecessor must be stored before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.codec import DecodeError
from schemas.features import FEATURE_COUNT
from schemas.subjects import subject
from schemas.transitions import REWARD_PARTS, TRANSITION_BATCH, TransitionBatch
from services.bus import Delivery
from services.learner import risk, validation
from services.learner.replay_buffer import ReplayBuffer, Rows
from services.learner.settings import Settings
from services.learner.shares import Shares
from services.learner.trajectories import Trajectories
from services.learner.validation import Fault

_SUBJECT_CACHE = 65_536


class Taken(msgspec.Struct, frozen=True):
    """What became of a fetch."""

    fresh: int
    """Rows accepted that were never learned from."""
    rows: Counter[str]
    """Rows by result: ``accepted``, ``again`` (accepted only to fill the replay after a restart) or the
    lower-case name of a Fault."""
    messages: Counter[str]
    """Messages by result: ``ok`` or why the whole message was dropped."""


class _Part(msgspec.Struct, frozen=True):
    batch: TransitionBatch
    slots: NDArray[np.int64]
    sequence: int


class Intake:
    """Replay, trajectories, and the stream sequence up to which messages went in."""

    def __init__(self, settings: Settings) -> None:
        self.replay = ReplayBuffer(settings.capacity_rows, FEATURE_COUNT, alpha=settings.alpha)
        self.trajectories = Trajectories(settings.max_workers)
        self.now_ns = 0
        """Wall clock, which the owner keeps; 0: unknown, and then no row is too old."""
        self.sequence = 0
        """Greatest stream sequence taken in, whether its message was good or not."""
        self.learned_until = 0
        """Rows up to this sequence were learned from by an earlier process: they fill the replay, no more."""
        self._gamma = np.float32(settings.gamma)
        self._objective = REWARD_PARTS.index(settings.objective)
        self._bounds = validation.Bounds(reward_low=settings.reward_low, reward_high=settings.reward_high)
        self._ages = settings.max_age_s, settings.max_ahead_s
        self._shares = Shares(settings.capacity_rows, settings.worker_share)
        self._subjects: dict[str, str] = {}

    def ingest(self, deliveries: Sequence[Delivery]) -> Taken:
        """Take in a fetch. Bad messages and rows are counted, never raised."""
        rows: Counter[str] = Counter()
        messages: Counter[str] = Counter()
        turns: list[list[_Part]] = []
        turn_of: dict[str, int] = {}
        for delivery in deliveries:
            part = self._open(delivery, messages)
            if part is None or not part.batch.workers:
                continue
            turn = turn_of.get(part.batch.node, 0)
            turn_of[part.batch.node] = turn + 1
            if turn == len(turns):
                turns.append([])
            turns[turn].append(part)
        fresh = 0
        for parts in turns:
            for some in _within(parts, self.replay.capacity):
                fresh += self._store(some, rows)
        if deliveries:
            self.sequence = max(self.sequence, max(d.stream_sequence for d in deliveries))
        return Taken(fresh, rows, messages)

    def _open(self, delivery: Delivery, messages: Counter[str]) -> _Part | None:
        try:
            batch = TRANSITION_BATCH.decode(delivery.data)
        except DecodeError as error:
            messages[error.reason] += 1
            return None
        fault = validation.message_fault(batch)
        slots: NDArray[np.int64] | None = None
        if not fault:
            if len(batch.workers) > self.replay.capacity:
                fault = "too_large"
            elif not batch.node or delivery.subject != self._subject(batch.node):
                fault = "identity"
            else:
                slots = self.trajectories.slots(batch.node, batch.workers)
                fault = "" if slots is not None else "identity"
        messages[fault or "ok"] += 1
        return None if slots is None else _Part(batch, slots, delivery.stream_sequence)

    def _store(self, parts: Sequence[_Part], rows: Counter[str]) -> int:
        """Check and insert the rows of messages of different nodes; the number of fresh ones."""
        batches = [part.batch for part in parts]
        counts = [part.slots.size for part in parts]
        slots = np.concatenate([part.slots for part in parts])
        boots = np.repeat(np.array([b.boot_id for b in batches], np.int64), counts)
        steps = np.repeat(np.array([b.step for b in batches], np.int64), counts)
        sequences = np.repeat(np.array([part.sequence for part in parts], np.int64), counts)
        columns = validation.gather(batches)
        faults = validation.row_faults(columns, self._objective, self._bounds)
        newer, same = self.trajectories.compare(slots, boots, steps)
        good = faults == Fault.NONE
        faults[good & ~newer] = Fault.STALE
        faults[good & same] = Fault.DUPLICATE
        ages = np.repeat(np.array([self._age(batch) for batch in batches], np.uint8), counts)
        faults[ages != Fault.NONE] = ages[ages != Fault.NONE]
        faults[(faults == Fault.NONE) & self._shares.excess(slots, self.now_ns)] = Fault.FLOOD
        ends = validation.terminal(columns)
        found = Rows(
            states=columns.states,
            next_states=columns.next_states,
            actions=columns.actions,
            next_masks=columns.next_masks,
            rewards=columns.rewards[:, self._objective],
            discounts=np.where(ends, np.float32(0), columns.discounts * self._gamma),
            probabilities=columns.probabilities,
            sequences=sequences,
        )
        good = faults == Fault.NONE
        if not good.all():
            for fault, count in zip(*np.unique(faults[~good], return_counts=True), strict=True):
                rows[Fault(int(fault)).name.lower()] += int(count)
            found = Rows(**{name: getattr(found, name)[good] for name in Rows.__struct_fields__})
            slots, boots, steps, ends = slots[good], boots[good], steps[good], ends[good]
        serials = self.replay.insert(
            found,
            self.trajectories.previous(slots, boots, steps),
            exhausted=risk.exhausted(found.states[:, risk.RISK_COLUMNS], found.next_states[:, risk.RISK_COLUMNS]),
        )
        self._shares.take(slots, serials % self.replay.capacity)
        self.trajectories.advance(slots, boots, steps, serials, ends)
        fresh = int((found.sequences > self.learned_until).sum())
        if fresh:
            rows["accepted"] += fresh
        if again := len(serials) - fresh:
            rows["again"] += again
        return fresh

    def _age(self, batch: TransitionBatch) -> Fault:
        return validation.age_fault(batch.boot_id, batch.step, self.now_ns, *self._ages) if self.now_ns else Fault.NONE

    def _subject(self, node: str) -> str:
        known = self._subjects.get(node)
        if known is None:
            if len(self._subjects) >= _SUBJECT_CACHE:
                self._subjects.clear()
            known = self._subjects[node] = subject("transition", node)
        return known


def _within(parts: list[_Part], limit: int) -> list[list[_Part]]:
    """``parts`` in order, in groups of at most ``limit`` rows: one insertion may not lap the ring."""
    groups: list[list[_Part]] = []
    room = 0
    for part in parts:
        if part.slots.size > room:
            groups.append([])
            room = limit
        groups[-1].append(part)
        room -= part.slots.size
    return groups
