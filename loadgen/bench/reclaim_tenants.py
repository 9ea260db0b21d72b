"""The unlike tenants of the reclaim benchmark, their demand, which shifts from one to the next, and its requests.

Every period another tenant is the busy one: its sessions come faster, and a backlog of them arrives at once (a
batch that is submitted, a team that starts its agents). The rest go on at a low rate. Pure, one answer per seed.
"""

from __future__ import annotations

import dataclasses
from typing import Final, NamedTuple

import msgspec
import numpy as np

from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass


class TenantSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of traffic; token counts are lognormal (median, sigma of the logarithm)."""

    name: str
    service_class: ServiceClass
    first_tokens: float
    """Median prompt of a session's first turn."""
    added_tokens: float
    """Median of what each later turn adds."""
    output_tokens: float
    sigma: float
    turns: float
    """Mean turns of a session, geometric."""
    think_s: float
    """Mean time between turns, exponential."""
    quiet_per_s: float
    """Sessions a second while another tenant is the busy one."""
    busy_factor: float
    """How much faster they come in its own period."""

    @property
    def keeps(self) -> bool:
        """Whether KV of finished requests is kept: not of requests that have no next turn by their nature."""
        return self.turns > 1

    @property
    def limits(self) -> ClassLimits:
        """What a request of it must meet; a batch has a completion limit alone."""
        return DEFAULT_LIMITS[self.service_class]


TENANTS: Final = (
    TenantSpec(name="chat", service_class=ServiceClass.CHAT, first_tokens=900, added_tokens=250, output_tokens=260,
               sigma=0.8, turns=4, think_s=18, quiet_per_s=0.55, busy_factor=2.0),
    TenantSpec(name="agent", service_class=ServiceClass.AGENT, first_tokens=7000, added_tokens=1200, output_tokens=220,
               sigma=0.5, turns=6, think_s=9, quiet_per_s=0.10, busy_factor=2.0),
    TenantSpec(name="documents", service_class=ServiceClass.AGENT, first_tokens=16000, added_tokens=300,
               output_tokens=350, sigma=0.5, turns=2, think_s=25, quiet_per_s=0.06, busy_factor=2.0),
    TenantSpec(name="batch", service_class=ServiceClass.BATCH, first_tokens=2200, added_tokens=0, output_tokens=500,
               sigma=0.6, turns=1, think_s=0, quiet_per_s=0.25, busy_factor=2.0),
)  # fmt: skip
MAX_CONTEXT_TOKENS: Final = 65_536
BACKLOG_SPREAD_S: Final = 1.0
"""A backlog's sessions arrive over this time."""


class Turn(NamedTuple):
    """One request of a session."""

    prompt_tokens: int
    """The whole context, history included."""
    output_tokens: int
    think_s: float
    """Until the next turn, after this one finished."""


class Session(NamedTuple):
    """A conversation; the engine does not know which turn is its last."""

    number: int
    arrival_s: float
    turns: tuple[Turn, ...]


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


class Demand(NamedTuple):
    """What one run replays."""

    sessions: tuple[tuple[Session, ...], ...]
    """Per tenant, by arrival."""
    shifts: tuple[tuple[float, int], ...]
    """(instant, tenant that becomes the busy one)."""


def demand(
    specs: tuple[TenantSpec, ...], seconds: float, period_s: float, backlog_tokens: float, load: float, seed: int
) -> Demand:
    """Sessions of ``seconds``; every ``period_s`` (jittered by a fifth) the next tenant becomes the busy one and
    ``backlog_tokens`` of prompts arrive for it at once. ``load`` multiplies the rates alone."""
    rng = np.random.default_rng(seed)
    shifts: list[tuple[float, int]] = []
    at, busy = period_s, int(rng.integers(len(specs)))
    while at < seconds - 0.5 * period_s:
        shifts.append((float(np.round(at, 1)), busy))
        at += period_s * float(rng.uniform(0.8, 1.2))
        busy = (busy + int(rng.integers(1, len(specs)))) % len(specs)
    number = 0
    per_tenant: list[tuple[Session, ...]] = []
    for tenant, spec in enumerate(specs):
        arrivals = _arrivals(spec, tenant, shifts, seconds, load, rng)
        backlogs = [at for at, who in shifts if who == tenant]
        drawn: list[Session] = []
        for arrival in arrivals:
            drawn.append(_session(spec, number, float(arrival), rng))
            number += 1
        for start in backlogs:
            left = backlog_tokens
            while left > 0:
                session = _session(spec, number, start + float(rng.uniform(0.0, BACKLOG_SPREAD_S)), rng)
                number += 1
                left -= session.turns[0].prompt_tokens
                drawn.append(session)
        per_tenant.append(tuple(sorted(drawn, key=lambda session: session.arrival_s)))
    return Demand(tuple(per_tenant), tuple(shifts))


def _arrivals(
    spec: TenantSpec,
    tenant: int,
    shifts: list[tuple[float, int]],
    seconds: float,
    load: float,
    rng: np.random.Generator,
) -> list[float]:
    edges = [0.0, *(at for at, _ in shifts), seconds]
    owners = [-1, *(who for _, who in shifts)]
    arrivals: list[float] = []
    for start, end, who in zip(edges[:-1], edges[1:], owners, strict=True):
        rate = load * spec.quiet_per_s * (spec.busy_factor if who == tenant else 1.0)
        arrivals.extend(rng.uniform(start, end, int(rng.poisson(rate * (end - start)))).tolist())
    return sorted(arrivals)


def _session(spec: TenantSpec, number: int, arrival_s: float, rng: np.random.Generator) -> Session:
    count = int(rng.geometric(1.0 / spec.turns))
    turns: list[Turn] = []
    context = 0
    for turn in range(count):
        median = spec.first_tokens if turn == 0 else spec.added_tokens
        context += max(16, int(median * np.exp(rng.normal(0.0, spec.sigma))))
        output = max(4, int(spec.output_tokens * np.exp(rng.normal(0.0, spec.sigma))))
        if context + output > MAX_CONTEXT_TOKENS:
            break
        turns.append(Turn(context, output, float(rng.exponential(spec.think_s)) if spec.think_s else 0.0))
        context += output
    if not turns:
        turns.append(Turn(MAX_CONTEXT_TOKENS // 2, 64, spec.think_s))
    return Session(number, arrival_s, tuple(turns))
