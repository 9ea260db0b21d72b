"""Whether a new champion does worse live than the policy before it. Pure: sums of transitions in, a judgement out.

Transitions are summed in blocks of some steps of one node under one policy; a block is what is drawn again by the
bootstrap, since steps that follow one another resemble each other. The former policy's side are its newest blocks:
those of workers that are still on it, where it goes on beside the new one, else those of the window before.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.features import FEATURE, FEATURE_COUNT
from schemas.transitions import REWARD_PARTS, TransitionBatch

_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]

MAX_POLICIES: Final = 16
"""Whose sums are kept; the one that has not acted for longest makes room."""
_GOODPUT, _TOKENS, _VIOLATION, _OOM = (REWARD_PARTS.index(name) for name in ("goodput", "tokens", "violation", "oom"))
_PREEMPTIONS, _QUEUE = FEATURE["preemption_rate"], FEATURE["l_queue"]
_SUMS: Final = ("rows", "goodput", "tokens", "violation", "preemptions", "queue", "oom")
_ROWS = 0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Over which window policies are compared, and what counts as a regression: the difference is beyond a limit, and
    its bootstrap interval excludes none at all."""

    block_steps: _Count = 15
    """Steps of one node that are summed together."""
    window_blocks: _Count = 40
    """Blocks of each policy that are compared at the end: twenty minutes of one node, one of twenty."""
    least_blocks: _Count = 6
    """Blocks of each before which nothing is said."""
    goodput_fall: float = 0.05
    """Relative, of the share of tokens that meet their limits; of goodput itself too, where both act side by side or
    no fewer requests wait than before."""
    violation_rise: float = 0.05
    """Absolute, of the share of requests beyond their limits."""
    preemption_rise: float = 0.05
    """Absolute, of preemptions per second and worker."""
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1.0)] = 0.95
    draws: _Count = 1000
    """Of the bootstrap."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison says so far."""

    state: Literal["waiting", "sound", "regressed"]
    why: str = ""
    blocks: int = 0
    """Of the new policy."""
    figures: dict[str, float] = {}
    """``new_*`` and ``former_*``: goodput, goodput_share, violation, preemptions, queue; ``split``: share of the
    former's blocks that came beside the new's."""


class _Block(NamedTuple):
    sums: NDArray[np.float64]
    era: int


class Ledger:
    """Sums by policy, node and block. Memory is bounded: ``MAX_POLICIES`` times four windows of blocks."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.refused = 0
        """Messages whose columns do not fit each other or this program's tables."""
        self._blocks: OrderedDict[str, OrderedDict[tuple[str, int, int], _Block]] = OrderedDict()
        self._first: dict[tuple[str, str, int], int] = {}
        """First block of a (policy, node, boot) since the policy began: it still shows what the former one did."""
        self._era = 0

    def begin(self, policy: str) -> None:
        """A policy begins to act (again): what it did before does not count."""
        self._era += 1
        self._blocks.pop(policy, None)
        self._first = {key: block for key, block in self._first.items() if key[0] != policy}

    def add(self, batch: TransitionBatch) -> None:
        """Sum a message's rows under the policies that chose."""
        rows = len(batch.policies)
        if len(batch.rewards) != 4 * rows * len(REWARD_PARTS) or len(batch.next_states) != 4 * rows * FEATURE_COUNT:
            self.refused += 1
            return
        parts = np.frombuffer(batch.rewards, "<f4").reshape(rows, len(REWARD_PARTS)).astype(np.float64)
        states = np.frombuffer(batch.next_states, "<f4").reshape(rows, FEATURE_COUNT).astype(np.float64)
        columns = np.column_stack(
            [np.ones(rows), parts[:, _GOODPUT], parts[:, _TOKENS], parts[:, _VIOLATION], states[:, _PREEMPTIONS],
             states[:, _QUEUE], parts[:, _OOM]]
        )  # fmt: skip
        columns = np.where(np.isfinite(columns), np.clip(columns, -1e6, 1e6), 0.0)
        for policy in set(batch.policies):
            mine = columns if len(set(batch.policies)) == 1 else columns[[p == policy for p in batch.policies]]
            self._enter(policy, batch, mine.sum(axis=0))

    def judge(self, new: str, former: str, rng: np.random.Generator) -> Judgement:
        """Compare two policies by name. ``regressed`` may come before the window is full, ``sound`` at its end."""
        limits = self.limits
        ours, theirs = self._side(new, settled=True), self._side(former, settled=False)
        count = len(ours)
        if count and np.sum([one.sums[-1] for one in ours]) > 0:
            return Judgement(state="regressed", why="a card ran out of memory", blocks=count)
        full = count >= limits.window_blocks
        if min(count, len(theirs)) < limits.least_blocks:
            # Nothing to compare with: what the examiner measured stands, the crash check above stays.
            return Judgement(state="sound" if full else "waiting", why="nothing to compare with", blocks=count)
        era = max(one.era for one in ours)
        split = sum(one.era >= era for one in theirs) / len(theirs)
        a, b = _Side.of(ours), _Side.of(theirs)
        drawn_a, drawn_b = a.drawn(limits.draws, rng), b.drawn(limits.draws, rng)
        found, base = a.told(), b.told()
        figures = {f"new_{name}": value for name, value in found.items()}
        figures |= {f"former_{name}": value for name, value in base.items()} | {"split": split}
        tests = [
            ("goodput_share", -1.0, limits.goodput_fall * abs(base["goodput_share"])),
            ("violation", 1.0, limits.violation_rise),
            ("preemptions", 1.0, limits.preemption_rise),
        ]
        if split >= 0.5 or found["queue"] >= base["queue"]:
            tests.append(("goodput", -1.0, limits.goodput_fall * abs(base["goodput"])))
        for name, sign, limit in tests:
            worse = sign * (found[name] - base[name])
            least = float(np.quantile(sign * (drawn_a[name] - drawn_b[name]), 1.0 - limits.confidence))
            if worse > limit and least > 0.0:
                why = f"{name} {found[name]:.4g} against {base[name]:.4g} of {former}"
                return Judgement(state="regressed", why=why, blocks=count, figures=figures)
        return Judgement(state="sound" if full else "waiting", blocks=count, figures=figures)

    def _enter(self, policy: str, batch: TransitionBatch, sums: NDArray[np.float64]) -> None:
        block = batch.step // self.limits.block_steps
        mine = self._blocks.setdefault(policy, OrderedDict())
        self._blocks.move_to_end(policy)
        key = batch.node, batch.boot_id, block
        held = mine.get(key)
        if held is None:
            self._first.setdefault((policy, batch.node, batch.boot_id), block)
            mine[key] = _Block(sums, self._era)
            while len(mine) > 4 * self.limits.window_blocks:
                mine.popitem(last=False)
        else:
            np.add(held.sums, sums, out=held.sums)
        while len(self._blocks) > MAX_POLICIES:
            gone, _ = self._blocks.popitem(last=False)
            self._first = {k: v for k, v in self._first.items() if k[0] != gone}
        while len(self._first) > 4 * MAX_POLICIES * self.limits.window_blocks:
            del self._first[next(iter(self._first))]

    def _side(self, policy: str, *, settled: bool) -> list[_Block]:
        """The newest blocks of a policy; ``settled``: without each node's first."""
        mine = self._blocks.get(policy, OrderedDict())
        picked = [
            block for (node, boot, number), block in mine.items()
            if not settled or number != self._first.get((policy, node, boot))
        ]  # fmt: skip
        return picked[-self.limits.window_blocks :]


class _Side(NamedTuple):
    sums: NDArray[np.float64]
    """float64 [blocks, len(_SUMS)]."""

    @classmethod
    def of(cls, blocks: list[_Block]) -> _Side:
        return cls(np.stack([block.sums for block in blocks]))

    def told(self) -> dict[str, float]:
        return {name: float(value[0]) for name, value in _measures(self.sums.sum(axis=0, keepdims=True)).items()}

    def drawn(self, draws: int, rng: np.random.Generator) -> dict[str, NDArray[np.float64]]:
        """Each measure float64 [draws] over as many blocks, drawn with replacement."""
        counts = rng.multinomial(len(self.sums), np.full(len(self.sums), 1.0 / len(self.sums)), size=draws)
        return _measures(counts @ self.sums)


def _measures(sums: NDArray[np.float64]) -> dict[str, NDArray[np.float64]]:
    """Measures [n] of sums [n, len(_SUMS)]: means a row, and the share of tokens within the limits."""
    rows = np.maximum(sums[:, _ROWS], 1.0)
    means = {name: sums[:, place] / rows for place, name in enumerate(_SUMS)}
    share = sums[:, _SUMS.index("goodput")] / np.maximum(sums[:, _SUMS.index("tokens")], 1e-9)
    return {name: means[name] for name in ("goodput", "violation", "preemptions", "queue")} | {"goodput_share": share}
