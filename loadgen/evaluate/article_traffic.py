"""The article's cluster: its cards, its traffic, and which of two weeks' hours are simulated (shared ARTICLES digest).

90 % of prompts lognormal with median 500 tokens, 10 % uniform 6,000 to 8,000, outputs as Azure chat, day to night 3
to 1, bursts of the whole cluster. Requests are dealt to cards at random, so that cards are independent given the
cluster's rate: a stated number of cards at stated hours stands for all of them. Pure, seeded.
"""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from loadgen.engine.specs import FleetConfig
from loadgen.fleet_tables import warped
from loadgen.requests import F8, NO_TURN, RequestTable, default_max_tokens
from loadgen.workload.lengths import fitted, tokens
from loadgen.workload.published import FIGURES
from schemas.classes import ServiceClass

CARDS: Final = 128
DAYS: Final = 14
DAY_S: Final = 86_400.0
SHORT_MEDIAN, SHORT_SIGMA = 500.0, 1.0
"""The width is an assumption: nothing is said of it but that prompts go from 50 to 8,000 tokens."""
SHORT_RANGE: Final = (50, 8000)
LONG_SHARE, LONG_RANGE = 0.1, (6000, 8000)
LONG_TOKENS: Final = 6000
"""From here on a request is long."""
SWING: Final = 0.5
"""The rate goes from 0.5 to 1.5 of its mean: night to day 1 to 3."""
BURST, BURST_S, CALM_S = 2.5, 15.0, 75.0
"""Assumptions: for some 15 s, every 90 s or so, requests come at 2.5 times the rate."""

CONFIG: Final = FleetConfig(card="A100-80G", model="Llama-3.1-70B-4bit", workers_per_card=1)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What is simulated of 128 cards x 14 days."""

    segments: int = 28
    """Stretches of time, spread evenly over the hours of the day and over the days."""
    cards: int = 8
    """In each."""
    seconds: float = 900.0
    """Counted of each."""
    warm_up_s: float = 180.0
    """Before: the card fills, the featurizer's windows too."""

    @property
    def duration_s(self) -> float:
        """Simulated of each stretch."""
        return self.warm_up_s + self.seconds

    @property
    def card_hours(self) -> float:
        """Counted, all together."""
        return self.segments * self.cards * self.seconds / 3600.0

    def begins_s(self) -> F8:
        """Start of each stretch's counted part, float64 [segments], seconds since the first midnight."""
        k = np.arange(self.segments)
        days = (k * DAYS) // self.segments
        hours = (k * 0.618033988749895) % 1.0  # the golden ratio spreads any number of them over the day
        return days * DAY_S + hours * DAY_S

    def statement(self) -> str:
        """For a report."""
        return (
            f"{self.segments} stretches of {self.seconds:g} s spread over the hours of {DAYS} days x {self.cards} of "
            f"{CARDS} cards, {self.card_hours:,.0f} card-hours of {CARDS * DAYS * 24:,}; {self.warm_up_s:g} s before "
            "each are simulated and not counted"
        )


def rate_at(day_s: F8) -> F8:
    """Rate over its mean at these times, float64: highest at 14 h, lowest at 2 h."""
    return np.asarray(1.0 + SWING * np.cos(2 * np.pi * (day_s - 14 * 3600.0) / DAY_S))


def tables(sample: Sample, rate_per_s: float, segment: int, seed: int) -> list[RequestTable]:
    """Requests of each of the sample's cards in a stretch at a mean of ``rate_per_s`` a card."""
    begin_s = float(sample.begins_s()[segment]) - sample.warm_up_s
    seconds = np.arange(int(np.ceil(sample.duration_s)), dtype=np.float64)
    rate = rate_at(begin_s + seconds)
    rng = np.random.default_rng([0xA7C, seed, segment])
    at = rng.exponential(CALM_S)
    bursts = np.ones(len(rate))
    while at < sample.duration_s:
        length = rng.exponential(BURST_S)
        bursts[int(at) : int(at + length) + 1] = BURST
        at += length + rng.exponential(CALM_S)
    # Bursts come on top of the mean everywhere alike, so the mean over time stays what was asked for.
    rate *= bursts / (1.0 + (BURST - 1.0) * BURST_S / (BURST_S + CALM_S))
    return [_table(rate, rate_per_s, sample.duration_s, np.random.default_rng([0xA7C, seed, segment, card]))
            for card in range(sample.cards)]  # fmt: skip


def _table(rate: F8, rate_per_s: float, duration_s: float, rng: np.random.Generator) -> RequestTable:
    count = int(rng.poisson(rate_per_s * rate.sum() * duration_s / len(rate)))
    arrival_s = warped(np.sort(rng.uniform(0.0, duration_s, count)), rate, duration_s)
    short = np.clip(rng.lognormal(np.log(SHORT_MEDIAN), SHORT_SIGMA, count), *SHORT_RANGE)
    long = rng.uniform(*LONG_RANGE, count)
    prompt = tokens(np.where(rng.random(count) < LONG_SHARE, long, short))
    output = fitted(*FIGURES["chat"].output).draw(count, rng)
    classes = np.full(count, int(ServiceClass.CHAT), np.uint8)
    return RequestTable(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        cached_tokens=np.zeros(count, np.int64),
        output_tokens=output,
        max_tokens=default_max_tokens(classes, prompt, output),
        service_class=classes,
        session=np.arange(count, dtype=np.int64),
        next_turn=np.full(count, NO_TURN, np.int64),
        think_s=np.zeros(count),
    )
