"""Who asks for what, and when: sessions and their turns, drawn from a seed or taken from a trace.

Pure. A session is a function of (options, its number), whenever it runs, so that two runs of the same options ask
the same; only the server's own answers, which later prompts hold, can make them differ.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

import msgspec
import numpy as np

from loadgen.arrivals import arrivals
from loadgen.openai.options import Draws, Options
from loadgen.requests import NO_TURN
from loadgen.workload.table import Workload
from schemas.classes import ServiceClass
from services.errors import UserError

KEEP_ALL: Final = 1 << 40
TOO_LONG: Final = "turns that would not fit into the context"
_EMPTY_IN_A_ROW: Final = 1000
_ARRIVALS, _SESSION = 1, 2
"""Streams of the seed, so that the arrivals do not depend on what sessions draw."""


class Turn(msgspec.Struct, frozen=True):
    """One request, before the conversation gives it its history."""

    prompt_tokens: int
    """The whole prompt is filled up to this length; 0: whatever history and new text come to."""
    fresh_tokens: int
    """New text at the least, >= 1."""
    kept_tokens: int
    """So many leading tokens of the history stay; KEEP_ALL where all of it does."""
    max_tokens: int
    think_s: float
    """From this turn's end to the next turn, seconds."""


class Session(msgspec.Struct, frozen=True):
    """One conversation."""

    number: int
    service_class: ServiceClass
    turns: tuple[Turn, ...]
    start_s: float = 0.0
    """Open loop and trace: when its first turn is due, seconds from the start of the run."""
    left_out: int = 0
    """Turns that the context had no room for."""


class Plan(msgspec.Struct, frozen=True):
    """All sessions of an open loop or a trace, by start."""

    sessions: list[Session]
    left_out: dict[str, int]
    notes: tuple[str, ...] = ()


def slot_sessions(options: Options, slot: int, context_limit: int) -> Iterator[Session]:
    """What slot ``slot`` of a closed loop asks one after the other, without end unless ``options.requests``.

    Requests are shared out to the slots beforehand, so that which ones are sent does not depend on who is faster.
    UserError when no prompt that is drawn fits into the context.
    """
    draws = options.draws()
    share = options.requests // options.sessions + (slot < options.requests % options.sessions)
    empty = 0
    for number in itertools.count(slot, options.sessions):
        session = _drawn(options, draws, number, 0.0, context_limit)
        empty = 0 if session.turns else empty + 1
        if empty == _EMPTY_IN_A_ROW:
            raise _nothing_fits(context_limit)
        if options.requests:
            session = _first_turns(session, share)
            share -= len(session.turns)
        yield session
        if options.requests and share <= 0:
            return


def open_plan(options: Options, context_limit: int) -> Plan:
    """Sessions that start at a rate; UserError when none fits into the context."""
    draws = options.draws()
    # Without a duration it goes on until there are enough: drawn anew and longer, so that the end is in it.
    duration_s = options.duration_s or (options.requests / options.rate_per_s * 1.5 + 10.0)
    while True:
        rng = np.random.default_rng([options.seed, _ARRIVALS])
        starts_s = arrivals(options.rate_per_s, options.burstiness, duration_s, rng)
        sessions: list[Session] = []
        left_out, left = 0, options.requests or math.inf
        for number, start_s in enumerate(starts_s.tolist()):
            session = _drawn(options, draws, number, start_s, context_limit)
            left_out += session.left_out
            session = _first_turns(session, left)
            left -= len(session.turns)
            if session.turns:
                sessions.append(session)
            if left <= 0:
                break
        if options.duration_s or left <= 0:
            break
        if len(starts_s) >= _EMPTY_IN_A_ROW and not sessions:
            raise _nothing_fits(context_limit)
        duration_s *= 2
    if left_out and not sessions:
        raise _nothing_fits(context_limit)
    return Plan(sessions, {TOO_LONG: left_out} if left_out else {})


def trace_plan(options: Options, workload: Workload, context_limit: int) -> Plan:
    """The trace's sessions, faster by ``speed``; UserError when nothing of it is left.

    A later prompt keeps what the trace says it shared with its session's context and is filled up to its length.
    """
    if options.duration_s:
        workload = workload.window(options.duration_s * options.speed)
    if context_limit:
        workload = workload.within_context(context_limit)
    table = workload.in_order().requests
    numbers = {name: getattr(table, name).tolist() for name in ("prompt_tokens", "cached_tokens", "output_tokens")}
    following, think_s = table.next_turn.tolist(), table.think_s.tolist()
    rng = np.random.default_rng([options.seed, _SESSION])
    sessions: list[Session] = []
    left = options.requests or math.inf
    for number, first in enumerate(np.flatnonzero(table.is_first).tolist()):
        turns, row = [], first
        while row != NO_TURN:
            cached = numbers["cached_tokens"][row]
            prompt = numbers["prompt_tokens"][row]
            turns.append(Turn(prompt, 1, cached, numbers["output_tokens"][row], think_s[row] / options.speed))
            row = following[row]
        mine = _class(options, rng) if options.service_class else ServiceClass(int(table.service_class[first]))
        start_s = float(table.arrival_s[first]) / options.speed
        session = _first_turns(Session(number, mine, tuple(turns), start_s), left)
        left -= len(session.turns)
        sessions.append(session)
        if left <= 0:
            break
    left_out = {why: count for why, count in workload.left_out.items() if count}
    if not sessions:
        told = ", ".join(f"{count:,} {why}" for why, count in left_out.items()) or "nothing in its first seconds"
        raise UserError(f"--trace: {workload.name}: nothing is left to send ({told})")
    return Plan(sessions, left_out, workload.notes)


def _drawn(options: Options, draws: Draws, number: int, start_s: float, context_limit: int) -> Session:
    rng = np.random.default_rng([options.seed, _SESSION, number])
    mine = _class(options, rng)
    wanted = draws.turns.whole(rng)
    turns: list[Turn] = []
    context = options.shared_prefix_tokens
    for index in range(wanted):
        fresh = (draws.turn_tokens if index else draws.prompt_tokens).whole(rng)
        most = draws.max_tokens.whole(rng)
        context += fresh + most  # answers that end early leave room: this is what the session may come to
        if context_limit and context > context_limit:
            break
        turns.append(Turn(0, fresh, KEEP_ALL, most, draws.think_s.value(rng)))
    return Session(number, mine, tuple(turns), start_s, left_out=wanted - len(turns))


def _class(options: Options, rng: np.random.Generator) -> ServiceClass:
    weights = options.service_class or {ServiceClass.CHAT: 1.0}
    shares = np.array(list(weights.values()))
    return list(weights)[int(rng.choice(len(shares), p=shares / shares.sum()))]


def _first_turns(session: Session, most: float) -> Session:
    return session if len(session.turns) <= most else msgspec.structs.replace(session, turns=session.turns[: int(most)])


def _nothing_fits(context_limit: int) -> UserError:
    return UserError(
        f"--prompt-tokens, --max-tokens: nothing that was drawn fits into the context of {context_limit:,} tokens"
    )
