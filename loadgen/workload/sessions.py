"""Sessions in statistical balance: turns, growing contexts, think times.

Pure. Two wishes meet here: over all requests the lengths must follow the published distribution, and inside
a session each prompt must contain the one before it. A session is therefore a walk upwards along the quantile
axis in random steps; past the top it wraps to the bottom, which is a context compaction: a short prompt, cold.
Such a rotation keeps the uniform distribution of quantiles, so the lengths fit whatever the step; the step
sets how much of a prompt is new, and so the prefix reuse.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from loadgen.arrivals import arrivals
from loadgen.requests import F8, I8, NO_TURN, Bool
from loadgen.workload.chains import NOMINAL_PREFILL_TOKENS_PER_S, NOMINAL_TPOT_S
from loadgen.workload.lengths import Lengths, tokens
from loadgen.workload.published import THINK_MAX_S

_Z90 = 1.2815515655446004


@dataclasses.dataclass(frozen=True)
class SessionModel:
    """What sessions look like: lengths in tokens, times in seconds."""

    prompt: Lengths
    output: Lengths
    prefix_reuse: float
    turns_mean: float
    think_p50_s: float
    think_p90_s: float

    def think(self, count: int, rng: np.random.Generator) -> F8:
        """Think times, float64 seconds: lognormal through p50 and p90, capped at an hour."""
        sigma = np.log(self.think_p90_s / self.think_p50_s) / _Z90
        drawn = rng.lognormal(np.log(self.think_p50_s), sigma, count)
        return np.minimum(drawn, THINK_MAX_S)

    def cycle_s(self, rng: np.random.Generator) -> float:
        """Nominal mean time from one turn to the next, seconds."""
        call_s = self.output.mean() * NOMINAL_TPOT_S
        call_s += (1 - self.prefix_reuse) * self.prompt.mean() / NOMINAL_PREFILL_TOKENS_PER_S
        return float(self.think(20_000, rng).mean()) + call_s

    def reuse(self, step: float) -> float:
        """Share of a later turn's prompt that its predecessor's context holds, steps exponential."""
        at = (np.arange(512) + 0.5) / 512
        draws = -np.log(1.0 - (np.arange(32) + 0.5) / 32) * step
        here, there = self.prompt.quantile(at)[:, None], at[:, None] + draws[None, :]
        following = self.prompt.quantile(np.minimum(there, 1.0))
        shared = np.minimum(here + self.output.mean(), following)
        return float(np.where(there < 1.0, shared, 0.0).mean() / self.prompt.mean())


@functools.lru_cache(maxsize=64)
def step_of(model: SessionModel) -> float:
    """Mean step along the quantile axis that gives the model's prefix reuse.

    ValueError when the sessions are too short for it: first turns alone are cold.
    """
    warm = 1.0 - 1.0 / model.turns_mean
    low, high = 1e-6, 1.0
    if model.reuse(low) * warm < model.prefix_reuse:
        raise ValueError(
            f"prefix_reuse {model.prefix_reuse}: expected below {model.reuse(low) * warm:.2f}, which "
            f"sessions of {model.turns_mean:g} turns allow"
        )
    for _ in range(30):  # reuse falls as the step grows
        middle = (low * high) ** 0.5
        if model.reuse(middle) * warm > model.prefix_reuse:
            low = middle
        else:
            high = middle
    return float((low * high) ** 0.5)


@dataclasses.dataclass(frozen=True, eq=False)
class DrawnSessions:
    """Flat arrays of all turns, session after session; shapes ``(n,)``."""

    arrival_s: F8
    prompt_tokens: I8
    cached_tokens: I8
    output_tokens: I8
    session: I8
    next_turn: I8
    think_s: F8


def draw_sessions(
    model: SessionModel, rate_per_s: float, cv: float, duration_s: float, rng: np.random.Generator
) -> DrawnSessions:
    """Sessions whose turns come at ``rate_per_s`` from the first second on.

    The system is in balance at 0: by Little's law rate x cycle sessions are already open, each about to take
    its next turn after what is left of a think time; their remaining turns are geometric like a new session's.
    New ones start at rate / turns_mean with gaps of this CV. Turns that cannot come before ``duration_s`` are
    not drawn.
    """
    cycle_s = model.cycle_s(rng)
    # Of an open session's time only the part before its first turn is missing from a fresh start.
    already = rng.poisson(rate_per_s * cycle_s * (1.0 - 1.0 / model.turns_mean))
    waits_s = model.think(max(already, 1) * 8, rng)
    longer = rng.choice(waits_s, size=already, p=waits_s / waits_s.sum())  # long waits are met more often
    starts_s = np.concatenate(
        [longer * rng.random(already), arrivals(rate_per_s / model.turns_mean, cv, duration_s, rng)]
    )
    starts_s = starts_s[starts_s < duration_s]
    counts = rng.geometric(1.0 / model.turns_mean, len(starts_s))
    counts = np.minimum(counts, _turns_within(model, duration_s))
    rows = int(counts.sum())
    session = np.repeat(np.arange(len(starts_s)), counts)
    first = np.zeros(rows, dtype=bool)
    first[np.cumsum(counts) - counts] = True
    place = _walk(first, rng.random(len(starts_s)), rng.exponential(step_of(model), rows))
    prompt = tokens(model.prompt.quantile(place % 1.0))
    output = model.output.draw(rows, rng)
    wrapped = np.floor(place[1:]) > np.floor(place[:-1])
    cached = np.zeros(rows, dtype=np.int64)
    cached[1:] = np.minimum(prompt[:-1] + output[:-1], prompt[1:] - 1)
    cached[1:][wrapped] = 0
    cached[first] = 0
    think = model.think(rows, rng)
    last = np.ones(rows, dtype=bool)
    last[:-1] = first[1:]
    think[last] = 0.0
    # What a chain cannot reach before the end, were its calls instant, need not exist.
    waited_s = np.concatenate([[0.0], np.cumsum(think)[:-1]]) if rows else np.empty(0)
    origin = np.repeat(np.flatnonzero(first), counts)
    kept = starts_s[session] + waited_s - waited_s[origin] < duration_s
    last = last[kept] | np.append(first[kept][1:], True)
    next_turn = np.where(last, NO_TURN, np.arange(1, len(last) + 1)).astype(np.int64)
    return DrawnSessions(
        arrival_s=np.where(first, starts_s[session], np.nan)[kept],
        prompt_tokens=prompt[kept],
        cached_tokens=cached[kept],
        output_tokens=output[kept],
        session=session[kept].astype(np.int64),
        next_turn=next_turn,
        think_s=np.where(last, 0.0, think[kept]),
    )


def _turns_within(model: SessionModel, duration_s: float) -> int:
    """A bound on turns that any session takes within the duration, so that no memory goes to the others."""
    return int(8 * duration_s / model.think_p50_s) + 50


def _walk(first: Bool, begin: F8, steps: F8) -> F8:
    """Places on the quantile axis: each session from its ``begin`` on, by the steps of its later turns."""
    moved = np.where(first, 0.0, steps)
    total = np.cumsum(moved)
    origin = np.flatnonzero(first)
    counts = np.diff(np.append(origin, len(first)))
    return np.asarray(np.repeat(begin - total[origin], counts) + total, dtype=np.float64)
