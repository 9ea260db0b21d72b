"""A commanded hard quota bounds what a worker maps; empty groups beyond it go back, nothing crashes."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.metrics import COLUMN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import one_session, plain

MAPPED, HARD, GROUP = COLUMN["kv_mapped_bytes"], COLUMN["quota_hard_bytes"], COLUMN["page_group_bytes"]


def _busy(**config: object) -> Fleet:
    """Two workers under more than they can hold; worker 0 is the one that is told."""
    table = plain(np.arange(400) * 0.25, prompt=3000, output=1500, max_tokens=1500)
    fleet = Fleet(FleetConfig(client_timeouts=False, **config), [table, table])  # type: ignore[arg-type]
    fleet.command(rho=1.2)
    fleet.advance(60.0)
    return fleet


def test_a_lower_quota_gives_empty_groups_back_and_stops_new_ones() -> None:
    fleet = _busy()
    before = fleet.metrics()[0]
    group = before[GROUP]
    quota = group * int(before[MAPPED] / group / 2)
    fleet.command(hard_bytes=[quota + 0.5 * group, np.nan], max_running=[8, -1])
    assert fleet.metrics()[0, HARD] == quota, "whole groups, from the command on"
    assert fleet.metrics()[1, HARD] > quota, "NaN: as it is"
    highest = before[MAPPED]
    for _ in range(60):
        fleet.command(compact_bytes=[2e9, 0.0])
        fleet.advance()
        mapped = fleet.metrics()[0, MAPPED]
        assert mapped <= highest, "nothing is mapped beyond the quota, groups only go back"
        highest = mapped
    assert highest <= quota, "requests ended and left their groups empty"
    assert fleet.metrics()[0, COLUMN["finished"]] > before[COLUMN["finished"]], "the worker goes on within it"
    check_accounts(fleet)
    fleet.command(hard_bytes=np.inf, max_running=256)
    assert fleet.metrics()[0, HARD] > quota
    fleet.advance(20.0)
    assert fleet.metrics()[0, MAPPED] > highest, "raised, it maps again"
    assert fleet.state.worker["oom"].sum() == 0
    check_accounts(fleet)


def test_a_quota_above_what_the_account_allows_changes_nothing() -> None:
    fleet = _busy()
    hard = fleet.metrics()[:, HARD]
    fleet.command(hard_bytes=1e15)
    assert (fleet.metrics()[:, HARD] == hard).all()


@pytest.mark.parametrize("hard_bytes", [2e9, np.inf])
def test_a_worker_at_its_commanded_quota_takes_nothing_from_its_neighbour(hard_bytes: float) -> None:
    """The neighbour holds idle KV above its share, which a worker below its own may otherwise claim."""
    late = plain(100.0 + np.arange(200) * 0.1, prompt=4000, output=500, max_tokens=500)
    fleet = Fleet(FleetConfig(client_timeouts=False), [late, one_session(2, 60_000, think_s=900.0, sessions=4)])
    fleet.advance(100.0)
    held = fleet.snapshot(1)
    assert len(held.idle) == 4
    assert fleet.metrics()[1, MAPPED] > fleet.metrics()[1, COLUMN["q0_bytes"]]
    fleet.command(hard_bytes=[hard_bytes, np.nan])
    fleet.advance(40.0)
    assert fleet.metrics()[0, COLUMN["finished"]] > 0
    now = fleet.snapshot(1)
    if np.isinf(hard_bytes):
        assert len(now.idle) < 4, "the case is one where it would claim"
    else:
        assert fleet.metrics()[0, MAPPED] <= hard_bytes
        assert (len(now.idle), now.groups_mapped) == (4, held.groups_mapped)
    check_accounts(fleet)


def test_quotas_down_to_nothing_and_back_never_crash() -> None:
    fleet = _busy()
    rng = np.random.default_rng(3)
    for _ in range(60):
        fleet.command(hard_bytes=rng.choice([0.0, 1e8, 3e9, 2e10, np.inf, np.nan, -1.0], 2))
        fleet.advance()
        assert fleet.state.card["mapped_bytes"][0] <= fleet.state.card["capacity"][0]
    fleet.command(hard_bytes=np.inf)
    fleet.advance(400.0)
    assert fleet.state.worker["oom"].sum() == 0
    assert fleet.metrics()[:, COLUMN["running"]].sum() + fleet.metrics()[:, COLUMN["finished"]].sum() > 0
    check_accounts(fleet)


def test_a_changed_quota_is_a_new_generation_and_the_same_one_is_not() -> None:
    fleet = _busy()
    generation = fleet.metrics()[0, COLUMN["generation"]]
    fleet.command(hard_bytes=5e9)
    fleet.command(hard_bytes=5e9)
    assert fleet.metrics()[0, COLUMN["generation"]] == generation + 1


@pytest.mark.parametrize("bytes_", [0.0, np.inf])
def test_an_engine_with_a_fixed_pool_ignores_it(bytes_: float) -> None:
    fleet = _busy(mode=EngineMode(admission="physical"))
    before = fleet.metrics()[:, [MAPPED, HARD, COLUMN["generation"]]]
    fleet.command(hard_bytes=bytes_)
    fleet.advance()
    assert (fleet.metrics()[:, [MAPPED, HARD, COLUMN["generation"]]] == before).all()


def test_a_neighbour_below_its_share_keeps_a_reserve_of_empty_groups() -> None:
    """Else two engines in need would take the same groups from each other, an unmapping and two mappings each time."""
    quiet = plain([0.0] * 8, prompt=3000, output=20)  # 3 groups each, over after some seconds
    hungry = plain([10.0] * 400, prompt=1000, output=4000, max_tokens=4000)
    fleet = Fleet(FleetConfig(client_timeouts=False, shares=(0.3, 0.7)), [quiet, hungry])
    fleet.command(rho=1.6)
    fleet.advance(120.0)
    metrics = fleet.metrics()
    assert metrics[1, MAPPED] > 1.3 * metrics[1, COLUMN["q0_bytes"]], "the hungry one borrows"
    assert metrics[0, COLUMN["kv_bytes"]] == 0
    kept = FleetConfig().premapped_groups
    assert kept <= metrics[0, MAPPED] / metrics[0, GROUP] <= kept + 1, "of the 24 it had"
