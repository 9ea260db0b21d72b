"""The requests of a randomised fleet.

A tenant's nominal rate fills its share of the card's time by an estimate from the iteration times; a fleet's
``unit_factor`` (``loadgen.fleets``) times the nominal rates is load 1.0.
"""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from loadgen.configurations import CONTEXTS_LEAST, Configuration, Shape, Tenant, longest_tokens, q0_tokens
from loadgen.engine.calibration import coefficients
from loadgen.engine.specs import FleetConfig
from loadgen.requests import F8, I8, RequestTable, default_max_tokens
from loadgen.workload import builtin
from loadgen.workload.builtin import AGENT_CONTEXT_SCALE
from loadgen.workload.chains import turns
from loadgen.workload.lengths import fitted
from loadgen.workload.published import FIGURES

_BURST_S: Final = 15.0
_CALM_S: Final = 60.0
_NOMINAL_BATCH: Final = 64.0


def context_scale(fleet: FleetConfig, place: int, tenant: Tenant) -> float:
    """What lengths are multiplied by: the kind's own scale, less where a worker's Q0 is small beside them."""
    scale = AGENT_CONTEXT_SCALE if tenant.kind == "agent" else 1.0
    mean = FIGURES[tenant.kind].prompt[0]
    return min(scale, q0_tokens(fleet, place) / (CONTEXTS_LEAST * mean))


def nominal_rate_per_s(fleet: FleetConfig, place: int, tenant: Tenant) -> float:
    """Requests per second that take the tenant's share of the card's time, roughly: prompts computed in whole chunks,
    tokens decoded in a batch of what half of Q0 holds, at most 64."""
    figures, scale = FIGURES[tenant.kind], context_scale(fleet, place, tenant)
    prompt, output = (fitted(*one).scaled(scale).mean() for one in (figures.prompt, figures.output))
    times = coefficients(fleet.card_spec().name, tenant.model)
    context = prompt + output / 2
    batch = min(_NOMINAL_BATCH, max(1.0, 0.5 * q0_tokens(fleet, place) / context))
    fresh = prompt * (1.0 - figures.prefix_reuse)
    prefill_ms = fresh * (times.gemm_token + times.prefill_token + times.prefill_token_context * prompt / 2)
    decode_s = output * (times.iteration_s(batch, batch * context, 0, 0) + fleet.overhead_s) / batch
    return tenant.share / (prefill_ms * 1e-3 + decode_s)


def _profile(shape: Shape, duration_s: float, place: int, count: int, seed: int) -> F8:
    """Relative rate in each second, float64 [n], mean 1; bursts are each tenant's own, or shared where peaks are."""
    seconds = np.arange(max(2, int(np.ceil(duration_s))), dtype=np.float64)
    phase = 2 * np.pi * place / count if shape.opposed else 0.0
    start = np.random.default_rng([seed, 1]).uniform(0.0, 2 * np.pi)
    rate = 1.0 + shape.swing * np.sin(2 * np.pi * seconds / shape.period_s + start + phase)
    if shape.burst > 1.0:
        rng = np.random.default_rng([seed, 2, place if shape.opposed else 0])
        at = rng.exponential(_CALM_S)
        while at < duration_s:
            length = rng.exponential(_BURST_S)
            rate[int(at) : int(at + length) + 1] *= shape.burst
            at += length + rng.exponential(_CALM_S)
    return np.asarray(rate / rate.mean(), dtype=np.float64)


def warped(times_s: F8, rate: F8, duration_s: float) -> F8:
    """Arrivals within [0, duration_s) moved so that their rate is ``rate`` (relative, one a second) times theirs."""
    passed = np.concatenate([[0.0], np.cumsum(rate)]) * (duration_s / rate.sum())
    return np.interp(times_s, passed, np.linspace(0.0, duration_s, len(passed)))


def _shifted(table: RequestTable, factor: F8) -> RequestTable:
    """Prompts and outputs times ``factor`` [n], alike for all turns of a session, which still contain each other."""
    prompt: I8 = np.maximum(1, np.rint(table.prompt_tokens * factor)).astype(np.int64)
    output: I8 = np.maximum(1, np.rint(table.output_tokens * factor)).astype(np.int64)
    cached: I8 = np.minimum(np.floor(table.cached_tokens * factor).astype(np.int64), prompt - 1)
    for rows, following in turns(table):
        cached[following] = np.minimum(cached[following], prompt[rows] + output[rows])
    return dataclasses.replace(
        table, prompt_tokens=prompt, output_tokens=output, cached_tokens=cached,
        max_tokens=default_max_tokens(table.service_class, prompt, output),
    )  # fmt: skip


def _table(configuration: Configuration, place: int, seed: int, duration_s: float, factor: float) -> RequestTable:
    fleet, tenant, shape = configuration.fleet, configuration.tenants[place], configuration.shape
    rate = factor * nominal_rate_per_s(fleet, place, tenant)
    workload = builtin(
        tenant.kind, duration_s, rate / FIGURES[tenant.kind].rate_per_s, seed,
        context_scale(fleet, place, tenant), swing=0.0, service_class=tenant.service_class,
    )  # fmt: skip
    table = workload.requests
    shared = seed // fleet.workers_per_card // 2**8  # what tenants of a card have in common
    profile = _profile(shape, duration_s, place, len(configuration.tenants), shared)
    first = table.is_first
    arrival_s = table.arrival_s.copy()
    arrival_s[first] = warped(arrival_s[first], profile, duration_s)
    table = dataclasses.replace(table, arrival_s=arrival_s)
    if shape.length_shift > 0.0:
        rng = np.random.default_rng([shared, 3])
        stretches = np.exp(rng.normal(0.0, shape.length_shift, int(duration_s / shape.stretch_s) + 1))
        begin_s = np.where(first, arrival_s, 0.0)
        for rows, following in turns(table):
            begin_s[following] = begin_s[rows]
        table = _shifted(table, stretches[(begin_s / shape.stretch_s).astype(np.int64)])
    whole = dataclasses.replace(workload, requests=table)
    return whole.within_context(longest_tokens(fleet, place)).in_order().requests


def tables_for(configuration: Configuration, seed: int, duration_s: float, unit_factor: float) -> list[RequestTable]:
    """One table per worker, card by card, at the configuration's load; calls longer than a worker's Q0 (its
    ``max_model_len``) are left out."""
    return tables_at(configuration, seed, duration_s, configuration.load * unit_factor)


def tables_at(configuration: Configuration, seed: int, duration_s: float, factor: float) -> list[RequestTable]:
    """The same at ``factor`` times the nominal rates."""
    per_card = configuration.fleet.workers_per_card
    return [
        _table(configuration, place, ((seed * 2**10 + card) * 2**8) * per_card + place, duration_s, factor)
        for card in range(configuration.fleet.cards)
        for place in range(per_card)
    ]
