"""Bucket differences, quantiles and the bins of METRICS."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.metrics import HISTOGRAM_BINS, LATENCY_RATIO_EDGES
from services.telemetry.sources.histograms import (
    Histogram,
    below,
    gained,
    quantile,
    ratio_bins,
    share_within,
    sum_of_squares,
)

INF = math.inf


def test_a_window_is_the_difference_of_two_pages() -> None:
    before, now = Histogram((1, 2, INF), (1, 2, 2), 2.0), Histogram((1, 2, INF), (1, 5, 6), 9.0)
    assert gained(now, before) == Histogram((1, 2, INF), (0, 3, 4), 7.0)


@pytest.mark.parametrize(
    "before", [None, Histogram((1, 2, INF), (2, 9, 9), 9.0), Histogram((1, 3, INF), (0, 1, 1), 1.0)]
)
def test_counts_that_went_back_or_other_edges_begin_anew(before: Histogram | None) -> None:
    now = Histogram((1, 2, INF), (1, 3, 4), 6.0)
    assert gained(now, before) == now


def test_values_lie_evenly_within_a_bucket() -> None:
    histogram = Histogram((1, 3, INF), (2, 10, 12), 20.0)
    assert below(histogram, 0.5) == 1
    assert below(histogram, 2.0) == 6
    assert below(histogram, 3.0) == 10
    assert below(histogram, 100.0) == 10, "of the open bucket only its lower edge is known"
    assert below(histogram, INF) == 12
    assert share_within(histogram, 2.0) == 0.5
    assert quantile(histogram, 0.5) == pytest.approx(2.0)
    assert quantile(histogram, 0.99) == 3.0, "the last edge that is known"


def test_the_sum_of_the_values_tells_where_in_a_coarse_bucket_they_lie() -> None:
    coarse = Histogram((1.0, 2.5, INF), (0, 10, 10), 13.0)
    assert below(coarse, 2.0) == 10, "ten of 1.3 s on average: between 1.0 and 1.6"
    assert below(coarse, 1.3) == 5
    assert quantile(coarse, 0.5) == pytest.approx(1.3)
    assert below(Histogram((1.0, 2.5, INF), (0, 10, 10), 10.0), 1.0) == 10, "all at the lower edge"
    assert below(Histogram((1.0, 2.5, INF), (0, 10, 10), 999.0), 1.75) == 5, "a sum that cannot be tells nothing"
    assert below(Histogram((1.0, 2.5, INF), (0, 10, 11), 14.0), 1.75) == 5, "nor one with an open bucket in it"
    assert below(Histogram((4.0, 8.0, INF), (10, 12, 12), 30.0), 6.0) == 11, "the ten others may be anywhere"


def test_without_events_there_is_no_share_and_no_quantile() -> None:
    empty = Histogram((1, INF), (0, 0), 0.0)
    assert math.isnan(share_within(empty, 1.0))
    assert math.isnan(quantile(empty, 0.5))
    assert ratio_bins(empty, 1.0).sum() == 0


def test_bins_are_multiples_of_the_limit_and_1_is_an_edge() -> None:
    # All between 0.9 and 1.0 of a limit of 2 s, and three beyond everything.
    bins = ratio_bins(Histogram((1.8, 2.0, INF), (0, 5, 8), 0.0), 2.0)
    assert bins[9] == pytest.approx(5), "bin 9 ends at the limit"
    assert bins[15] == pytest.approx(3), "the open bucket counts as beyond everything"
    assert bins.sum() == pytest.approx(8)


def test_no_limit_puts_all_in_the_first_bin() -> None:
    assert ratio_bins(Histogram((1, INF), (2, 9), 0.0), INF).tolist() == [9.0] + [0.0] * 15


@settings(deadline=None)
@given(
    st.lists(st.floats(0.001, 100), min_size=1, max_size=12, unique=True),
    st.data(),
    st.floats(0.001, 100),
)
def test_bins_neither_lose_nor_make_events(edges: list[float], data: st.DataObject, limit: float) -> None:
    steps = data.draw(st.lists(st.integers(0, 1000), min_size=len(edges) + 1, max_size=len(edges) + 1))
    histogram = Histogram((*sorted(edges), INF), tuple(np.cumsum(steps).astype(float)), 0.0)
    bins = ratio_bins(histogram, limit)
    assert len(bins) == HISTOGRAM_BINS == len(LATENCY_RATIO_EDGES) + 1
    assert (bins >= -1e-9).all()
    assert bins.sum() == pytest.approx(sum(steps))


def test_squares_are_at_least_those_of_equal_values() -> None:
    assert sum_of_squares(Histogram((1, INF), (4, 4), 4.0)) == pytest.approx(4.0), "sum 4 over 4 events"
    assert sum_of_squares(Histogram((10, 20, INF), (2, 4, 4), 40.0)) == pytest.approx(2 * 25 + 2 * 225)
