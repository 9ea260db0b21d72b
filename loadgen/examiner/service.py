"""Wiring of the examiner: candidates in, the champion pointer out; transitions in, the way back out.

A process of its own beside the emulator, so that a learner can neither promote itself nor needs the emulator.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from loadgen.examiner.examination import Examination, Verdict
from loadgen.examiner.pointers import Pointers
from loadgen.examiner.settings import Settings
from loadgen.examiner.trials import Trials, fleet_trials
from loadgen.examiner.watch import Watch
from schemas.policies import PolicyPointer
from services.learner.promotion import Judgement
from services.observe import Observe
from services.shell import Shell

__all__ = ["Examiner", "Settings", "build"]


class Measures:
    """Prometheus metrics ``tidegate_examiner_*``."""

    def __init__(self, observe: Observe) -> None:
        self._verdicts = observe.counter("verdicts", "Candidates examined, by where that ended", ["stage", "promoted"])
        self._ratio = observe.gauge("ratio", "Goodput of the last candidate over the champion's, and its lower bound",
                                    ["bound"])  # fmt: skip
        self._rollbacks = observe.counter("rollbacks", "Champions moved back after a live regression")

    def verdict(self, verdict: Verdict) -> None:
        self._verdicts.labels(verdict.stage, str(verdict.promoted).lower()).inc()
        if verdict.ratio > 0.0:
            self._ratio.labels("mean").set(verdict.ratio)
            self._ratio.labels("low").set(verdict.low)

    def rollback(self, _pointer: PolicyPointer, _judgement: Judgement) -> None:
        self._rollbacks.inc()


class Examiner:
    """The service. ``trials``: other traces than the settings' fleets."""

    def __init__(
        self, settings: Settings, *, trials: Trials | None = None, wall_ns: Callable[[], int] = time.time_ns
    ) -> None:
        self._settings = settings
        self._trials = trials or Trials(lambda: fleet_trials(settings))
        self._wall_ns = wall_ns
        self._tasks: list[asyncio.Task[None]] = []
        self.examination: Examination
        self.watch: Watch

    async def start(self, shell: Shell) -> None:
        measures = Measures(shell.observe)
        pointers = Pointers(shell.bus, self._wall_ns)
        self.examination = Examination(shell.bus, self._settings, self._trials, pointers, measures.verdict)
        self.watch = Watch(shell.bus, self._settings, pointers, measures.rollback)
        self._tasks = [shell.spawn(self.examination.run(), "examine"), shell.spawn(self.watch.run(), "watch")]

    async def stop(self) -> None:
        """Give up what is under way: the candidate is still there at the next start."""
        self._trials.stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def build(settings: Settings) -> Examiner:
    """The service; starts nothing."""
    return Examiner(settings)
