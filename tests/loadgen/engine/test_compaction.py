"""Compaction frees whole groups within its bytes, and f_frag is the article's entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest

from loadgen.engine.fleet import Fleet
from loadgen.engine.specs import EngineMode, FleetConfig
from schemas.metrics import COLUMN
from tests.loadgen.engine.accounts import check_accounts
from tests.loadgen.engine.tables import empty_table, random_table


def _scattered(page_aware: bool = True) -> Fleet:
    """A worker after a minute of unlike requests: holes everywhere."""
    rng = np.random.default_rng(5)
    fleet = Fleet(
        FleetConfig(mode=EngineMode(page_aware=page_aware)), [random_table(rng, 4.0, 60.0, 2.0), empty_table()]
    )
    fleet.advance(70.0)
    return fleet


def _frag_by_hand(fleet: Fleet, w: int) -> float:
    """-sum p ln p / ln F over runs of free blocks in mapped groups, in address order."""
    worker = fleet.state.worker[w]
    runs: list[int] = []
    run = 0
    for g in range(worker["group_at"], worker["group_at"] + worker["groups"]):
        group = fleet.state.group[g]
        for b in range(int(worker["bpg"])):
            if group["mapped"] and (int(group["free"]) >> b) & 1:
                run += 1
            elif run:
                runs.append(run)
                run = 0
    runs += [run] if run else []
    total = sum(runs)
    if total <= 1:
        return 0.0
    return -sum(r / total * math.log(r / total) for r in runs) / math.log(total)


@pytest.mark.parametrize("page_aware", [True, False])
def test_fragmentation_is_the_entropy_of_free_runs(page_aware: bool) -> None:
    fleet = _scattered(page_aware)
    found = fleet.metrics()[0, COLUMN["frag"]]
    assert found == pytest.approx(_frag_by_hand(fleet, 0), abs=1e-9)
    assert 0.05 < found < 1


def test_compaction_frees_whole_groups_within_its_budget() -> None:
    fleet = _scattered()
    before = fleet.metrics()[0]
    fleet.effects()
    fleet.command(compact_bytes=1e9)
    after, effects = fleet.metrics()[0], fleet.effects()
    freed = before[COLUMN["kv_mapped_bytes"]] - after[COLUMN["kv_mapped_bytes"]]
    assert effects.groups_freed[0] > 0
    assert freed == effects.groups_freed[0] * before[COLUMN["page_group_bytes"]]
    assert 0 < effects.compacted_bytes[0] <= 1e9
    assert effects.compacted_bytes[0] < freed, "under a byte moved per byte freed"
    assert after[COLUMN["kv_bytes"]] == before[COLUMN["kv_bytes"]], "nothing but its place changes"
    assert 0 < effects.pause_us[0] < 2000, "article 1: under 2 ms"
    check_accounts(fleet)
    fleet.advance(10.0)
    check_accounts(fleet)


def test_compaction_costs_the_card_time() -> None:
    moved, still = _scattered(), _scattered()
    moved.command(compact_bytes=4e9)
    size = moved.effects().compacted_bytes[0]
    assert moved.state.card["stall"][0] == pytest.approx(2 * size / (0.82 * 2.039e12))
    for fleet in (moved, still):
        fleet.advance(2.0)
    tokens = [fleet.results().produced_tokens[0] for fleet in (moved, still)]
    assert tokens[0] <= tokens[1]


def test_too_small_a_budget_moves_nothing() -> None:
    fleet = _scattered()
    fleet.command(compact_bytes=1.0)
    assert fleet.effects().compacted_bytes[0] == 0
