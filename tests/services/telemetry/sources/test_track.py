"""Successive pages of one engine become rows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from schemas.classes import DEFAULT_LIMITS, ServiceClass
from schemas.metrics import COLUMN, TPOT_SLICE, TTFT_SLICE
from services.telemetry.sources import vllm
from services.telemetry.sources.histograms import Histogram
from services.telemetry.sources.judge import Judge
from services.telemetry.sources.model_facts import ModelFacts
from services.telemetry.sources.page import parse_page
from services.telemetry.sources.track import Row, Track, empty_row
from tests.services.telemetry.sources.pages import vllm_page

INF = math.inf


class Watched:
    def __init__(self, service_class: ServiceClass = ServiceClass.CHAT) -> None:
        self.track = Track(DEFAULT_LIMITS[service_class])
        self.t_ns = 0

    def see(self, model: ModelFacts | None = None, own: Any = None, most: float = math.nan, **page: Any) -> Row:
        self.t_ns += 2_000_000_000
        found = parse_page("u", vllm_page(**page))
        (part,) = vllm.engines(found).values()
        return self.track.row(vllm.read(found, part), self.t_ns, model, own, most)


def said(row: Row, name: str) -> float:
    return float(row.values[COLUMN[name]])


def test_bins_count_what_came_since_the_first_page() -> None:
    watched = Watched()
    first = watched.see(ttft=(5, 5, 5), gap=(9, 9, 9))
    assert first.values[TTFT_SLICE].sum() == 0, "what was before nobody saw happen"
    row = watched.see(ttft=(9, 9, 10), gap=(109, 109, 109), prompt_tokens=500)
    assert row.values[TTFT_SLICE].sum() == 5
    assert row.values[TTFT_SLICE][15] == 1, "beyond the last edge"
    assert row.values[TPOT_SLICE].sum() == 100


def test_the_limit_of_a_first_token_grows_with_the_windows_mean_of_computed_prompt_tokens() -> None:
    short, long = Watched(), Watched()
    for watched, tokens in ((short, 0), (long, 8000)):
        watched.see(prompt_tokens=0, ttft=(0, 0, 0))
        watched.row = watched.see(prompt_tokens=tokens, ttft=(0, 1, 1))  # type: ignore[attr-defined]
    # One first token between 1 and 4 s: the limit is 2 s for no prompt, 4 s for 8000 tokens.
    within_short = short.row.values[TTFT_SLICE][:10].sum()  # type: ignore[attr-defined]
    within_long = long.row.values[TTFT_SLICE][:10].sum()  # type: ignore[attr-defined]
    assert within_short == pytest.approx(1 / 3)
    assert within_long == pytest.approx(1.0)


def test_good_tokens_are_tokens_by_both_shares_within_the_limits() -> None:
    watched = Watched()
    watched.see(output_tokens=0, finished=0)
    row = watched.see(output_tokens=1000, finished=10, ttft=(8, 8, 10), gap=(0, 60, 100), prompt_tokens=500)
    gaps = 60 * (0.05 - 0.04) / (0.1 - 0.04) / 100
    assert said(row, "good_tokens") == pytest.approx(1000 * 0.8 * gaps)
    assert said(row, "judged") == 10
    assert said(row, "violations") == pytest.approx(10 * (1 - 0.8 * gaps))


def test_a_class_without_limits_breaks_none_and_batch_is_judged_by_completion() -> None:
    training = Judge(DEFAULT_LIMITS[ServiceClass.TRAINING])
    training.take({}, {"output_tokens": 50.0, "finished": 2.0})
    assert training.columns() == {"good_tokens": 50.0, "judged": 2.0, "violations": 0.0}
    batch = Judge(DEFAULT_LIMITS[ServiceClass.BATCH])
    batch.take({"completion": Histogram((600, INF), (3, 4), 0.0)}, {"output_tokens": 100.0, "finished": 4.0})
    assert batch.columns()["violations"] == pytest.approx(1.0)


def test_what_the_histograms_cannot_tell_is_absent() -> None:
    judge = Judge(DEFAULT_LIMITS[ServiceClass.CHAT])
    judge.take({"ttft": Histogram((1, INF), (1, 1), 0.5)}, {"output_tokens": 9.0, "finished": 1.0})
    assert "good_tokens" not in judge.columns(), "nobody says how the gaps were"
    assert "ttft_00" in judge.columns()


def test_counters_and_bins_go_on_over_a_restart_and_a_life_that_ended_at_work_counts_as_a_crash() -> None:
    watched = Watched()
    watched.see(output_tokens=1000, ttft=(4, 4, 4), running=2)
    before = watched.see(output_tokens=1500, ttft=(6, 6, 6), running=2)
    after = watched.see(output_tokens=40, ttft=(1, 1, 1), started=2000.0, running=0)
    assert said(before, "output_tokens") == 1500
    assert said(after, "output_tokens") == 1540
    assert after.values[TTFT_SLICE].sum() == 3, "two, and the one of the new life"
    assert said(after, "oom") == 1
    drained = watched.see(output_tokens=1, started=3000.0, running=0)
    assert said(drained, "oom") == 1, "nobody was running"


def test_a_preemption_costs_the_mean_context_of_a_running_request() -> None:
    watched = Watched()
    watched.see(running=4, kv_use=0.5)
    row = watched.see(running=4, kv_use=0.5, preemptions=2)
    assert said(row, "recomputed_tokens") == pytest.approx(2 * 0.5 * 1600 / 4)


def test_bytes_of_a_token_come_from_the_engine_the_page_the_folder_or_an_assumption_in_this_order() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "torch_dtype": "float32"}
    folder = ModelFacts(config, 5e6)
    own = empty_row()
    own[COLUMN["block_bytes"]] = 4096.0
    none = {"kv_cache_memory_bytes": "None"}
    assert said(Watched().see(folder, own), "kv_bytes_per_token") == 256
    assert said(Watched().see(folder), "kv_bytes_per_token") == pytest.approx(101e6 / 1616)
    of_folder = Watched().see(folder, info=none)
    assert said(of_folder, "kv_bytes_per_token") == 2 * 2 * 4 * 8 * 4
    assert said(of_folder, "weights_bytes") == 5e6
    assumed = Watched().see(info=none)
    assert said(assumed, "kv_bytes_per_token") == 131072
    assert assumed.flags[0][1].startswith("assumed")
    bounded = Watched().see(info=none, most=16e6)
    assert bounded.pool_bytes == pytest.approx(16e6), "an assumption never makes a pool larger than its card"
    assert math.isnan(of_folder.claimed_share) is False


def test_what_the_engine_says_itself_wins() -> None:
    own = empty_row()
    own[COLUMN["kv_idle_bytes"]], own[COLUMN["rho"]] = 77.0, 1.3
    row = Watched().see(own=own)
    assert (said(row, "kv_idle_bytes"), said(row, "rho"), said(row, "running")) == (77.0, 1.3, 2.0)


def test_counters_go_on_when_the_engines_own_word_comes_and_goes_and_when_it_restarts() -> None:
    own = empty_row()
    own[COLUMN["finished"]] = 3.0
    watched = Watched()
    seen = [said(watched.see(finished=100), "finished"), said(watched.see(finished=101, own=own), "finished")]
    own = own.copy()
    own[COLUMN["finished"]] = 5.0
    seen.append(said(watched.see(finished=103, own=own), "finished"))
    seen.append(said(watched.see(finished=104), "finished"))
    own = own.copy()
    own[COLUMN["finished"]] = 1.0
    seen.append(said(watched.see(finished=1, own=own, started=2000.0), "finished"))
    assert seen == [100, 101, 103, 104, 105]


def test_a_contradiction_is_blank_and_flagged() -> None:
    row = Watched().see(running=8, kv_use=0.0)
    assert math.isnan(said(row, "kv_bytes"))
    assert ("kv_bytes", "0 while 8 requests run") in row.flags


def test_what_is_out_of_a_metrics_range_is_blank_and_flagged() -> None:
    row = Watched().see(running=1e9)
    assert math.isnan(said(row, "running"))
    assert any(name == "running" and "out of range" in why for name, why in row.flags)


def test_rows_never_hold_an_infinity() -> None:
    watched = Watched()
    watched.see()
    assert not np.isinf(watched.see(running=0, kv_use=1.0).values).any()
