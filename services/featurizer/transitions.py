"""Transitions: state, executed action, reward, next state, next mask, for each worker and step.

The sample of step t brings state t and the reward of step t-1, the outcome of step t its executed action and
mask. Transition t is whole, and is given out, when the outcome of step t+1 brings the next mask; one that
ended out of memory waits for nothing and goes with the next sample at the latest. A lost sample or outcome,
a hold of the featurizer's, an absent reward: no transition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.actions import ACTION_COUNT, ALL_ACTIONS
from schemas.codec import DecodeError, pack, unpack_row
from schemas.features import FEATURE_COUNT, FEATURE_HASH
from schemas.identity import SCHEMA_VERSION
from schemas.outcomes import OutcomeBatch, check_columns
from schemas.transitions import REWARD_PARTS, TransitionBatch
from services.featurizer.roster import Node
from services.featurizer.tracker import States, Tracker
from services.featurizer.validate import Counts

_NEVER: Final = -(2**62)
_OOM: Final = REWARD_PARTS.index("oom")
_OBJECTIVES: Final = [REWARD_PARTS.index("article"), REWARD_PARTS.index("goodput")]
SLOTS: Final = 4
MAX_POLICIES: Final = 1024
"""Distinct behaviour policies that are told apart; later names travel as ``other``."""


class _Ended(NamedTuple):
    """A step of a node whose transitions may be whole: its workers and their rows."""

    node: Node
    step: int
    t_ns: int
    workers: Sequence[str]
    rows: NDArray[np.int64]
    """int64 [workers]."""
    outcome: OutcomeBatch | None = None
    """None: it never came."""
    places: list[int] | None = None
    """The workers' places in the outcome; None: they are all of its rows."""


class Transitions:
    """Pairs states and outcomes of all workers. Four steps of each are kept, in the slots step % 4, so that an
    outcome may come after the next sample.

    Discounts are 1 where a trajectory goes on and 0 where it ends: by how much the future counts less is the
    learner's business. Not thread-safe; does no I/O.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.counts: Counts = {}
        self._tracker = tracker
        self._capacity = 0
        self._states = np.empty((SLOTS, 0, FEATURE_COUNT), np.float32)
        self._state_steps = np.empty((SLOTS, 0), np.int64)
        self._held = np.empty((SLOTS, 0), np.bool_)
        self._rewards = np.empty((SLOTS, 0, len(REWARD_PARTS)), np.float32)
        """Slot of step t+1: the reward of step t."""
        self._outcome_steps = np.empty((SLOTS, 0), np.int64)
        self._actions = np.empty((SLOTS, 0), np.uint8)
        self._masks = np.empty((SLOTS, 0), np.uint8)
        self._probabilities = np.empty((SLOTS, 0), np.float32)
        self._policies = np.empty((SLOTS, 0), np.int64)
        self._policy_names: list[str] = ["other"]
        self._policy_numbers: dict[str, int] = {"other": 0}
        self._crashed: dict[str, tuple[int, _Ended]] = {}
        """By node: boot and workers of a sample with a crash whose outcome has not come."""

    def sampled(self, states: States) -> list[TransitionBatch]:
        """Take the states of some nodes; transitions that ended in a crash and waited for an outcome in vain."""
        self._grow()
        overdue: list[_Ended] = []
        if self._crashed:
            for span in states.spans:
                boot_id, waiting = self._crashed.pop(span.node.name, (-1, None))
                if waiting is not None and boot_id == span.node.boot_id:
                    overdue.append(waiting)
        out = self._emit(overdue)
        if len(states.fresh):
            self._state_steps[:, states.fresh] = _NEVER
            self._outcome_steps[:, states.fresh] = _NEVER
        slots = states.steps % SLOTS
        self._states[slots, states.rows] = states.features
        self._state_steps[slots, states.rows] = states.steps
        self._held[slots, states.rows] = states.holds != 0
        self._rewards[slots, states.rows] = states.rewards
        ended = states.rewards[:, _OOM] > 0
        if ended.any():
            for span in states.spans:
                places = np.flatnonzero(ended[span.start : span.stop]).tolist()
                if places:
                    workers = [span.sample.workers[place] for place in places]
                    rows = span.layout.rows[places]
                    end = _Ended(span.node, span.sample.step, span.sample.t_ns, workers, rows)
                    self._crashed[span.node.name] = (span.node.boot_id, end)
        return out

    def executed(self, outcomes: Sequence[OutcomeBatch]) -> list[TransitionBatch]:
        """Take outcomes, in order; the transitions of the steps before them that are now whole."""
        self._grow()
        out: list[TransitionBatch] = []
        pending = list(outcomes)
        while pending:
            taken: set[str] = set()
            later: list[OutcomeBatch] = []
            ended: list[_Ended] = []
            for outcome in pending:
                if outcome.node in taken:
                    later.append(outcome)
                    continue
                taken.add(outcome.node)
                end = self._receive(outcome)
                if end is not None:
                    ended.append(end)
            if ended:
                self._keep(ended)
                out.extend(self._emit(ended))
            pending = later
        return out

    def forget(self, nodes: Sequence[str]) -> None:
        """Nodes that the tracker forgot."""
        for name in nodes:
            self._crashed.pop(name, None)

    def _receive(self, batch: OutcomeBatch) -> _Ended | None:
        """The outcome's receipts; None and a count when it is not of the node's present steps."""
        node = self._tracker.node(batch.node)
        if node is None:
            self._count("unknown_node")
            return None
        if batch.boot_id != node.boot_id or not max(node.outcome_step, node.step - 2) < batch.step <= node.step:
            # Later than the node's newest sample: commanded on one that this process never saw.
            unseen = (batch.boot_id, batch.step) > node.order
            self._count("outcome_without_sample" if unseen else "old_outcome")
            return None
        try:
            check_columns(batch)
        except DecodeError as error:
            self._count(error.reason)
            return None
        workers, places = batch.workers, None
        layout = node.layout
        if layout is not None and layout.workers == workers and not batch.completions and _all_sound(batch):
            rows = layout.rows
        else:
            places = self._receipts(batch, node)
            workers = tuple([workers[place] for place in places])
            if not places:
                return None
            if len(set(workers)) < len(workers):
                self._count("repeated_worker")
                return None
            rows = np.array([node.rows[worker] for worker in workers], np.int64)
        node.outcome_step = batch.step
        return _Ended(node, batch.step, batch.t_ns, workers, rows, batch, places)

    def _receipts(self, batch: OutcomeBatch, node: Node) -> list[int]:
        """Rows of the batch that are receipts of known workers with numbers that can be; others are counted."""
        known = [place for place, worker in enumerate(batch.workers) if worker in node.rows]
        self._count("unknown_worker", len(batch.workers) - len(known))
        completed = {one.row for one in batch.completions}
        receipts = [place for place in known if place not in completed]
        probabilities = unpack_row(batch.probabilities, "f")
        sound = [
            place
            for place in receipts
            if batch.executed_actions[place] < ACTION_COUNT
            and 0 < batch.masks[place] <= ALL_ACTIONS
            and 0.0 <= probabilities[place] <= 1.0
        ]
        self._count("bad_outcome", len(receipts) - len(sound))
        return sound

    def _keep(self, ended: list[_Ended]) -> None:
        """Store what was executed, for all nodes at once."""
        rows, steps = _rows_and_steps(ended)
        slots = steps % SLOTS
        batches = [(end.outcome, end.places) for end in ended if end.outcome is not None]
        actions = _stack([(one.executed_actions, places) for one, places in batches], "u1")
        self._outcome_steps[slots, rows] = steps
        self._actions[slots, rows] = actions
        self._masks[slots, rows] = _stack([(one.masks, places) for one, places in batches], "u1")
        self._probabilities[slots, rows] = _stack([(one.probabilities, places) for one, places in batches], "<f4")
        self._policies[slots, rows] = self._policies_of(ended)
        self._tracker.executed_rows(rows, actions.astype(np.int64), steps)

    def _policies_of(self, ended: list[_Ended]) -> NDArray[np.int64]:
        """Number of each row's behaviour policy, int64 [n]."""
        numbers: list[NDArray[np.int64] | int] = []
        for end in ended:
            outcome = end.outcome
            if outcome is None:
                continue
            said = [self._policy_number(name) for name in outcome.policies]
            if outcome.policy_index:
                index = _stack([(outcome.policy_index, end.places)], "u1")
                numbers.append(np.array(said, np.int64)[index])
            else:
                numbers.append(said[0])
        sizes = [len(end.rows) for end in ended]
        if all([isinstance(number, int) for number in numbers]):  # noqa: C419  # a list is faster
            return np.repeat(np.array(numbers, np.int64), sizes)
        return np.concatenate([np.broadcast_to(n, size) for n, size in zip(numbers, sizes, strict=True)])

    def _emit(self, ended: list[_Ended]) -> list[TransitionBatch]:
        """The whole transitions that end in these steps, one batch for each node that has any."""
        if not ended:
            return []
        if self._crashed:
            for end in ended:
                self._crashed.pop(end.node.name, None)
        rows, steps = _rows_and_steps(ended)
        now, then = steps % SLOTS, (steps - 1) % SLOTS
        rewards = self._rewards[now, rows]
        crashed = rewards[:, _OOM] > 0
        begun = (
            (self._state_steps[now, rows] == steps)
            & (self._state_steps[then, rows] == steps - 1)
            & (self._outcome_steps[then, rows] == steps - 1)
        )
        self._count("gap", int(np.count_nonzero(~begun & ~self._held[now, rows])))
        answered = self._outcome_steps[now, rows] == steps
        whole = begun & ~self._held[then, rows] & (crashed | (answered & ~self._held[now, rows]))
        whole &= np.isfinite(rewards[:, _OBJECTIVES]).all(axis=1)
        picked = np.flatnonzero(whole)
        if not len(picked):
            return []
        ends = np.cumsum([len(end.rows) for end in ended])
        cuts = np.searchsorted(picked, ends).tolist()
        rows, now, then, crashed = rows[picked], now[picked], then[picked], crashed[picked]
        parts = (
            _Part(pack(self._states[then, rows], "<f4"), 4 * FEATURE_COUNT),
            _Part(pack(self._states[now, rows], "<f4"), 4 * FEATURE_COUNT),
            _Part(self._actions[then, rows].tobytes(), 1),
            _Part(self._masks[then, rows].tobytes(), 1),
            _Part(np.where(answered[picked], self._masks[now, rows], 1).astype("u1").tobytes(), 1),
            _Part(pack(self._probabilities[then, rows], "<f4"), 4),
            _Part(pack(rewards[picked], "<f4"), 4 * len(REWARD_PARTS)),
            _Part(pack(~crashed, "<f4"), 4),
            _Part(pack(crashed, "u1"), 1),
        )
        names = self._policy_names
        policies = [names[number] for number in self._policies[then, rows].tolist()]
        places = picked.tolist()
        out: list[TransitionBatch] = []
        first = start = 0
        for end, cut in zip(ended, cuts, strict=True):
            if cut > start:
                workers = tuple(end.workers)
                if cut - start < len(workers):
                    workers = tuple([workers[place - first] for place in places[start:cut]])
                out.append(
                    TransitionBatch(
                        end.node.name,
                        end.node.boot_id,
                        end.step - 1,
                        SCHEMA_VERSION,
                        end.t_ns,
                        FEATURE_HASH,
                        workers,
                        tuple(policies[start:cut]),
                        *[data[start * width : cut * width] for data, width in parts],
                    )
                )
            start = cut
            first += len(end.rows)
        return out

    def _policy_number(self, name: str) -> int:
        number = self._policy_numbers.get(name)
        if number is None:
            if len(self._policy_names) >= MAX_POLICIES:
                return 0
            number = self._policy_numbers[name] = len(self._policy_names)
            self._policy_names.append(name)
        return number

    def _grow(self) -> None:
        more = self._tracker.capacity - self._capacity
        if more <= 0:
            return
        for name, value in vars(self).items():
            if isinstance(value, np.ndarray):
                fill = _NEVER if name in ("_state_steps", "_outcome_steps") else 0
                room = np.full((SLOTS, more, *value.shape[2:]), fill, value.dtype)
                setattr(self, name, np.concatenate((value, room), axis=1))
        self._capacity += more

    def _count(self, reason: str, number: int = 1) -> None:
        if number:
            self.counts[reason, ""] = self.counts.get((reason, ""), 0) + number


class _Part(NamedTuple):
    data: bytes
    row_bytes: int


_CERTAIN: Final = pack(np.ones(1), "<f4")


def _all_sound(batch: OutcomeBatch) -> bool:
    """Whether every row has numbers that can be, at a glance; probabilities other than 1 are looked at one by one
    by :meth:`Transitions._receipts`, since they are few."""
    rows = len(batch.workers)
    return (
        rows > 0
        and max(batch.executed_actions) < ACTION_COUNT
        and min(batch.masks) > 0
        and max(batch.masks) <= ALL_ACTIONS
        and batch.probabilities == _CERTAIN * rows
    )


def _stack(columns: Sequence[tuple[bytes, list[int] | None]], dtype: str) -> NDArray[Any]:
    """The picked places of each column, one after the other; None picks all."""
    if all([places is None for _, places in columns]):  # noqa: C419  # a list is faster
        return np.frombuffer(b"".join([data for data, _ in columns]), dtype)
    parts = [np.frombuffer(data, dtype) for data, _ in columns]
    return np.concatenate(
        [part if places is None else part[places] for part, (_, places) in zip(parts, columns, strict=True)]
    )


def _rows_and_steps(ended: list[_Ended]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    rows = np.concatenate([end.rows for end in ended])
    steps = np.repeat(np.array([end.step for end in ended], np.int64), [len(end.rows) for end in ended])
    return rows, steps
