"""vLLM's, SGLang's and Triton's pages in Tidegate's words."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from schemas.metrics import COLUMN, METRICS
from services.errors import ScrapeFailed
from services.telemetry.sources import sglang, triton, vllm
from services.telemetry.sources.endpoint import ADAPTERS, engines_of, probe
from services.telemetry.sources.page import parse_page
from services.telemetry.sources.said import Key, Presence
from services.telemetry.sources.track import Row
from tests.services.telemetry.sources.pages import sample, sglang_page, sglang_totals, triton_page, vllm_page


def rows(kind: str, text: str) -> dict[Key, Row]:
    return engines_of(ADAPTERS[kind], parse_page("u", text))


def said(row: Row, name: str) -> float:
    return float(row.values[COLUMN[name]])


def only(kind: str, text: str) -> Row:
    (row,) = rows(kind, text).values()
    return row


def test_a_real_vllm_page_reads_as_its_server_was(shared_dir: Path) -> None:
    found = rows("vllm", (shared_dir / "samples" / "vllm-0.32-metrics.txt").read_text())
    assert list(found) == [Key("tiny", "0")]
    row = found[Key("tiny", "0")]
    assert said(row, "output_tokens") == 6288
    assert said(row, "prompt_tokens") == 1315
    assert said(row, "finished") == 42
    assert said(row, "rejected") == said(row, "preemptions") == said(row, "running") == 0
    assert said(row, "block_bytes") == 131072, "1 GiB over 8192 blocks"
    assert said(row, "kv_bytes_per_token") == 1024
    assert row.pool_bytes == 8191 * 131072, "block 0 is the null block"
    assert said(row, "rho") == 1.0
    assert said(row, "max_running") == 256
    assert math.isnan(said(row, "kv_idle_bytes")), "cached prefixes do not show: absent, not zero"
    assert row.flags == []


def test_a_real_page_with_the_offloading_connector_has_its_bytes_and_bandwidth(shared_dir: Path) -> None:
    row = only("vllm", (shared_dir / "samples" / "vllm-0.32-metrics-offload.txt").read_text())
    assert said(row, "evicted_bytes") == 12615680
    assert said(row, "loaded_bytes") == 6225920
    assert said(row, "link_bytes_per_s") == pytest.approx((12615680 + 6225920) / (0.0051837840 + 0.0138108790))
    assert said(row, "preemptions") == 1
    assert ("kv_bytes_per_token", "assumed: no page, folder or engine says it") in row.flags, (
        "under num_gpu_blocks_override the page's bytes are not those of the pool"
    )


def test_older_names_of_vllm_are_read() -> None:
    text = vllm_page().replace("kv_cache_usage_perc", "gpu_cache_usage_perc")
    text = text.replace("inter_token_latency_seconds", "time_per_output_token_seconds")
    row, newer = only("vllm", text), only("vllm", vllm_page())
    assert said(row, "kv_bytes") == said(newer, "kv_bytes") == pytest.approx(0.25 * 100e6)
    assert said(row, "tpot_00") == 0


def test_a_share_above_1_is_no_share() -> None:
    assert math.isnan(said(only("vllm", vllm_page(kv_use=37.0)), "kv_bytes"))


def test_a_hybrid_models_own_capacity_wins_over_blocks_times_block_size() -> None:
    row = only("vllm", vllm_page(info={"kv_cache_size_tokens": "808"}))
    assert said(row, "kv_bytes_per_token") == pytest.approx(101e6 / 808)
    assert row.pool_bytes == pytest.approx(100e6)


def test_data_parallel_engines_of_vllm_are_rows_of_their_own() -> None:
    # The process's own samples come once, as on a real page.
    second = vllm_page(engine="1", running=5).split("\n", 1)[1]
    found = rows("vllm", vllm_page(engine="0", running=2) + second)
    assert {key: said(row, "running") for key, row in found.items()} == {Key("tiny", "0"): 2, Key("tiny", "1"): 5}


def test_admissions_refused_by_a_queue_limit_count_as_rejected() -> None:
    text = vllm_page() + sample("vllm:admission_rejections_total", 3, model_name="tiny", reason="max_num_queued_reqs")
    assert said(only("vllm", text), "rejected") == 3


@pytest.mark.parametrize("prefix", ["sglang:", "sglang_"])
def test_sglangs_pool_is_in_tokens_and_only_its_first_rank_speaks(prefix: str) -> None:
    text = sglang_page(prefix) + sglang_page(prefix, rank="1") + sglang_totals(prefix)
    row = only("sglang", text)
    assert said(row, "running") == 3, "every rank says the same of one pool"
    assert said(row, "waiting") == 2
    assert row.pool_bytes == 1000 * 131072
    assert said(row, "kv_bytes") == 400 * 131072
    assert math.isnan(said(row, "kv_idle_bytes"))
    assert said(row, "prompt_tokens") == 750, "150 came from caches"
    assert said(row, "finished") == 10
    assert said(row, "rejected") == 2
    assert math.isnan(said(row, "preemptions")), "num_retracted_reqs is a gauge, not a count"


def test_sglangs_cached_kv_is_idle_kv() -> None:
    row = only("sglang", sglang_page(kv_used_tokens=300, kv_evictable_tokens=200, page_size=16))
    assert said(row, "kv_idle_bytes") == 200 * 131072
    assert said(row, "kv_bytes") == 500 * 131072
    assert said(row, "block_bytes") == 16 * 131072


def test_of_sglangs_priorities_the_sample_without_one_is_the_sum() -> None:
    of = {"model_name": "m", "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    text = sglang_page() + sample("sglang:num_running_reqs", 2, priority="10", **of)
    assert said(only("sglang", text), "running") == 3


def test_sglangs_first_tokens_are_those_of_streamed_requests() -> None:
    page = parse_page("u", sglang_page() + sglang_totals())
    (part,) = sglang.engines(page).values()
    assert sglang.read(page, part).histograms["ttft"].counts == (4, 5)


def test_under_data_parallelism_what_belongs_to_all_of_sglangs_engines_is_absent() -> None:
    found = rows("sglang", sglang_page(dp="0") + sglang_page(dp="1", num_running_reqs=9) + sglang_totals())
    assert {key: said(row, "running") for key, row in found.items()} == {Key("m", "0"): 3, Key("m", "1"): 9}
    assert all(math.isnan(said(row, "output_tokens")) for row in found.values())


def test_tritons_requests_blocks_and_card() -> None:
    page = parse_page("u", triton_page())
    (row,) = engines_of(ADAPTERS["triton"], page).values()
    assert said(row, "running") == 4
    assert said(row, "waiting") == 2, "active less scheduled where waiting is not published"
    assert said(row, "prefilling") == 1
    assert said(row, "running_cap") == 512
    assert row.pool_bytes == 100 * 64 * 131072
    assert said(row, "kv_bytes") == 10 * 64 * 131072
    assert said(row, "finished") == 20, "those of the preprocessing model are not ours"
    assert triton.device(page) == (80e9, 60e9)
    assert math.isnan(triton.device(parse_page("u", triton_page(gpus=2))).total_bytes), "which of the two is not known"
    assert said(only("triton", triton_page(waiting=7)), "waiting") == 7


@pytest.mark.parametrize("kind", ["vllm", "sglang", "triton"])
def test_a_page_of_another_engine_is_a_failed_scrape(kind: str) -> None:
    other = triton_page() if kind == "vllm" else vllm_page()
    with pytest.raises(ScrapeFailed, match=f"no metric of {kind}"):
        rows(kind, other)


@pytest.mark.parametrize("adapter", [vllm.ADAPTER, sglang.ADAPTER, triton.ADAPTER], ids=lambda a: a.kind)
def test_no_engine_gives_what_it_does_not_declare(adapter: object) -> None:
    texts = {
        "vllm": vllm_page(),
        "sglang": sglang_page(kv_evictable_tokens=1) + sglang_totals(),
        "triton": triton_page(),
    }
    kind = adapter.kind  # type: ignore[attr-defined]
    (row,) = rows(kind, texts[kind]).values()
    given = {metric.name for k, metric in enumerate(METRICS) if not math.isnan(row.values[k])}
    absent = {name for name, presence in ADAPTERS[kind].provides.items() if presence is Presence.ABSENT}
    assert not given & absent
    measured = {name for name, presence in ADAPTERS[kind].provides.items() if presence is Presence.MEASURED}
    assert measured <= given


def test_a_probe_tells_what_a_page_has_and_lacks() -> None:
    found = probe(vllm.ADAPTER, parse_page("u", vllm_page()))
    assert found.engines == (Key("tiny", "0"),)
    assert {"running", "kv_bytes", "ttft_00", "good_tokens"} <= found.gives
    assert "evicted_bytes" in found.lacks, "no connector"
    assert "kv_idle_bytes" not in found.lacks, "nobody promised it"
