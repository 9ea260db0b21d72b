"""With the guard no card runs out of memory; without it the check is armed and fires."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Phase, Reason
from loadgen.engine.specs import FleetConfig
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import plain, random_table


def _hungry(guard: bool, restart_s: float = 30.0) -> Fleet:
    """Two engines whose requests use all they reserved: rho 1.6 promises more than the card has."""
    table = plain(np.arange(200) * 0.05, prompt=3000, output=4000, max_tokens=4000)
    config = FleetConfig(guard=guard, client_timeouts=False, restart_s=restart_s)
    fleet = Fleet(config, [table, table])
    fleet.command(rho=1.6)
    return fleet


def test_without_the_guard_the_card_runs_out_and_the_engine_restarts() -> None:
    fleet = _hungry(guard=False)
    for _ in range(200):
        fleet.advance(2.0)
        if fleet.state.worker["oom"].sum():
            break
    assert fleet.state.worker["oom"].sum() == 1, "the armed check never fired"
    crashed = int(np.flatnonzero(fleet.state.worker["oom"])[0])
    row = fleet.state.worker[crashed]
    assert row["starting_until"] > fleet.t_s + 20, "an engine restarts for restart_s"
    assert row["mapped"] == 0
    assert row["n_dec"] + row["n_pre"] == 0, "a crash ends all running requests"
    assert (fleet.state.request["retries"] > 0).any(), "lost requests are tried again"
    check_accounts(fleet)


def test_requests_lost_twice_are_rejected_with_a_reason() -> None:
    fleet = _hungry(guard=False, restart_s=2.0)
    for _ in range(400):
        fleet.advance(2.0)
    results = fleet.results()
    lost = results.reason == int(Reason.ENGINE_CRASH)
    assert lost.any(), "the case crashes often enough to lose a request twice"
    assert (fleet.state.request["retries"][lost] == 2).all(), "one retry"


def test_with_the_guard_the_same_load_never_runs_out_but_preempts() -> None:
    fleet = _hungry(guard=True)
    for _ in range(300):
        fleet.advance(2.0)
        assert fleet.state.card["mapped_bytes"][0] <= fleet.state.card["capacity"][0]
    assert fleet.state.worker["oom"].sum() == 0
    assert fleet.state.worker["preemptions"].sum() > 0, "memory was short, so somebody had to give way"
    assert fleet.state.worker["finished"].sum() > 0
    assert (fleet.state.request["phase"] != int(Phase.REJECTED)).all(), "preempted requests come through"
    check_accounts(fleet)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_guard_holds_for_any_load_and_any_commands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tables = [random_table(rng, 6.0, 40.0, float(rng.choice([2.0, 8.0]))) for _ in range(2)]
    fleet = Fleet(FleetConfig(client_timeouts=bool(rng.integers(2))), tables)
    for _ in range(25):
        fleet.command(
            rho=rng.choice([1.0, 1.6], 2),
            evict_bytes=rng.choice([0.0, 1e10], 2),
            compact_bytes=rng.choice([0.0, 4e9], 2),
        )
        fleet.advance(2.0)
    assert fleet.state.worker["oom"].sum() == 0
    assert fleet.state.card["mapped_bytes"][0] <= fleet.state.card["capacity"][0]
