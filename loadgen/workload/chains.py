"""Walking sessions: which turn follows which, and when each nominally starts.

Pure. Shapes are ``(n,)`` for a table of n requests.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.requests import F8, I8, NO_TURN, RequestTable

NOMINAL_PREFILL_TOKENS_PER_S: Final = 10_000.0
NOMINAL_TPOT_S: Final = 0.03
"""How long a call is taken to last where only its place on the clock matters (cutting a window, guessing a
think time from time stamps): an unloaded 8B model. The replay itself uses the engine's own times."""


def turns(table: RequestTable) -> list[tuple[I8, I8]]:
    """For each depth, the rows that have a next turn and those next turns: chains walked side by side.

    The longest session gives the number of steps, so thousands of sessions cost a few hundred of them.
    """
    steps = []
    rows = np.flatnonzero(table.is_first)
    while len(rows):
        rows = rows[table.next_turn[rows] != NO_TURN]
        following = table.next_turn[rows]
        if len(rows):
            steps.append((rows, following))
        rows = following
    return steps


def nominal_call_s(table: RequestTable) -> F8:
    """How long each call nominally takes, float64 ``(n,)`` seconds."""
    uncached = table.prompt_tokens - table.cached_tokens
    return uncached / NOMINAL_PREFILL_TOKENS_PER_S + table.output_tokens * NOMINAL_TPOT_S


def start_times(table: RequestTable, calls_take_time: bool = True) -> F8:
    """When each request nominally starts, float64 ``(n,)`` seconds: exact for first turns."""
    call_s = nominal_call_s(table) if calls_take_time else np.zeros(len(table))
    start_s = table.arrival_s.copy()
    for rows, following in turns(table):
        start_s[following] = start_s[rows] + call_s[rows] + table.think_s[rows]
    return start_s
