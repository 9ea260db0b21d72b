"""One worker's requests as a structure of arrays: what the emulated engine replays.

Pure: NumPy, the service classes and endings, nothing else. ``loadgen.workload`` makes these tables and
``loadgen.engine`` consumes them, so this module belongs to neither.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.endings import Ending

F8 = npt.NDArray[np.float64]
I8 = npt.NDArray[np.int64]
U1 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

NO_TURN: Final = -1
"""``next_turn`` of the last turn of a session."""

DEFAULT_CONTEXT_TOKENS: Final = 131_072
"""Context of the emulated models, tokens: it caps ``max_tokens`` until a workload is cut to a model."""

_DTYPES: Final[dict[str, npt.DTypeLike]] = {
    "arrival_s": np.float64,
    "prompt_tokens": np.int64,
    "cached_tokens": np.int64,
    "output_tokens": np.int64,
    "max_tokens": np.int64,
    "service_class": np.uint8,
    "session": np.int64,
    "next_turn": np.int64,
    "think_s": np.float64,
}
_OPTIONAL: Final[dict[str, tuple[npt.DTypeLike, float | int]]] = {
    "expected_think_s": (np.float64, np.nan),
    "ending": (np.uint8, int(Ending.UNKNOWN)),
}
"""Type of each column that a table may lack, and what stands in it where only other tables have it."""


@dataclasses.dataclass(frozen=True, eq=False)
class RequestTable:
    """``n`` requests; every array has shape ``(n,)``. Empty tables are allowed (an idle worker).

    A session is a chain: its first turn has an arrival, each later one comes ``think_s`` of the turn
    before it after that turn finished. A request without a session is a chain of one.
    """

    arrival_s: F8
    """float64, seconds from the replay's start, >= 0; NaN for later turns of a session."""
    prompt_tokens: I8
    """int64, >= 1: the whole context, history included."""
    cached_tokens: I8
    """int64: leading tokens shared with the session's previous turn, 0 for first turns; below
    ``prompt_tokens``, since the last token is always computed, and at most the previous turn's context
    (its prompt + output)."""
    output_tokens: I8
    """int64, >= 1: what the request truly produces; an engine must not look at it for admission."""
    max_tokens: I8
    """int64, >= ``output_tokens``: what the request reserves for its output."""
    service_class: U1
    """uint8, a ``schemas.classes.ServiceClass``."""
    session: I8
    """int64, >= 0: the session's number, the same for all its turns and unlike any other session's."""
    next_turn: I8
    """int64: index in this table of the session's next turn, greater than the row's own, or -1."""
    think_s: F8
    """float64, seconds, >= 0: client delay from this turn's finish to the NEXT turn; 0 at the end."""
    expected_think_s: F8 | None = None
    """float64, seconds, >= 0: what an estimator says of it when this turn has ended; inf = the session has ended, NaN
    = nothing. None: nothing of any."""
    ending: U1 | None = None
    """uint8, a ``schemas.endings.Ending``: how this turn's answer ended, known when it does. None: UNKNOWN of all."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def is_first(self) -> Bool:
        """bool ``(n,)``: the row starts a session (it has an arrival of its own)."""
        return np.isfinite(self.arrival_s)

    def check(self) -> RequestTable:
        """This table, after every promise above was verified.

        Raises ValueError that names the array, the row, what it holds and what was expected: tables are
        made by this project's code, so a bad one is a bug and not a user's mistake.
        """
        n = len(self)
        for name, dtype in _DTYPES.items():
            array = getattr(self, name)
            if array.dtype != np.dtype(dtype) or array.shape != (n,):
                raise ValueError(f"{name}: {array.dtype} {array.shape}, expected {np.dtype(dtype)} {(n,)}")
        rows = np.arange(n)
        later = np.isnan(self.arrival_s)
        _all(
            "arrival_s",
            self.arrival_s,
            later | ((self.arrival_s >= 0) & ~np.isinf(self.arrival_s)),
            ">= 0 or NaN",
        )
        _all("prompt_tokens", self.prompt_tokens, self.prompt_tokens >= 1, ">= 1")
        _all("output_tokens", self.output_tokens, self.output_tokens >= 1, ">= 1")
        _all("max_tokens", self.max_tokens, self.max_tokens >= self.output_tokens, ">= output_tokens")
        cached_ok = (self.cached_tokens >= 0) & (self.cached_tokens < self.prompt_tokens)
        _all("cached_tokens", self.cached_tokens, cached_ok, "within 0 .. prompt_tokens - 1")
        _all("service_class", self.service_class, self.service_class < len(ServiceClass), "a ServiceClass")
        _all("session", self.session, self.session >= 0, ">= 0")
        _all("think_s", self.think_s, np.isfinite(self.think_s) & (self.think_s >= 0), "finite and >= 0")
        for name, (dtype, _) in _OPTIONAL.items():
            told = getattr(self, name)
            if told is not None and (told.dtype != np.dtype(dtype) or told.shape != (n,)):
                raise ValueError(f"{name}: {told.dtype} {told.shape}, expected {np.dtype(dtype)} {(n,)}")
        if (expected := self.expected_think_s) is not None:
            _all("expected_think_s", expected, np.isnan(expected) | (expected >= 0), ">= 0 or NaN")
        if self.ending is not None:
            _all("ending", self.ending, self.ending < len(Ending), "an Ending")
        linked = self.next_turn != NO_TURN
        turn_ok = ~linked | ((self.next_turn > rows) & (self.next_turn < n))
        _all("next_turn", self.next_turn, turn_ok, f"-1 or a later row below {n}")
        before = np.flatnonzero(linked)
        after = self.next_turn[before]
        pointed = np.bincount(after, minlength=n)
        _all("next_turn", pointed, pointed == later, "one row before each later turn and none before a first")
        _all("session", self.session[after], self.session[after] == self.session[before], "its previous turn's")
        _all("cached_tokens", self.cached_tokens, later | (self.cached_tokens == 0), "0 for a first turn")
        context = self.prompt_tokens[before] + self.output_tokens[before]
        _all(
            "cached_tokens",
            self.cached_tokens[after],
            self.cached_tokens[after] <= context,
            "<= context before",
        )
        firsts = self.session[~later]
        if len(np.unique(firsts)) != len(firsts):
            raise ValueError("session: two first turns with one number, expected one chain a session")
        return self

    def take(self, rows: I8) -> RequestTable:
        """The requests at ``rows`` (int64 ``(m,)``, rising), relinked.

        Whole tails may be left out, not a turn in the middle: ValueError when a kept later turn's
        predecessor is not among ``rows``.
        """
        place = np.full(len(self) + 1, NO_TURN, dtype=np.int64)  # the extra last cell answers next_turn -1
        place[rows] = np.arange(len(rows), dtype=np.int64)
        next_turn = place[self.next_turn[rows]]
        arrays = {name: getattr(self, name)[rows] for name in _DTYPES}
        arrays["next_turn"] = next_turn
        arrays["think_s"] = np.where(next_turn == NO_TURN, 0.0, arrays["think_s"])
        arrays |= {name: getattr(self, name)[rows] for name in _OPTIONAL if getattr(self, name) is not None}
        table = RequestTable(**arrays)
        reached = np.zeros(len(rows), dtype=bool)
        reached[next_turn[next_turn != NO_TURN]] = True
        orphans = np.flatnonzero(~table.is_first & ~reached)
        if len(orphans):
            raise ValueError(f"row {rows[orphans[0]]}: a later turn without the turn before it")
        return table


def empty_table() -> RequestTable:
    """A table without a request."""
    return RequestTable(**{name: np.empty(0, dtype=dtype) for name, dtype in _DTYPES.items()})


def concatenated(tables: Sequence[RequestTable]) -> RequestTable:
    """The rows of all tables one after another; sessions renumbered so that none coincide."""
    if not tables:
        return empty_table()
    parts: dict[str, list[npt.NDArray[np.generic]]] = {name: [] for name in _DTYPES}
    rows = sessions = 0
    for table in tables:
        for name in _DTYPES:
            parts[name].append(getattr(table, name))
        parts["next_turn"][-1] = np.where(table.next_turn == NO_TURN, NO_TURN, table.next_turn + rows)
        parts["session"][-1] = table.session + sessions
        rows += len(table)
        sessions += int(table.session.max(initial=-1)) + 1
    joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
    for name, (dtype, nothing) in _OPTIONAL.items():
        told = [getattr(table, name) for table in tables]
        if any(one is not None for one in told):
            filled = [np.full(len(table), nothing, dtype) for table in tables]
            joined[name] = np.concatenate(
                [have if one is None else one for one, have in zip(told, filled, strict=True)]
            )
    return RequestTable(**joined)


def default_max_tokens(
    service_class: U1,
    prompt_tokens: I8,
    output_tokens: I8,
    limits: Mapping[ServiceClass, ClassLimits] = DEFAULT_LIMITS,
    context_tokens: int = DEFAULT_CONTEXT_TOKENS,
) -> I8:
    """What requests that do not say reserve for their output, int64 ``(n,)`` tokens (DESIGN section 1).

    The class's default, capped by what the context leaves beside the prompt, never below the true output
    (which no client knows: a trace's request was served, so its limit was at least that).
    """
    per_class = np.zeros(len(ServiceClass), dtype=np.int64)
    for one in ServiceClass:
        per_class[one] = limits.get(one, DEFAULT_LIMITS[one]).default_max_tokens
    room = context_tokens - prompt_tokens
    return np.maximum(np.minimum(per_class[service_class], room), output_tokens)


def _all(name: str, found: npt.NDArray[np.generic], good: Bool, expected: str) -> None:
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise ValueError(f"{name}: row {row} holds {found[row]}, expected {expected}")
