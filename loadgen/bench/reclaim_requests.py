"""Requests of the reclaim benchmark under way, sessions between turns, and what became of them all."""

from __future__ import annotations

import dataclasses

from loadgen.bench.reclaim_tenants import Session


@dataclasses.dataclass(slots=True)
class Request:
    """A turn under way."""

    session: Session
    turn: int
    arrival_s: float
    tokens: int
    """Context to have before the first (or, after a preemption, the next) token."""
    fresh_tokens: int
    """What this turn added: the limit of its time to first token grows by it."""
    left: float
    """Tokens still to produce."""
    blocks: int = 0
    prefill_left: float = 0.0
    ready_s: float = 0.0
    first_token_s: float = -1.0
    admitted_s: float = -1.0
    began: float = 0.0
    """Count of decoded tokens at its start."""
    running: bool = False
    preemptions: int = 0


@dataclasses.dataclass(slots=True)
class Idle:
    """A session between turns."""

    blocks: int
    tokens: int
    since_s: float


@dataclasses.dataclass(slots=True)
class Results:
    """What became of the requests."""

    waits_s: list[float] = dataclasses.field(default_factory=list)
    good_tokens: float = 0.0
    tokens: float = 0.0
    finished: int = 0
    met: int = 0
    gave_up: int = 0
    preemptions: int = 0
    recomputed_tokens: float = 0.0
    loaded_tokens: float = 0.0
    hit_tokens: float = 0.0
