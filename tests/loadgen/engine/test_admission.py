"""Who gets in: reservations against rho x Q0, the running cap, first come first served, and refusals."""

from __future__ import annotations

import numpy as np

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Reason
from loadgen.engine.report import summary
from loadgen.engine.specs import EngineMode, FleetConfig
from loadgen.requests import concatenated
from schemas.metrics import COLUMN
from tests.loadgen.engine.tables import empty_table, plain


def _queue(count: int = 400, **config: object) -> Fleet:
    table = plain([0.0] * count, prompt=500, output=2000, max_tokens=4096)
    return Fleet(FleetConfig(client_timeouts=False, **config), [table, empty_table()])  # type: ignore[arg-type]


def _running(fleet: Fleet) -> float:
    return float(fleet.metrics()[0, COLUMN["running"]])


def test_reservations_stop_at_rho_times_q0() -> None:
    running = {}
    for rho in (1.0, 1.6):
        fleet = _queue()
        fleet.command(rho=rho)
        fleet.advance(2.0)
        row = fleet.metrics()[0]
        running[rho] = row[COLUMN["running"]]
        assert row[COLUMN["kv_reserved_bytes"]] <= row[COLUMN["quota_soft_bytes"]]
        assert row[COLUMN["waiting_for_memory"]] == row[COLUMN["waiting"]] > 0
        per_request = row[COLUMN["kv_reserved_bytes"]] / running[rho]
        assert row[COLUMN["quota_soft_bytes"]] - row[COLUMN["kv_reserved_bytes"]] < per_request
    assert running[1.6] / running[1.0] > 1.55, "rho 1.6 admits 1.6 times as many"


def test_air_bag_takes_its_share_from_q0() -> None:
    fleet = _queue(mode=EngineMode(air_bag_bytes=20e9))
    row = fleet.metrics()[0]
    assert row[COLUMN["q0_bytes"]] - row[COLUMN["quota_soft_bytes"]] == 10e9


def test_running_cap_holds_back_without_memory_being_short() -> None:
    fleet = _queue()
    fleet.command(max_running=8)
    fleet.advance(2.0)
    row = fleet.metrics()[0]
    assert row[COLUMN["running"]] == 8
    assert row[COLUMN["waiting"]] > 0
    assert row[COLUMN["waiting_for_memory"]] == 0
    assert row[COLUMN["generation"]] == 1, "a changed cap is a new generation"


def test_physical_admission_ignores_what_is_reserved() -> None:
    reserve, physical = _queue(), _queue(mode=EngineMode(admission="physical"))
    for fleet in (reserve, physical):
        fleet.advance(2.0)
    assert _running(physical) > 2 * _running(reserve)


def test_physical_admission_preempts_the_newest_when_memory_runs_short() -> None:
    fleet = _queue(mode=EngineMode(admission="physical"))
    fleet.command(max_running=1024)
    fleet.advance(300.0)
    assert fleet.state.worker["preemptions"][0] > 0
    assert fleet.state.worker["recomputed"][0] > 0
    preempted = fleet.state.request["preemptions"] > 0
    done_first = np.nanmin(fleet.state.request["finish"])
    assert not preempted[np.nanargmin(fleet.state.request["finish"])], f"oldest first, at {done_first} s"


def test_requests_are_admitted_in_order_of_arrival() -> None:
    fleet = Fleet(FleetConfig(client_timeouts=False), [plain(np.arange(100) * 0.2), empty_table()])
    fleet.advance(100.0)
    admitted = fleet.state.request["admitted"]
    assert (np.diff(admitted) > 0).all()


def test_what_can_never_fit_is_refused_at_once() -> None:
    mode = EngineMode(admission="physical", air_bag_bytes=20e9)
    config = FleetConfig(model="Llama-3.1-70B-4bit", workers_per_card=1, card="A100-80G", mode=mode)
    pool_tokens = int((config.kv_capacity_bytes() - 20e9) / 327_680)
    table = plain([0.0, 0.0, 0.0], prompt=[pool_tokens + 100, 131_000, 500], output=[10, 500, 10])
    fleet = Fleet(config, [table])
    fleet.advance(30.0)
    results = fleet.results()
    assert results.reason.tolist() == [int(Reason.NEVER_FITS), int(Reason.TOO_LONG), 0]
    told = summary(results)
    assert told.rejected == {"never_fits": 1, "too_long": 1}
    assert told.violations == 0, "a refusal by size is no latency violation"


def test_a_request_larger_than_the_soft_quota_runs_alone_and_blocks_nobody_for_ever() -> None:
    config = FleetConfig(workers_per_card=2, client_timeouts=False, mode=EngineMode(air_bag_bytes=30e9))
    table = plain([0.0, 0.0, 0.1], prompt=[200, 100_000, 200], output=100)
    fleet = Fleet(config, [table, empty_table()])
    fleet.advance(200.0)
    assert fleet.done
    assert (fleet.results().reason == 0).all()


def test_clients_give_up_after_twice_their_limit() -> None:
    table = plain([0.0] * 300, prompt=2000, output=500)
    for timeouts in (True, False):
        fleet = Fleet(FleetConfig(client_timeouts=timeouts), [table, empty_table()])
        fleet.advance(60.0)
        gone = fleet.results().reason == int(Reason.CLIENT_TIMEOUT)
        assert gone.any() == timeouts
        if timeouts:
            patience = 2 * (2.0 + 0.25e-3 * 2000)
            assert np.allclose(fleet.results().finish_s[gone], patience, atol=0.55)


def test_expected_output_is_reserved_once_enough_have_finished() -> None:
    """Short answers first; then as many as their true length lets in, a client's 4096 tokens or not."""
    first = plain(np.linspace(0.0, 5.0, 20), prompt=500, output=50, max_tokens=4096)
    running = {}
    for reservation in ("max_tokens", "expected"):
        table = concatenated([first, plain([60.0] * 400, prompt=500, output=50, max_tokens=4096)])
        mode = EngineMode(reservation=reservation)  # type: ignore[arg-type]
        fleet = Fleet(FleetConfig(client_timeouts=False, max_running=1024, mode=mode), [table, empty_table()])
        while fleet.t_s < 60.15:
            fleet.advance(0.1)
        running[reservation] = _running(fleet)
        fleet.advance(120.0)
        assert summary(fleet.results(), 0.0).finished == 420
        assert fleet.metrics()[0, COLUMN["kv_reserved_bytes"]] == 0, "all reservations are given back"
    assert running["expected"] > 2 * running["max_tokens"]


def test_who_outgrows_the_expectation_reserves_what_it_holds() -> None:
    first = plain(np.linspace(0.0, 5.0, 20), prompt=500, output=20, max_tokens=4096)
    table = concatenated([first, plain([20.0] * 40, prompt=500, output=2000, max_tokens=4096)])
    fleet = Fleet(FleetConfig(client_timeouts=False, mode=EngineMode(reservation="expected")), [table, empty_table()])
    for _ in range(40):
        fleet.advance(2.0)
        row = fleet.metrics()[0]
        held = row[COLUMN["kv_bytes"]] - row[COLUMN["kv_idle_bytes"]]
        assert row[COLUMN["kv_reserved_bytes"]] >= held
    fleet.advance(200.0)
    assert fleet.metrics()[0, COLUMN["kv_reserved_bytes"]] == 0
