"""Prometheus text becomes numbers, or a clear reason why not."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.errors import ScrapeFailed
from services.telemetry.sources.page import parse_page, split
from tests.services.telemetry.sources.pages import histogram, sample, vllm_page


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "empty"),
        (" \n\n", "empty"),
        ("<html><body>502</body></html>\n", "HTML"),
        ("vllm:num_requests_running 1\nvllm:num_requests_wai", "cut in its last line"),
        ("vllm:num_requests_running 1\nvllm:kv_cache_usage_perc 0.", "cut in its last line"),
        ('{"error": "no such route"}\n', "not Prometheus text"),
        ("vllm:num_requests_running one\n", "not Prometheus text"),
        ('x{a="b" 1\n', "not Prometheus text"),
        ("# HELP x y\n# TYPE x gauge\n", "without a single number"),
        ('x{a="1"} 2\nx{a="1"} 3\n', "twice with the same labels"),
    ],
)
def test_a_page_that_cannot_be_one_is_refused_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(ScrapeFailed, match=reason):
        parse_page("http://e/metrics", text)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "-1.0", "-2147483648", "1.8446744073709552e+19"])
def test_a_value_that_cannot_be_is_missing_and_named_not_zero(value: str) -> None:
    page = parse_page("u", f"# TYPE a gauge\na {value}\n# TYPE b gauge\nb 2\n")
    assert math.isnan(page.value(["a"])), "missing is not zero"
    assert page.value(["b"]) == 2, "its neighbour is as good as before"
    assert page.refused[0][0] == "a"


def test_the_time_at_which_a_counter_was_made_is_never_its_count() -> None:
    text = (
        "# TYPE x_total counter\nx_total 5\n# TYPE x_created gauge\nx_created 1.79e9\n"
        "# TYPE y counter\ny_total 7\ny_created 1.79e9\n"
    )
    page = parse_page("u", text)
    assert page.value(["x_total"]) == 5
    assert page.value(["y_total"]) == 7
    part = split(page, ("x", "y"), ())[()]
    assert not any(name.endswith("_created") for name in part.points)


def test_a_counter_published_without_its_ending_has_it() -> None:
    assert parse_page("u", "# TYPE n counter\nn 3\n").value(["n_total"]) == 3


def test_the_preferred_name_wins_and_an_older_one_stands_in() -> None:
    both = parse_page("u", "new 1\nold 2\n")
    assert both.value(["new", "old"]) == 1
    assert parse_page("u", "old 2\n").value(["new", "old"]) == 2


def test_label_sets_are_summed_within_what_is_asked_for() -> None:
    page = parse_page("u", sample("n", 1, r="a") + sample("n", 2, r="b") + sample("n", 4, r="c"))
    assert page.value(["n"]) == 7
    assert page.value(["n"], r="b") == 2
    assert page.value(["n"], r=("a", "c")) == 5
    assert math.isnan(page.value(["n"], r="d"))


def test_a_histogram_in_milliseconds_is_in_seconds() -> None:
    found = parse_page("u", histogram("t_ms", (100, 500), (1, 2, 3), 900)).histogram(["t_ms"])
    assert found is not None
    assert found.edges == (0.1, 0.5, math.inf)
    assert found.total == pytest.approx(0.9)


@pytest.mark.parametrize(
    "text",
    [
        histogram("t", (1, 2), (5, 3, 9), 1),
        sample("t_bucket", 1, le="1") + sample("t_bucket", 2, le="2"),
        sample("t_bucket", 1, le="one") + sample("t_bucket", 2, le="+Inf"),
        histogram("t", (1,), (1, 2), 1, k="a") + histogram("t", (2,), (1, 2), 1, k="b"),
    ],
    ids=["falling", "no open bucket", "no number", "unlike edges"],
)
def test_buckets_that_contradict_each_other_are_no_histogram(text: str) -> None:
    assert parse_page("u", text).histogram(["t"]) is None


def test_engines_behind_one_page_are_kept_apart_and_what_is_nobodys_is_left_out() -> None:
    text = (
        sample("vllm:a", 1, model_name="m", engine="0")
        + sample("vllm:a", 2, model_name="m", engine="1")
        + sample("vllm:a", 3, model_name="k", engine="0")
        + sample("vllm:b", 9, model_name="k")
        + sample("vllm:b", 8, model_name="m")
        + sample("other", 1)
    )
    parts = split(parse_page("u", text), ("vllm:",), (("model_name",), ("engine",)))
    assert {key: part.value(["vllm:a"]) for key, part in parts.items()} == {("k", "0"): 3, ("m", "0"): 1, ("m", "1"): 2}
    assert parts["k", "0"].value(["vllm:b"]) == 9, "there is one engine that it can be of"
    assert math.isnan(parts["m", "0"].value(["vllm:b"])), "of which of the two nobody knows"
    assert not parts["k", "0"].has("other")


def test_time_stamps_tell_a_pages_age() -> None:
    assert parse_page("u", "a 1 5000\nb 2 3000\nc 1\n").oldest_s == pytest.approx(3.0)
    assert math.isnan(parse_page("u", "a 1\n").oldest_s)


def test_reading_only_what_is_wanted_gives_the_same_numbers(shared_dir: Path) -> None:
    text = (shared_dir / "samples" / "vllm-0.32-metrics.txt").read_text()
    whole, some = parse_page("u", text), parse_page("u", text, ("vllm:time_to_first", "vllm:generation_tokens"))
    names = ["vllm:generation_tokens_total"]
    assert some.value(names) == whole.value(names) == 6288
    assert some.histogram(["vllm:time_to_first_token_seconds"]) == whole.histogram(["vllm:time_to_first_token_seconds"])
    assert len(some.points) < 10
    with pytest.raises(ScrapeFailed, match="not Prometheus"):
        parse_page("u", '{"detail": "not found"}\n', ("vllm:",))


@settings(deadline=None)
@given(st.integers(0, 4000))
def test_a_page_cut_anywhere_is_refused_or_shorter_never_wrong(cut: int) -> None:
    text = vllm_page()
    whole = parse_page("u", text)
    try:
        page = parse_page("u", text[:cut])
    except ScrapeFailed:
        return
    for name, points in page.points.items():
        assert [p.value for p in points] == [p.value for p in whole.points[name]][: len(points)]


@settings(deadline=None)
@given(st.text(max_size=300))
def test_no_text_does_more_than_fail(text: str) -> None:
    with contextlib.suppress(ScrapeFailed):
        parse_page("u", text)
