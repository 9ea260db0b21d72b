"""Whether a new champion does worse live than the policy before it. Pure: sums of transitions in, a judgement out.

A block of some steps of one node is what is drawn again by the bootstrap, since steps that follow one another resemble
each other. While the new policy is on probation it is compared with the workers still on the former one in the same
time. Workers are unlike (class, load), so the difference that there was between the two sides before, when all were on
the former, is taken off where it is known. Where nobody is on the former any more, the comparison is with the window
before. Where both act on one card, what is measured by card is compared with the window before, and what is measured
by worker side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from schemas.transitions import TransitionBatch
from services.learner.blocks import SUMS, Blocks, Sides, Sums, drawn

_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Drawn = dict[str, NDArray[np.float64]]
_BY_CARD = ("goodput", "goodput_share", "violation")
_OOM = SUMS.index("oom")


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
    late_rise: float = 0.15
    """Absolute, of the share of steps in which a worker's p95 of first tokens or token gaps is beyond its limit; looked
    at where both policies act on one card, whose other measures are the same for both."""
    confidence: Annotated[float, msgspec.Meta(gt=0.5, lt=1.0)] = 0.95
    draws: _Count = 1000
    """Of the bootstrap."""


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What the comparison says so far."""

    state: Literal["waiting", "sound", "regressed", "absent"]
    """``absent``: the former policy filled a window and the new one was nowhere to be seen."""
    why: str = ""
    blocks: int = 0
    """Of the new policy."""
    figures: dict[str, float] = {}
    """``new_*`` and ``former_*``: goodput, goodput_share, violation, preemptions, queue, late; ``split``: 1 where the
    former's are of the same time, 0.5 where only those by worker are, 0 where all are of the window before."""


class Ledger:
    """Takes in transitions, judges policies by them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.blocks = Blocks(limits.block_steps, limits.window_blocks)

    def begin(self, policy: str) -> None:
        """A policy begins to act (again): what it did before does not count."""
        self.blocks.begin(policy)

    def mark(self) -> None:
        """A backlog was read: what comes from now on is of the present."""
        self.blocks.mark()

    def add(self, batch: TransitionBatch) -> None:
        self.blocks.add(batch)

    def judge(self, new: str, former: str, rng: np.random.Generator) -> Judgement:
        """Compare two policies by name. ``regressed`` may come before the window is full, ``sound`` at its end."""
        limits = self.limits
        sides = self.blocks.sides(new, former)
        count = len(sides.ours)
        if count and np.sum([one[_OOM] for one in sides.ours]) > 0:
            return Judgement(state="regressed", why="a card ran out of memory", blocks=count)
        full = count >= limits.window_blocks
        if not count and len(sides.beside) >= limits.window_blocks:
            return Judgement(state="absent", why=f"no transitions of {new}")
        base = self._expected(sides, rng)
        if not base or count < limits.least_blocks:
            # Nothing to compare with: what the examiner measured stands, the crash check above stays.
            return Judgement(state="sound" if full else "waiting", why="nothing to compare with", blocks=count)
        ours = drawn(sides.ours, limits.draws, rng)
        figures = {f"new_{name}": float(values[0]) for name, values in ours.items()}
        figures |= {f"former_{name}": float(values[0]) for name, values in base.items()}
        figures["split"] = 0.0 if not sides.beside else 0.5 if sides.shared else 1.0
        for name, sign, limit in self._tests(sides, figures):
            differences = sign * (ours[name] - base[name])
            if differences[0] > limit and np.quantile(differences[1:], 1.0 - limits.confidence) > 0.0:
                now = sides.beside and not (sides.shared and name in _BY_CARD)
                told = f"{ours[name][0]:.4g} against {base[name][0]:.4g} of {former} {'beside' if now else 'before'} it"
                return Judgement(state="regressed", why=f"{name} {told}", blocks=count, figures=figures)
        return Judgement(state="sound" if full else "waiting", blocks=count, figures=figures)

    def _expected(self, sides: Sides, rng: np.random.Generator) -> _Drawn:
        """What the new policy's workers would show under the former one, as ``drawn``; empty while nobody knows."""
        limits = self.limits

        def of(blocks: Sequence[Sums]) -> _Drawn:
            return drawn(blocks, limits.draws, rng) if len(blocks) >= limits.least_blocks else {}

        if not sides.beside:
            return of(sides.before or sides.rest_before)
        beside, before, rest = of(sides.beside), of(sides.before), of(sides.rest_before)
        if beside and before and rest:
            beside = {name: np.maximum(beside[name] + before[name] - rest[name], 0.0) for name in beside}
        if not sides.shared or not beside:
            return beside
        by_card = {name: before[name] for name in _BY_CARD if before}
        return {name: values for name, values in beside.items() if name not in _BY_CARD} | by_card

    def _tests(self, sides: Sides, figures: dict[str, float]) -> list[tuple[str, float, float]]:
        """What must not be worse: measure, the sign of worse, by how much at most."""
        limits = self.limits
        tests = [("violation", 1.0, limits.violation_rise), ("preemptions", 1.0, limits.preemption_rise)]
        if sides.shared:
            tests.append(("late", 1.0, limits.late_rise))
        relative = ["goodput_share"]
        if not sides.shared and (sides.beside or figures["new_queue"] >= figures["former_queue"]):
            relative.append("goodput")
        tests += [(name, -1.0, limits.goodput_fall * abs(figures.get(f"former_{name}", 0.0))) for name in relative]
        return [test for test in tests if f"former_{test[0]}" in figures]
