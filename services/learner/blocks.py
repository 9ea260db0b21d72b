"""Sums of transitions by policy, node, block of steps and worker: what policies are compared by live. Pure.

The reward's parts are a card's, credited to each of its workers; what tells two policies on one card apart are the
states of their own workers.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from schemas.features import FEATURE, FEATURE_COUNT
from schemas.identity import card_of
from schemas.transitions import REWARD_PARTS, TransitionBatch

MAX_POLICIES: Final = 16
"""Whose sums are kept; the one that has not acted for longest makes room."""
SUMS: Final = ("rows", "goodput", "tokens", "violation", "preemptions", "queue", "late", "oom")
_PARTS: Final = [REWARD_PARTS.index(name) for name in ("goodput", "tokens", "violation")]
_OOM: Final = REWARD_PARTS.index("oom")
_PREEMPTIONS, _QUEUE = FEATURE["preemption_rate"], FEATURE["l_queue"]
_TAILS: Final = [FEATURE["ttft_p95"], FEATURE["tpot_p95"]]

Sums = NDArray[np.float64]
"""[..., len(SUMS)]."""
_Key = tuple[str, int, int]
"""Node, boot and number of a block."""


class _Block(NamedTuple):
    sums: dict[str, Sums]
    """By worker."""
    era: int


class Sides(NamedTuple):
    """Blocks of two policies that are compared, a window of each at most, oldest first."""

    ours: list[Sums]
    """The new policy's, without each node's first: it still shows what the former one did."""
    beside: list[Sums]
    """The former's since the new one began, of other workers: of cards without a worker of the new one where there are
    such."""
    shared: bool
    """Whether ``beside`` is of workers on the new one's own cards."""
    before: list[Sums]
    """The former's before that, of the new one's workers."""
    rest_before: list[Sums]
    """The same of the workers of ``beside``, or of any others where there are none."""


class Blocks:
    """``block_steps`` steps of a node are one block. Memory is bounded: ``MAX_POLICIES`` times four windows of
    ``window`` blocks."""

    def __init__(self, block_steps: int, window: int) -> None:
        self.refused = 0
        """Messages whose columns do not fit each other or this program's tables."""
        self._steps, self._window = block_steps, window
        self._kept: OrderedDict[str, OrderedDict[_Key, _Block]] = OrderedDict()
        self._first: dict[tuple[str, str, int], int] = {}
        """First block of a (policy, node, boot) since the policy began."""
        self._era = 0

    def count(self, policy: str) -> int:
        """Blocks kept of a policy."""
        return len(self._kept.get(policy, ()))

    @property
    def policies(self) -> int:
        return len(self._kept)

    def begin(self, policy: str) -> None:
        """A policy begins to act (again): what it did before does not count."""
        self._era += 1
        self._kept.pop(policy, None)
        self._first = {key: block for key, block in self._first.items() if key[0] != policy}

    def mark(self) -> None:
        """What comes from now on is of the present, what came so far may be of any time: a backlog was read."""
        self._era += 1

    def add(self, batch: TransitionBatch) -> None:
        """Sum a message's rows under the policies that chose."""
        rows = len(batch.policies)
        found = len(batch.workers), len(batch.rewards), len(batch.next_states)
        if found != (rows, 4 * rows * len(REWARD_PARTS), 4 * rows * FEATURE_COUNT):
            self.refused += 1
            return
        parts = np.frombuffer(batch.rewards, "<f4").reshape(rows, len(REWARD_PARTS)).astype(np.float64)
        states = np.frombuffer(batch.next_states, "<f4").reshape(rows, FEATURE_COUNT).astype(np.float64)
        late = (states[:, _TAILS] > 1.0).any(axis=1)
        columns = np.column_stack(
            [np.ones(rows), parts[:, _PARTS], states[:, _PREEMPTIONS], states[:, _QUEUE], late, parts[:, _OOM]]
        )
        columns = np.where(np.isfinite(columns), np.clip(columns, -1e6, 1e6), 0.0)
        for policy in dict.fromkeys(batch.policies):
            mine = [row for row, name in enumerate(batch.policies) if name == policy]
            self._enter(policy, batch, {batch.workers[row]: columns[row] for row in mine})

    def sides(self, new: str, former: str) -> Sides:
        """What there is to compare two policies by name."""
        ours = self._kept.get(new, OrderedDict())
        settled = [block for key, block in ours.items() if key[2] != self._first.get((new, key[0], key[1]))]
        tried = {worker for block in ours.values() for worker in block.sums}
        cards = {card_of(worker) for worker in tried}
        before: list[Sums] = []
        clean, mixed = ([], []), ([], [])  # type: tuple[list[Sums], list[Sums]], tuple[list[Sums], list[Sums]]
        for key, block in self._kept.get(former, {}).items():
            since = self._first.get((new, key[0], key[1]))
            now = block.era >= self._era if since is None else key[2] >= since
            kinds: dict[int, list[Sums]] = {}
            for worker, sums in block.sums.items():
                kind = 0 if worker in tried else 1 if card_of(worker) not in cards else 2
                kinds.setdefault(kind, []).append(sums)
            for kind, found in kinds.items():
                into = before if kind == 0 else (clean if kind == 1 else mixed)[0 if now else 1]
                into.append(np.sum(found, axis=0))
        shared = not clean[0] and bool(mixed[0])
        beside, rest = mixed if shared or not (clean[0] or clean[1]) else clean
        size = self._window
        ours_summed = [np.sum(list(block.sums.values()), axis=0) for block in settled[-size:]]
        return Sides(ours_summed, beside[-size:], shared, before[-size:], rest[-size:])

    def _enter(self, policy: str, batch: TransitionBatch, sums: dict[str, Sums]) -> None:
        block = batch.step // self._steps
        mine = self._kept.setdefault(policy, OrderedDict())
        self._kept.move_to_end(policy)
        key = batch.node, batch.boot_id, block
        held = mine.get(key)
        if held is None:
            self._first.setdefault((policy, batch.node, batch.boot_id), block)
            mine[key] = _Block(sums, self._era)
            while len(mine) > 4 * self._window:
                mine.popitem(last=False)
        else:
            for worker, more in sums.items():
                held.sums[worker] = held.sums[worker] + more if worker in held.sums else more
        while len(self._kept) > MAX_POLICIES:
            gone, _ = self._kept.popitem(last=False)
            self._first = {k: v for k, v in self._first.items() if k[0] != gone}
        while len(self._first) > 4 * MAX_POLICIES * self._window:
            del self._first[next(iter(self._first))]


def measures(sums: Sums) -> dict[str, NDArray[np.float64]]:
    """Measures [n] of sums [n, len(SUMS)]: means a row, and the share of tokens within the limits."""
    rows = np.maximum(sums[:, SUMS.index("rows")], 1.0)
    share = sums[:, SUMS.index("goodput")] / np.maximum(sums[:, SUMS.index("tokens")], 1e-9)
    means = {name: sums[:, SUMS.index(name)] / rows for name in SUMS if name not in ("rows", "tokens", "oom")}
    return means | {"goodput_share": share}


def drawn(blocks: Sequence[Sums], draws: int, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
    """Measures [1 + draws]: first of all blocks, then of as many drawn with replacement."""
    sums = np.stack(blocks)
    counts = rng.multinomial(len(sums), np.full(len(sums), 1.0 / len(sums)), size=draws)
    return measures(np.concatenate([sums.sum(axis=0, keepdims=True), counts @ sums]))
