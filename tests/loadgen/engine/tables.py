"""Small request tables for the engine's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from loadgen.requests import RequestTable, empty_table
from schemas.classes import ServiceClass

__all__ = ["empty_table", "one_session", "plain", "random_table"]


def plain(
    arrival_s: Sequence[float],
    prompt: npt.ArrayLike = 1000,
    output: npt.ArrayLike = 100,
    max_tokens: npt.ArrayLike = 4096,
    kind: ServiceClass = ServiceClass.CHAT,
) -> RequestTable:
    """Requests without sessions."""
    n = len(arrival_s)
    full = np.zeros(n, np.int64)
    return RequestTable(
        arrival_s=np.array(arrival_s, np.float64),
        prompt_tokens=full + np.asarray(prompt, np.int64),
        cached_tokens=full.copy(),
        output_tokens=full + np.asarray(output, np.int64),
        max_tokens=full + np.maximum(np.asarray(max_tokens, np.int64), np.asarray(output, np.int64)),
        service_class=np.full(n, int(kind), np.uint8),
        session=np.arange(n, dtype=np.int64),
        next_turn=full - 1,
        think_s=np.zeros(n),
    ).check()


def one_session(
    turns: int,
    first_prompt: int = 4000,
    added: int = 100,
    output: int = 50,
    think_s: float = 10.0,
    kind: ServiceClass = ServiceClass.CHAT,
    sessions: int = 1,
    apart_s: float = 0.5,
) -> RequestTable:
    """``sessions`` alike, ``apart_s`` apart, each turn adding to the context of the one before."""
    k = np.tile(np.arange(turns), sessions)
    session = np.repeat(np.arange(sessions), turns)
    cached = np.where(k > 0, first_prompt + (k - 1) * added + k * output, 0)
    last = k == turns - 1
    return RequestTable(
        arrival_s=np.where(k == 0, session * apart_s, np.nan),
        prompt_tokens=np.where(k > 0, cached + added, first_prompt).astype(np.int64),
        cached_tokens=cached.astype(np.int64),
        output_tokens=np.full(len(k), output, np.int64),
        max_tokens=np.full(len(k), 4096, np.int64),
        service_class=np.full(len(k), int(kind), np.uint8),
        session=session.astype(np.int64),
        next_turn=np.where(last, -1, np.arange(len(k)) + 1).astype(np.int64),
        think_s=np.where(last, 0.0, think_s),
    ).check()


def random_table(rng: np.random.Generator, rate_per_s: float, duration_s: float, scale: float) -> RequestTable:
    """Sessions of mixed classes; ``scale`` stretches prompts and outputs."""
    sessions = max(1, int(rate_per_s * duration_s / 2))
    turns = rng.geometric(0.5, sessions)
    session = np.repeat(np.arange(sessions), turns)
    count = len(session)
    first = np.cumsum(turns) - turns
    k = np.arange(count) - first[session]
    added = np.clip(rng.lognormal(np.log(500 * scale), 1.0, count), 1, 20_000).astype(np.int64)
    output = np.clip(rng.lognormal(np.log(150 * scale), 1.0, count), 1, 4000).astype(np.int64)
    grown = np.cumsum(added + output)
    history = grown - (grown - added - output)[first][session] - added - output
    last = k == turns[session] - 1
    arrival = np.full(count, np.nan)
    arrival[first] = np.sort(rng.uniform(0.0, duration_s, sessions))
    return RequestTable(
        arrival_s=arrival,
        prompt_tokens=history + added,
        cached_tokens=np.where(k > 0, (history * rng.choice([1.0, 0.5], count)).astype(np.int64), 0),
        output_tokens=output,
        max_tokens=np.maximum(rng.choice([512, 4096], count), output),
        service_class=rng.integers(0, 4, sessions).astype(np.uint8)[session],
        session=session.astype(np.int64),
        next_turn=np.where(last, -1, np.arange(count) + 1).astype(np.int64),
        think_s=np.where(last, 0.0, rng.exponential(5.0, count)),
    ).check()
