"""Whatever is commanded, nothing is lost and every sum is what a recount says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.metrics import COLUMN, METRICS, Kind
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import random_table


def _random_fleet(
    seed: int, *, guard: bool | None = None, duration_s: float = 40.0, silent_ends: bool = False
) -> Fleet:
    rng = np.random.default_rng(seed)
    fast = np.random.default_rng([seed, 1])
    per_card = int(rng.integers(1, 4))
    config = FleetConfig(
        cards=2,
        workers_per_card=per_card,
        guard=bool(rng.random() < 0.5) if guard is None else guard,
        mode=EngineMode(
            admission="reserve" if rng.random() < 0.7 else "physical",
            offload=bool(rng.random() < 0.5),
            page_aware=bool(rng.random() < 0.7),
            order="deadline" if fast.random() < 0.5 else "fcfs",
            running_cap=bool(fast.random() < 0.5),
            shed=bool(fast.random() < 0.5),
            watermark=bool(fast.random() < 0.5),
            returns="oracle" if fast.random() < 0.5 else "median",
        ),
        transfer_failures=float(fast.choice([0.0, 0.2])),
        silent_ends=silent_ends,
        host_bytes_per_card=float(rng.choice([0.0, 2e9, 80e9])),
        link_bytes_per_s=float(rng.choice([1e9, 25e9])),
        client_timeouts=bool(rng.random() < 0.8),
        restart_s=5.0,
    )
    rate = float(rng.choice([1.0, 4.0]))
    scale = float(rng.choice([1.0, 6.0]))
    tables = [random_table(rng, rate, duration_s, scale) for _ in range(2 * per_card)]
    return Fleet(config, tables)


def _random_command(fleet: Fleet, rng: np.random.Generator) -> None:
    w = fleet.workers
    fleet.command(
        rho=rng.choice([1.0, 1.3, 1.6, np.nan], w),
        max_running=rng.choice([-1, 4, 64, 1024], w),
        evict_bytes=rng.choice([0.0, 1e9, 1e10], w),
        compact_bytes=rng.choice([0.0, 2e8, 4e9], w),
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_accounts_add_up_and_requests_are_conserved_under_random_commands(seed: int) -> None:
    fleet = _random_fleet(seed, silent_ends=seed % 2 == 0)
    rng = np.random.default_rng(seed)
    for k in range(20):
        _random_command(fleet, rng)
        if k % 5 == 0:
            check_accounts(fleet)
        fleet.advance(2.0)
    check_accounts(fleet)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_metrics_stay_within_their_bounds_and_counters_never_fall(seed: int) -> None:
    fleet = _random_fleet(seed)
    rng = np.random.default_rng(seed)
    before = fleet.metrics()
    low = np.array([metric.low for metric in METRICS])
    high = np.array([metric.high for metric in METRICS])
    counters = np.array([metric.kind is Kind.COUNTER for metric in METRICS])
    counters[COLUMN["output_tokens"]] = False  # a preemption takes back the part of a token in work
    for _ in range(15):
        _random_command(fleet, rng)
        fleet.advance(2.0)
        now = fleet.metrics()
        assert now.shape == (fleet.workers, len(METRICS))
        missing = {METRICS[i].name for i in np.flatnonzero(np.isnan(now).any(0))}
        assert missing <= {"idle_return_s", "iteration_s"}, "only gauges without a subject may be missing"
        known = ~np.isnan(now)
        outside = known & ((now < low) | (now > high))
        assert not outside.any(), f"outside: {sorted({METRICS[i].name for i in np.flatnonzero(outside.any(0))})}"
        fell = (now < before)[:, counters]
        assert not fell.any(), "a counter fell"
        before = now


def test_every_request_ends_with_a_reason_or_its_last_token() -> None:
    for seed in range(6):
        fleet = _random_fleet(seed, duration_s=20.0)
        for _ in range(400):
            if fleet.done:
                break
            fleet.advance(4.0)
        results = fleet.results()
        assert fleet.done, f"seed {seed}: {np.bincount(results.phase)} requests by phase never end"
        rejected = results.phase == 6
        assert (results.reason[rejected] > 0).all(), "a rejection without a reason"
        assert np.isfinite(results.finish_s).all()
        check_accounts(fleet)
        worker = fleet.state.worker
        assert not worker["reserved"].any(), "blocks reserved by nobody"
        held = worker["mapped"] * worker["bpg"] - worker["free"]
        assert not held.any(), "KV left behind by ended sessions"
        assert not fleet.state.card["host_used"].any(), "host tier held by ended sessions"


def test_output_tokens_are_those_of_the_finished_requests() -> None:
    fleet = _random_fleet(3, guard=True, duration_s=10.0)
    while not fleet.done:
        fleet.advance(4.0)
    results = fleet.results()
    finished = int(results.output_tokens[results.phase == 5].sum())
    rejected_before_a_token = (results.phase == 6) & np.isnan(results.first_token_s)
    assert ((results.phase == 5) | rejected_before_a_token).all(), "the case has no half-done request"
    assert results.produced_tokens.sum() == pytest.approx(finished, rel=1e-9)
