"""Made-up nodes must look sane to whoever reads them."""

from __future__ import annotations

import numpy as np

from schemas.metrics import COUNTER_COLUMNS
from services.clock import ManualClock
from services.featurizer.tracker import Tracker, TrackerSettings
from services.telemetry.sampler import Sampler
from services.telemetry.sources.synthetic import Synthetic, SyntheticSource


def test_counters_only_grow_and_gauges_move() -> None:
    numbers = Synthetic(4, 2, np.random.default_rng(0))
    numbers.step()
    before = numbers.metrics.copy()
    numbers.step()
    counters = list(COUNTER_COLUMNS)
    assert (numbers.metrics[:, counters] >= before[:, counters]).all()
    assert (numbers.metrics != before).any(axis=1).all(), "every worker moves"


async def test_the_featurizer_finds_nothing_odd_in_them() -> None:
    clock = ManualClock()
    source = SyntheticSource(["a", "b", "c"], 8, clock, np.random.default_rng(1), step_s=0.0)
    tracker = Tracker(TrackerSettings(window_steps=5))
    sampler = Sampler(lambda: 1, "synthetic")
    sampler.begin()
    holds = []
    async for reading in source.readings():
        if reading.node == "a":
            clock.advance_to(clock.now_ns() + 2_000_000_000)
        sample = sampler.take(reading)
        assert sample is not None
        states = tracker.observe(sample)
        assert states is not None
        holds += states.holds.tolist()
        if reading.step == 8 and reading.node == "c":
            break
    assert tracker.counts == {}
    assert set(holds[-24:]) == {0}, "full windows, nobody held"


async def test_a_burst_gives_every_node_before_the_next_step() -> None:
    source = SyntheticSource([f"n{k}" for k in range(5)], 1, ManualClock(), np.random.default_rng(2), step_s=0.0)
    seen = []
    async for reading in source.readings():
        seen.append((reading.step, reading.node))
        if len(seen) == 10:
            break
    assert seen == [(step, f"n{k}") for step in range(2) for k in range(5)]
