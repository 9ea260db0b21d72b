"""Rates and losses since the last line of progress."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from services.learner.dqn import Step


class Progress:
    """Sums between two lines."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.start(0, 0)

    def start(self, transitions: int, updates: int) -> None:
        """Count from here."""
        self._began = self._clock()
        self._transitions, self._updates = transitions, updates
        self._found: list[tuple[float, float, float, float, float]] = []
        self._refused = 0

    def note(self, step: Step) -> None:
        """One gradient step."""
        if step.applied:
            self._found.append((step.loss, float(np.abs(step.errors).mean()), step.q_mean, step.margin, step.risk))
        else:
            self._refused += 1

    def due(self, every_s: float) -> bool:
        return self._clock() - self._began >= every_s

    def line(self, transitions: int, updates: int, epsilon: float) -> str:
        """The line, and begin to sum anew."""
        spent_s = max(self._clock() - self._began, 1e-9)
        loss, error, q, margin, risk = np.mean(self._found, axis=0).tolist() if self._found else (0.0,) * 5
        text = (
            f"{transitions:,} transitions ({(transitions - self._transitions) / spent_s:,.0f}/s), {updates:,} updates "
            f"({(updates - self._updates) / spent_s:,.0f}/s), loss {loss:.4f}, TD error {error:.4f}, Q {q:.3f}, "
            f"margin {margin:.4f}, risk {risk:.4f}, epsilon {epsilon:.3f}"
            + (f", {self._refused} steps refused" if self._refused else "")
        )
        self.start(transitions, updates)
        return text
