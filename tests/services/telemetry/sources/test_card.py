"""A card's columns from its workers and its device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from schemas.metrics import COLUMN
from services.telemetry.sources.card import CardMemory, Tenant, fill, shares
from services.telemetry.sources.track import empty_row

GB = 1e9


def tenant(row: int = 0, **changes: Any) -> Tenant:
    made = Tenant(row, 20 * GB, 10 * GB, math.nan, 0.0, 0.0, True)
    return made._replace(**changes)


def table(*kv_bytes: float) -> np.ndarray:
    values = np.stack([empty_row() for _ in kv_bytes])
    values[:, COLUMN["kv_bytes"]] = kv_bytes
    return values


def said(values: np.ndarray, name: str) -> list[float]:
    return [float(value) for value in values[:, COLUMN[name]]]


def test_two_workers_share_the_sum_of_their_pools() -> None:
    values = table(5 * GB, 1 * GB)
    flags = fill(values, [tenant(0), tenant(1, pool_bytes=10 * GB)], CardMemory(80 * GB, 50 * GB))
    assert said(values, "hbm_bytes") == [80 * GB] * 2
    assert said(values, "card_kv_capacity_bytes") == [30 * GB] * 2
    assert said(values, "q0_bytes") == [15 * GB] * 2
    assert said(values, "card_free_bytes") == [24 * GB] * 2
    assert flags == []


def test_shares_that_are_not_set_divide_what_the_others_leave() -> None:
    assert shares([tenant(q0_share=0.5), tenant(), tenant()]) == [0.5, 0.25, 0.25]


def test_memory_that_nobody_claims_counts_against_free() -> None:
    values = table(5 * GB)
    flags = fill(values, [tenant()], CardMemory(80 * GB, 37 * GB))
    assert said(values, "card_free_bytes") == [8 * GB], "15 GB free in the pool, 7 GB taken by nobody we know"
    assert flags == [(0, "card_free_bytes", "7000000000 bytes in use that no engine claims")]


def test_an_engine_told_to_take_a_share_of_the_card_claims_it() -> None:
    values = table(5 * GB)
    told = tenant(weights_bytes=math.nan, claimed_share=0.9)
    assert fill(values, [told], CardMemory(80 * GB, 72 * GB)) == []
    assert said(values, "card_free_bytes") == [15 * GB]


def test_without_a_device_the_settings_say_the_hbm_and_else_it_is_assumed_and_flagged() -> None:
    values = table(0.0)
    assert fill(values, [tenant(hbm_bytes=40 * GB)], CardMemory()) == []
    assert said(values, "hbm_bytes") == [40 * GB]
    values = table(0.0)
    flags = fill(values, [tenant()], CardMemory())
    assert said(values, "hbm_bytes") == [pytest.approx(30 * GB / 0.9)]
    assert flags[0][1] == "hbm_bytes"


def test_a_worker_that_is_away_keeps_its_place_and_lends_nothing() -> None:
    values = np.stack([table(5 * GB)[0], empty_row()])
    fill(values, [tenant(0), tenant(1, alive=False)], CardMemory(80 * GB, 60 * GB))
    assert said(values, "card_kv_capacity_bytes")[0] == 40 * GB, "its pool is still there"
    assert said(values, "card_free_bytes")[0] == 15 * GB, "of the pool of one that is away nothing is known to be free"
    assert np.isnan(values[1]).all()


def test_what_an_engine_says_itself_of_the_card_stays() -> None:
    values = table(1 * GB, 1 * GB)
    values[0, COLUMN["q0_bytes"]], values[0, COLUMN["card_kv_capacity_bytes"]] = 3 * GB, 50 * GB
    fill(values, [tenant(0), tenant(1)], CardMemory(80 * GB, 60 * GB))
    assert said(values, "q0_bytes") == [3 * GB, 25 * GB]
    assert said(values, "card_kv_capacity_bytes") == [50 * GB] * 2, "one number for the whole card"


def test_an_assumed_hbm_holds_the_capacity_that_an_engine_tells() -> None:
    values = table(1 * GB)
    values[0, COLUMN["card_kv_capacity_bytes"]] = 90 * GB
    fill(values, [tenant(0)], CardMemory())
    assert said(values, "hbm_bytes") == [pytest.approx(100 * GB)], "a row that contradicts itself would be rejected"


def test_a_card_of_which_nothing_is_known_has_no_numbers() -> None:
    values = table(math.nan)
    fill(values, [tenant(pool_bytes=math.nan, weights_bytes=math.nan)], CardMemory())
    assert np.isnan(values[0, COLUMN["hbm_bytes"]])
    assert np.isnan(values[0, COLUMN["card_kv_capacity_bytes"]])
