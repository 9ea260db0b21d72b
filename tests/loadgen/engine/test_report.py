"""The figures of a replay, and that what a fleet tells its users is consistent."""

from __future__ import annotations

import numpy as np
import pytest

from loadgen.bench.engine import bench_engine, chat_table
from loadgen.engine.fleet import Fleet
from loadgen.engine.records import Phase
from loadgen.engine.report import summary
from loadgen.engine.specs import CARDS, MODELS, FleetConfig
from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.metrics import COLUMN
from services.errors import UserError
from tests.loadgen.engine.tables import empty_table, plain


def test_summary_agrees_with_the_workers_counters() -> None:
    rng = np.random.default_rng(2)
    fleet = Fleet(FleetConfig(), [chat_table(3.0, 60.0, rng) for _ in range(2)])
    fleet.advance(120.0)
    told, results, rows = summary(fleet.results()), fleet.results(), fleet.metrics()
    totals = {name: rows[:, COLUMN[name]].sum() for name in ("finished", "rejected", "good_tokens", "violations")}
    assert told.finished == totals["finished"]
    assert sum(told.rejected.values()) == totals["rejected"]
    assert told.goodput_tokens_per_s * results.duration_s == pytest.approx(totals["good_tokens"])
    assert told.violations == totals["violations"]
    assert told.arrived == told.finished + sum(told.rejected.values()) + told.in_system
    assert told.tokens_per_s >= told.goodput_tokens_per_s > 0
    assert 0 < told.hbm_utilisation < told.hbm_utilisation_idle < 1


def test_a_request_that_never_got_in_counts_with_its_wait() -> None:
    table = plain([0.0] * 100, prompt=1000, output=4000, max_tokens=4000)
    fleet = Fleet(FleetConfig(client_timeouts=False), [table, empty_table()])
    fleet.command(max_running=4)
    fleet.advance(30.0)
    told, results = summary(fleet.results()), fleet.results()
    assert (results.phase == int(Phase.WAITING)).sum() == 96
    assert told.queue_wait_p99_s == pytest.approx(30.0), "they wait until the end"


def test_slo_is_time_to_first_token_mean_token_time_and_completion() -> None:
    limits = dict(DEFAULT_LIMITS)
    table = plain([0.0], prompt=1000, output=100, kind=ServiceClass.BATCH)
    for completion_s, good in ((600.0, True), (0.5, False)):
        limits[ServiceClass.BATCH] = DEFAULT_LIMITS[ServiceClass.BATCH].__replace__(completion_s=completion_s)
        fleet = Fleet(FleetConfig(limits=limits), [table, empty_table()])
        fleet.advance(10.0)
        assert fleet.results().good.tolist() == [good]
        assert fleet.state.worker["violations"][0] == (not good)


def test_snapshot_adds_up() -> None:
    rng = np.random.default_rng(4)
    fleet = Fleet(FleetConfig(), [chat_table(2.0, 60.0, rng) for _ in range(2)])
    fleet.advance(40.0)
    shot, row = fleet.snapshot(1), fleet.metrics()[1]
    block = row[COLUMN["block_bytes"]]
    assert (shot.blocks_live + shot.blocks_idle) * block == row[COLUMN["kv_bytes"]]
    assert sum(one.blocks for one in shot.idle) == shot.blocks_idle
    assert len(shot.idle) == row[COLUMN["idle_sessions"]]
    total = shot.blocks_live + shot.blocks_idle + shot.blocks_free
    assert total * block == row[COLUMN["kv_mapped_bytes"]] == shot.groups_mapped * row[COLUMN["page_group_bytes"]]


def test_page_groups_follow_from_the_model() -> None:
    assert MODELS["Llama-3.1-8B"].group_bytes == 128 * 2**20
    assert MODELS["Llama-3.1-70B-4bit"].group_bytes == 320 * 2**20
    assert {model.blocks_per_group() for model in MODELS.values()} == {64}


@pytest.mark.parametrize("card", sorted(CARDS))
@pytest.mark.parametrize(("model", "workers"), [("Llama-3.1-8B", 3), ("Llama-3.1-70B-4bit", 1)])
def test_every_card_runs_every_model(card: str, model: str, workers: int) -> None:
    config = FleetConfig(card=card, model=model, workers_per_card=workers)
    fleet = Fleet(config, [plain([0.0, 1.0])] * workers)
    fleet.advance(60.0)
    assert fleet.done
    assert (fleet.results().phase == int(Phase.FINISHED)).all()


def test_settings_that_cannot_be_are_a_users_mistake() -> None:
    for config, said in (
        (FleetConfig(card="A100-40G"), "A100-80G, H100-80G, H200-141G"),
        (FleetConfig(model="Llama-2"), "Llama-3.1-8B"),
        (FleetConfig(model="Llama-3.1-70B-4bit", workers_per_card=3), "leaves no room for KV"),
        (FleetConfig(shares=(0.5, 0.6)), "numbers of sum 1"),
    ):
        with pytest.raises(UserError, match=said):
            Fleet(config, [empty_table()] * config.workers_per_card)


def test_bench_measures_a_loaded_fleet() -> None:
    found = bench_engine(cards=1, steps=10)
    assert found["worker_steps_per_s"] > 0
    assert found["mean_running"] > 10, "an unloaded fleet would flatter the figure"
