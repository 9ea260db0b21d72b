"""All rows of an examination by policy, admission and trace, and the policies that are chosen among others' rows.

fixed_best       the best fixed rho of each configuration in hindsight
heuristic_tuned  for each trace the variant that was best on all *other* traces of its configuration
hindsight        the best of everything that is not learned, on each trace: an upper reference, which also takes luck
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from loadgen.evaluate.rows import Row

CHOSEN: Final = ("fixed_best", "heuristic_tuned", "hindsight")
"""Policies that nobody could run: which one acts is known only when all have run."""


class Name(NamedTuple):
    """A policy under an admission."""

    policy: str
    admission: str
    timeouts: bool = True


class Table:
    """Rows [configurations, traces] of every name; a name whose traces are not complete is not in it."""

    def __init__(self, rows: Iterable[Row]) -> None:
        by_name: dict[Name, dict[tuple[str, int, int], Row]] = {}
        for row in rows:
            name = Name(row.policy, row.admission, row.timeouts)
            by_name.setdefault(name, {})[row.configuration, row.block, row.card] = row
        traces = sorted({trace for found in by_name.values() for trace in found})
        self.configurations: tuple[str, ...] = tuple(dict.fromkeys(trace[0] for trace in traces))
        grid = [[t for t in traces if t[0] == name] for name in self.configurations]
        self._rows = {
            name: [[found[trace] for trace in line] for line in grid]
            for name, found in by_name.items()
            if len(found) == len(traces)
        }
        for admission in dict.fromkeys(name.admission for name in self._rows):
            self._choose(admission)

    @property
    def names(self) -> tuple[Name, ...]:
        """Everybody with a row for every trace."""
        return tuple(self._rows)

    def rows(self, name: Name) -> list[list[Row]]:
        """[configurations][traces]; KeyError for a name that is not there."""
        return self._rows[name]

    def values(self, name: Name) -> NDArray[np.float64]:
        """Goodput, float64 [C, S]."""
        return np.array([[row.goodput_tokens_per_s for row in line] for line in self._rows[name]], np.float64)

    def _choose(self, admission: str) -> None:
        there = [name for name in self._rows if name.admission == admission and name.timeouts]
        fixed = [n for n in there if n.policy == "rho_1.0" or n.policy.startswith("fixed:")]
        tuned = [n for n in there if n.policy == "heuristic" or n.policy.startswith("heuristic:")]
        one_line = [n for n in there if n.policy == "one_line"]
        if not any(":" in name.policy for name in (*fixed, *tuned)):
            return  # nothing to choose from but what stands in the table anyway
        for policy, members, rule in (
            ("fixed_best", fixed, _best_of_all),
            ("heuristic_tuned", tuned, _best_elsewhere),
            ("hindsight", [*fixed, *tuned, *one_line], _best_here),
        ):
            if len(members) > 1:
                self._rows[Name(policy, admission)] = self._picked(policy, members, rule)

    def _picked(
        self, policy: str, members: Sequence[Name], rule: Callable[[NDArray[np.float64]], NDArray[np.integer]]
    ) -> list[list[Row]]:
        goodput = np.stack([self.values(name) for name in members])
        found = []
        for c in range(len(self.configurations)):
            chosen = rule(goodput[:, c, :])
            found.append(
                [
                    msgspec.structs.replace(self._rows[members[int(m)]][c][s], policy=policy)
                    for s, m in enumerate(chosen)
                ]
            )
        return found


def _best_of_all(goodput: NDArray[np.float64]) -> NDArray[np.integer]:
    """Of [members, S], for every trace the member of the highest sum."""
    return np.full(goodput.shape[1], goodput.sum(axis=1).argmax())


def _best_elsewhere(goodput: NDArray[np.float64]) -> NDArray[np.integer]:
    """For every trace the member of the highest sum over the other traces: it was not tuned on this one."""
    best: NDArray[np.intp] = (goodput.sum(axis=1, keepdims=True) - goodput).argmax(axis=0)
    return best


def _best_here(goodput: NDArray[np.float64]) -> NDArray[np.integer]:
    best: NDArray[np.intp] = goodput.argmax(axis=0)
    return best
