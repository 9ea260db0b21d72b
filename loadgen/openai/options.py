"""What is asked of a run, checked before anything is sent."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec

from loadgen.openai.draws import Draw, draw_of
from schemas.classes import ServiceClass
from services.errors import UserError

HISTORIES: Final = ("answers", "synthetic")
BUILT_IN_TURNS: Final = {"closed": "2:6", "open": "1"}
"""Turns of a session where nobody says: conversations in a closed loop, single calls in an open one."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One run against one server. Exactly one of ``sessions``, ``rate_per_s`` and ``trace`` says who calls."""

    url: str
    """Of the server, with or without ``/v1``."""
    model: str = ""
    """Empty: the first that /v1/models names."""
    sessions: int = 0
    """Closed loop: so many sessions at a time, each replaced by a new one when it ends."""
    rate_per_s: float = 0.0
    """Open loop: new sessions a second, whatever the server does."""
    burstiness: float = 1.0
    """Open loop: coefficient of variation of the gaps between sessions; 1 is Poisson."""
    trace: Path | None = None
    trace_format: str | None = None
    speed: float = 1.0
    """Trace: arrivals and think times are divided by it."""
    duration_s: float = 0.0
    """No turn starts later, seconds; those under way finish. 0: no such limit."""
    requests: int = 0
    """So many requests in all; 0: no such limit."""
    seed: int = 0
    turns: str = ""
    prompt_tokens: str = "256"
    """Length of a session's first prompt beside the shared prefix, a distribution (draws.py) as the next four."""
    turn_tokens: str = "64"
    """New text of every later turn, tokens."""
    max_tokens: str = "64"
    """Limit of an answer, tokens."""
    think_s: str = "0"
    """From a turn's end to the session's next turn, seconds."""
    shared_prefix_tokens: int = 0
    """Text that all sessions begin with."""
    context_limit: int = 0
    """Longer turns are left out and counted, tokens; 0: what /v1/models says."""
    service_class: dict[ServiceClass, float] = {}
    """Weights of the classes that sessions belong to; empty: chat, or the trace's own."""
    priority: int | dict[ServiceClass, int] | None = None
    """The request field of that name, for all or by class; None: not sent (most servers refuse it)."""
    is_chat: bool = False
    """/v1/chat/completions with words, lengths approximate; otherwise /v1/completions with token ids."""
    token_ids: tuple[int, int] = (10, 250)
    """Prompts are drawn from these ids, LOW to below HIGH: in every model's vocabulary."""
    history: str = "answers"
    """What stands in later prompts for earlier answers: the server's own tokens, or ``synthetic`` ones."""
    temperature: float = 0.0
    is_ignoring_eos: bool = False
    """Answers run to their limit; with a trace they then have the trace's lengths."""
    is_plain: bool = False
    """Only fields of OpenAI's own API are sent: no ``return_token_ids``, so outputs compare as text."""
    timeout_s: float = 600.0
    """The client gives a request up after so long."""
    drain_s: float = 60.0
    """What is under way at the end of ``duration_s`` has so long to finish, seconds; then it counts as interrupted. A
    vLLM whose engine was killed keeps its connections open and says nothing."""
    is_giving_up: bool = False
    """And without a first token after 2 x the class's TTFT limit, as real clients do (DESIGN section 8)."""
    max_concurrency: int = 1024
    """Requests under way at a time; what had to wait for it is counted and its wait is part of its latency."""
    api_key: str = ""

    @property
    def loop(self) -> str:
        """``closed``, ``open`` or ``trace``."""
        return "closed" if self.sessions else "open" if self.rate_per_s else "trace"

    @property
    def base(self) -> str:
        """The URL that ends before ``/v1``."""
        return self.url.rstrip("/").removesuffix("/v1")

    def draws(self) -> Draws:
        """The distributions; UserError for those that cannot be read."""
        turns = self.turns or BUILT_IN_TURNS["closed" if self.sessions else "open"]
        return Draws(
            turns=draw_of("--turns", turns, 1),
            prompt_tokens=draw_of("--prompt-tokens", self.prompt_tokens, 1),
            turn_tokens=draw_of("--turn-tokens", self.turn_tokens, 1),
            max_tokens=draw_of("--max-tokens", self.max_tokens, 1),
            think_s=draw_of("--think", self.think_s),
        )

    def check(self) -> Options:
        """These options; UserError for the first that cannot be meant."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"--url: found {self.url!r}, expected http://HOST:PORT")
        given = [bool(self.sessions), bool(self.rate_per_s), self.trace is not None]
        if sum(given) != 1:
            raise UserError(f"--sessions, --rate, --trace: found {sum(given)} of them, expected one")
        if self.trace is None and not self.duration_s and not self.requests:
            raise UserError("--duration, --requests: found neither, expected an end of the run")
        for option, number, low in (
            ("--sessions", self.sessions, 0), ("--rate", self.rate_per_s, 0), ("--duration", self.duration_s, 0),
            ("--requests", self.requests, 0), ("--shared-prefix", self.shared_prefix_tokens, 0),
            ("--context-limit", self.context_limit, 0), ("--temperature", self.temperature, 0),
            ("--seed", self.seed, 0), ("--drain", self.drain_s, 0), ("--max-concurrency", self.max_concurrency, 1),
        ):  # fmt: skip
            if not (math.isfinite(number) and number >= low):
                raise UserError(f"{option}: found {number:g}, expected {low} or more")
        for option, number in (
            ("--speed", self.speed),
            ("--burstiness", self.burstiness),
            ("--timeout", self.timeout_s),
        ):
            if not (math.isfinite(number) and number > 0):
                raise UserError(f"{option}: found {number:g}, expected more than 0")
        if self.sessions and self.requests and self.requests < self.sessions:
            raise UserError(
                f"--requests: found {self.requests}, expected one or more for each of {self.sessions} sessions"
            )
        if not 0 <= self.token_ids[0] < self.token_ids[1]:
            raise UserError(f"--token-ids: found {self.token_ids[0]}:{self.token_ids[1]}, expected 0 <= LOW < HIGH")
        if self.history not in HISTORIES:
            raise UserError(f"--history: found {self.history!r}, expected one of: {', '.join(HISTORIES)}")
        if self.is_plain and (self.is_ignoring_eos or self.priority is not None):
            raise UserError("--plain: found beside --ignore-eos or --priority, which are no part of OpenAI's API")
        self.draws()
        return self


class Draws(msgspec.Struct, frozen=True):
    """The distributions of synthetic sessions."""

    turns: Draw
    prompt_tokens: Draw
    turn_tokens: Draw
    max_tokens: Draw
    think_s: Draw


def classes_of(option: str, text: str) -> dict[ServiceClass, float]:
    """``agent=1,chat=3`` or just ``agent`` as numbers by class; UserError otherwise."""
    found: dict[ServiceClass, float] = {}
    for part in text.split(","):
        name, _, number = part.strip().partition("=")
        try:
            one = ServiceClass[name.strip().upper()]
            value = float(number or 1)
        except (KeyError, ValueError):
            names = ", ".join(one.name.lower() for one in ServiceClass)
            raise UserError(f"{option}: found {part.strip()!r}, expected NAME or NAME=NUMBER of: {names}") from None
        if not math.isfinite(value) or one in found:
            raise UserError(f"{option}: found {text!r}, expected each class once, with a finite number")
        found[one] = value
    return found
