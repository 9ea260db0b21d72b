"""The fast control's switches: deadline order, running cap, shedding, watermark, expected returns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Phase, Reason
from loadgen.engine.specs import EngineMode, FleetConfig
from loadgen.requests import RequestTable
from schemas.classes import ServiceClass
from schemas.metrics import COLUMN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import empty_table, one_session, plain


def _fleet(table: RequestTable, mode: EngineMode, **config: object) -> Fleet:
    return Fleet(FleetConfig(mode=mode, **config), [table, empty_table()])  # type: ignore[arg-type]


def _burst(count: int = 300, prompt: int = 2000) -> RequestTable:
    return plain(np.sort(np.random.default_rng(1).uniform(0.0, 10.0, count)), prompt=prompt, output=100)


def test_by_deadline_the_urgent_overtake_those_with_time() -> None:
    n = 80
    arrival = np.concatenate([np.zeros(n), np.full(8, 1.0)])
    prompt = np.concatenate([np.full(n, 2000), np.full(8, 300)])
    table = plain(arrival, prompt=prompt, output=20)
    classes = np.concatenate([np.full(n, int(ServiceClass.BATCH)), np.full(8, int(ServiceClass.COPILOT))])
    table = dataclasses.replace(table, service_class=classes.astype(np.uint8)).check()
    waits = {}
    for order in ("fcfs", "deadline"):
        fleet = _fleet(table, EngineMode(order=order), client_timeouts=False)
        fleet.advance(60.0)
        found = fleet.results()
        waits[order] = float((found.first_token_s - found.arrival_s)[n:].max())
        assert fleet.done
    assert waits["deadline"] < 0.6 < waits["fcfs"]


def test_by_deadline_the_late_give_way_to_those_who_can_still_be_in_time() -> None:
    good = {}
    for order in ("fcfs", "deadline"):
        fleet = _fleet(_burst(), EngineMode(order=order), client_timeouts=False)
        for _ in range(5):
            fleet.advance(2.0)
            check_accounts(fleet)
        fleet.advance(200.0)
        assert fleet.done, "the late are served when nobody else waits"
        good[order] = int(fleet.results().good.sum())
    assert good["deadline"] > 1.5 * good["fcfs"]


def test_shedding_refuses_with_a_reason_only_who_would_be_late() -> None:
    fleet = _fleet(_burst(), EngineMode(order="deadline", shed=True), client_timeouts=False)
    fleet.advance(200.0)
    found = fleet.results()
    shed = found.reason == int(Reason.SHED)
    assert fleet.done
    assert shed.sum() > 50
    assert (found.phase[shed] == int(Phase.REJECTED)).all()
    limit = 2.0 + 0.25e-3 * 2000
    assert (found.finish_s - found.arrival_s)[shed].max() < 1.2 * limit, "told before the limit has long passed"
    late = (found.first_token_s - found.arrival_s)[~shed] > 1.3 * limit
    assert late.mean() < 0.05, "who is served is served about in time"


def test_unlimited_requests_are_never_shed() -> None:
    table = plain([0.0] * 200, prompt=3000, output=50, kind=ServiceClass.TRAINING)
    fleet = _fleet(table, EngineMode(order="deadline", shed=True))
    fleet.advance(400.0)
    assert fleet.done
    assert (fleet.results().phase == int(Phase.FINISHED)).all()


def test_the_running_cap_brings_the_gap_between_tokens_to_its_limit() -> None:
    table = plain(np.arange(2000) * 0.05, prompt=6000, output=300)
    tpot = {}
    for capped in (False, True):
        mode = EngineMode(admission="physical", running_cap=capped)
        fleet = Fleet(FleetConfig(card="H200-141G", workers_per_card=1, mode=mode), [table])
        fleet.advance(100.0)
        found = fleet.results()
        tpot[capped] = float(np.nanmedian(found.tpot_s[found.finish_s > 40.0]))
        row = fleet.metrics()[0]
        assert (row[COLUMN["running_cap"]] < row[COLUMN["max_running"]]) == capped
        check_accounts(fleet)
    assert tpot[True] < 0.055 < tpot[False]


def test_the_watermark_copies_idle_kv_ahead_of_need_and_leaves_it_on_the_card() -> None:
    table = one_session(2, first_prompt=4000, think_s=90.0, sessions=80, apart_s=0.8)
    held = {}
    for on in (False, True):
        fleet = _fleet(table, EngineMode(watermark=on), host_bytes_per_card=80e9)
        fleet.advance(72.0)
        row = fleet.metrics()[0]
        held[on] = row[COLUMN["kv_idle_bytes"]]
        assert (row[COLUMN["host_used_bytes"]] > 0) == on
        check_accounts(fleet)
    assert held[True] == held[False]


@pytest.mark.parametrize("returns", ["table", "oracle"])
def test_expected_returns_come_from_the_table_or_the_truth(returns: str) -> None:
    table = one_session(2, think_s=37.0)
    table = dataclasses.replace(table, expected_think_s=np.array([22.0, np.inf])).check()
    fleet = _fleet(table, EngineMode(returns=returns, prefetch=False), silent_ends=True)  # type: ignore[arg-type]
    fleet.advance(10.0)
    idle = fleet.snapshot(0).idle[0]
    expected = (22.0 if returns == "table" else 37.0) - (fleet.t_s - idle.idle_since_s)
    assert idle.expected_return_s == pytest.approx(expected)
    fleet.advance(60.0)
    assert fleet.done
    assert fleet.snapshot(0).idle[0].expected_return_s >= 3600.0, "told that it has ended"
    fleet.command(evict_bytes=1.0)
    assert fleet.metrics()[0, COLUMN["kv_bytes"]] == 0, "what has ended needs no copy"
    assert fleet.metrics()[0, COLUMN["host_used_bytes"]] == 0
