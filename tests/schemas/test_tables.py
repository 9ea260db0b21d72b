"""Subjects, worker ids, METRICS and FEATURES."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects
from schemas.features import FEATURE, FEATURE_COUNT, FEATURES, INPUT_COUNT, normalise
from schemas.identity import parse_worker_id, worker_id
from schemas.metrics import COLUMN, CONTEXT_EDGES_TOKENS, CONTEXT_SLICE, METRICS, TPOT_SLICE, TTFT_SLICE

_names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


@given(name=_names, family=st.sampled_from(subjects.FAMILIES))
def test_a_subject_gives_back_family_and_node(name: str, family: subjects.Family) -> None:
    assert subjects.parse(subjects.subject(family, name)) == (family, name)


@given(a=_names, b=_names)
def test_two_hosts_never_share_a_token(a: str, b: str) -> None:
    assert (subjects.token(a) == subjects.token(b)) == (a == b)


def test_dots_of_a_host_name_do_not_split_the_subject() -> None:
    assert subjects.subject("action", "gpu-01.dc_1") == "tg.v1.action.gpu-01_2edc_5f1"


@pytest.mark.parametrize(
    "text", ["", "tg.v1.action", "tg.v1.action.a.b", "tg.v2.action.a", "tg.v1.x.a", "tg.v1.action._zz"]
)
def test_a_foreign_subject_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        subjects.parse(text)


def test_worker_ids_round_trip_and_reject_ambiguity() -> None:
    assert parse_worker_id(worker_id("n0", 3, "chat")) == ("n0", 3, "chat")
    for bad in ("n0/chat", "n0/x/chat", "n0/0/", "/0/a", "n0/0/a/b"):
        with pytest.raises(ValueError, match="expected"):
            parse_worker_id(bad)
    with pytest.raises(ValueError, match="'/'"):
        worker_id("n/0", 0, "a")


def test_tables_have_unique_names_and_full_histograms() -> None:
    assert len(COLUMN) == len(METRICS)
    assert len(FEATURE) == FEATURE_COUNT
    for name, part in (("context", CONTEXT_SLICE), ("ttft", TTFT_SLICE), ("tpot", TPOT_SLICE)):
        assert [m.name for m in METRICS[part]] == [f"{name}_{k:02d}" for k in range(16)]
    assert CONTEXT_EDGES_TOKENS[0] == 128
    assert CONTEXT_EDGES_TOKENS[15] == pytest.approx(131_072)


def test_article_one_names_the_first_eight_features() -> None:
    assert [f.name for f in FEATURES[:8]] == [
        "u_alloc", "du_alloc", "f_frag", "l_queue", "p_prefill", "t_len_mean", "t_len_std", "s_swap",
    ]  # fmt: skip


def test_missing_is_not_zero() -> None:
    raw = np.zeros((2, FEATURE_COUNT), np.float32)
    raw[1, FEATURE["f_frag"]] = np.nan
    given_, absent = normalise(raw)
    assert given_[FEATURE["f_frag"]] == absent[FEATURE["f_frag"]] == 0
    assert (given_ != absent).sum() == 1, "only the presence flag tells them apart"


def test_scales_map_the_range_to_zero_and_one() -> None:
    low = np.array([[f.low if f.scale == "linear" else 0.0 for f in FEATURES]], np.float32)
    high = np.array([[f.high for f in FEATURES]], np.float32)
    assert normalise(low)[0, :FEATURE_COUNT] == pytest.approx(0)
    assert normalise(high)[0, :FEATURE_COUNT] == pytest.approx(1)


@given(st.lists(st.floats(width=32), min_size=FEATURE_COUNT, max_size=FEATURE_COUNT))
def test_the_network_input_is_finite_and_bounded_whatever_comes(values: list[float]) -> None:
    out = normalise(np.array([values], np.float32))
    assert out.shape == (1, INPUT_COUNT)
    assert np.isfinite(out).all()
    assert out.min() >= -1
    assert out.max() <= 1.5


def test_a_state_of_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="expected"):
        normalise(np.zeros((1, FEATURE_COUNT + 1), np.float32))
