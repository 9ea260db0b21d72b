"""The built-in workloads: chat, code, long, agent and mixed, without any file.

Pure and seeded: the same arguments give the same workload.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from loadgen.arrivals import DAY_S, arrivals, swung
from loadgen.requests import F8, I8, NO_TURN, RequestTable, default_max_tokens
from loadgen.workload.lengths import fitted
from loadgen.workload.published import FIGURES, MIXED_SHARES, Figures
from loadgen.workload.sessions import DrawnSessions, SessionModel, draw_sessions
from loadgen.workload.table import Workload, merged
from schemas.classes import ServiceClass
from services.errors import UserError

KINDS: Final = ("chat", "code", "long", "agent", "mixed")

AGENT_CONTEXT_SCALE: Final = 0.25
"""Published agent prompts (p50 104k) fill a 131k context; a quarter of them fits an 8B model on one card."""

DEFAULT_SWING: Final = 0.4
"""Depth of the daily swing: the rate goes from 0.6 to 1.4 of the mean over a day (an assumption)."""


def builtin(
    kind: str,
    duration_s: float = 600.0,
    rate_scale: float = 1.0,
    seed: int = 0,
    context_scale: float | None = None,
    swing: float = DEFAULT_SWING,
    swing_period_s: float = DAY_S,
    service_class: ServiceClass | None = None,
) -> Workload:
    """A workload of this kind, fitted to the published figures, over ``duration_s`` seconds.

    ``rate_scale`` multiplies the published rate. ``context_scale`` multiplies all lengths: None is a quarter
    for agent sessions and 1 for the rest, and the notes say so. ``swing`` in [0, 1) is the depth of the daily
    swing around the mean (a replay starts at the mean, rising). ``service_class`` overrides the kind's own.
    UserError for a kind that does not exist and numbers out of range.
    """
    if kind not in KINDS:
        raise UserError(f"workload: found {kind!r}, expected one of: {', '.join(KINDS)}")
    _within("duration_s", duration_s, 1e-3, 1e8)
    _within("rate_scale", rate_scale, 1e-6, 1e6)
    _within("swing", swing, 0.0, 0.99)
    _within("swing_period_s", swing_period_s, 1.0, 1e9)
    if context_scale is not None:
        _within("context_scale", context_scale, 1e-4, 100.0)
    if kind == "mixed":
        streams = np.random.SeedSequence(seed).spawn(len(MIXED_SHARES))
        parts = [
            _one(
                name,
                duration_s,
                rate_scale * share,
                np.random.default_rng(stream),
                context_scale,
                swing,
                swing_period_s,
            )
            for (name, share), stream in zip(MIXED_SHARES.items(), streams, strict=True)
        ]
        shares = ", ".join(f"{share:g} x {name}" for name, share in MIXED_SHARES.items())
        whole = merged("built-in mixed", f"generated: {shares}; rate x {rate_scale:g}; seed {seed}", parts)
    else:
        rng = np.random.default_rng(seed)
        whole = _one(kind, duration_s, rate_scale, rng, context_scale, swing, swing_period_s, seed)
    return whole if service_class is None else whole.with_class(service_class)


def _one(
    kind: str,
    duration_s: float,
    rate_scale: float,
    rng: np.random.Generator,
    context_scale: float | None,
    swing: float,
    swing_period_s: float,
    seed: int | None = None,
) -> Workload:
    figures = FIGURES[kind]
    scale = context_scale if context_scale is not None else (AGENT_CONTEXT_SCALE if kind == "agent" else 1.0)
    rate_per_s = figures.rate_per_s * rate_scale
    drawn = _drawn(figures, rate_per_s, duration_s, scale, rng)
    arrival_s = drawn.arrival_s.copy()
    first = np.isfinite(arrival_s)
    order = np.argsort(arrival_s[first], kind="stable")
    rising = arrival_s[first][order]
    warped = np.empty_like(rising)
    warped[order] = swung(rising, swing, swing_period_s)
    arrival_s[first] = warped
    classes = np.full(len(arrival_s), int(figures.service_class), dtype=np.uint8)
    table = RequestTable(
        arrival_s=arrival_s,
        prompt_tokens=drawn.prompt_tokens,
        cached_tokens=drawn.cached_tokens,
        output_tokens=drawn.output_tokens,
        max_tokens=default_max_tokens(classes, drawn.prompt_tokens, drawn.output_tokens),
        service_class=classes,
        session=drawn.session,
        next_turn=drawn.next_turn,
        think_s=drawn.think_s,
    )
    origin = f"generated from published figures; rate x {rate_scale:g}"
    return (
        Workload(
            name=f"built-in {kind}",
            source=origin + (f"; seed {seed}" if seed is not None else ""),
            requests=table,
            group=drawn.session,
            duration_s=duration_s,
            notes=_notes(kind, figures, scale),
        )
        .in_order()
        .check()
    )


def _drawn(
    figures: Figures, rate_per_s: float, duration_s: float, scale: float, rng: np.random.Generator
) -> DrawnSessions:
    prompt, output = fitted(*figures.prompt).scaled(scale), fitted(*figures.output).scaled(scale)
    if figures.prefix_reuse:
        model = SessionModel(
            prompt=prompt,
            output=output,
            prefix_reuse=figures.prefix_reuse,
            turns_mean=figures.turns_mean,
            think_p50_s=figures.think_p50_s,
            think_p90_s=figures.think_p90_s,
        )
        return draw_sessions(model, rate_per_s, figures.cv, duration_s, rng)
    arrival_s: F8 = arrivals(rate_per_s, figures.cv, duration_s, rng)
    count = len(arrival_s)
    none: I8 = np.zeros(count, dtype=np.int64)
    return DrawnSessions(
        arrival_s=arrival_s,
        prompt_tokens=prompt.draw(count, rng),
        cached_tokens=none,
        output_tokens=output.draw(count, rng),
        session=np.arange(count, dtype=np.int64),
        next_turn=np.full(count, NO_TURN, dtype=np.int64),
        think_s=np.zeros(count),
    )


def _notes(kind: str, figures: Figures, scale: float) -> tuple[str, ...]:
    notes = []
    if scale != 1.0:
        told = f"divided by {1 / scale:g}" if scale < 1 else f"multiplied by {scale:g}"
        notes.append(f"{kind}: published prompt and output lengths {told} (context scale {scale:g})")
    if figures.assumed:
        notes.append(f"{kind}: {figures.assumed}")
    return tuple(notes)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise UserError(f"{name}: found {value!r}, expected {low:g} to {high:g}")
