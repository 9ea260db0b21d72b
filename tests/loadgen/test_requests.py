"""RequestTable keeps its promises or says which one is broken."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from loadgen.requests import RequestTable, concatenated, default_max_tokens, empty_table
from schemas.classes import DEFAULT_LIMITS, ClassLimits, ServiceClass
from schemas.endings import Ending
from tests.loadgen.workload.tables import workload

NAN = float("nan")


def chain() -> RequestTable:
    return workload(
        [1.0, NAN, 5.0], prompt=[100, 150, 80], next_turn=[1, -1, -1], think_s=[3.0, 0, 0], cached=[0, 110, 0]
    ).requests


def test_a_chain_and_an_empty_table_pass() -> None:
    assert len(chain().check()) == 3
    assert len(empty_table().check()) == 0, "an idle worker has a table too"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("arrival_s", [-1.0, NAN, 5.0], "arrival_s: row 0"),
        ("arrival_s", [1.0, 2.0, 5.0], "next_turn: row 1"),
        ("arrival_s", [1.0, NAN, NAN], "next_turn: row 2"),
        ("prompt_tokens", [0, 150, 80], "prompt_tokens: row 0"),
        ("output_tokens", [10, 10, 0], "output_tokens: row 2"),
        ("max_tokens", [9, 10, 10], "max_tokens: row 0"),
        ("cached_tokens", [0, 150, 0], "cached_tokens: row 1"),
        ("cached_tokens", [0, 111, 0], "<= context before"),
        ("cached_tokens", [5, 110, 0], "0 for a first turn"),
        ("service_class", [0, 9, 0], "service_class: row 1"),
        ("session", [0, 2, 2], "session: row 1"),
        ("session", [0, 0, 0], "two first turns"),
        ("next_turn", [0, -1, -1], "next_turn: row 0"),
        ("next_turn", [7, -1, -1], "next_turn: row 0"),
        ("think_s", [NAN, 0, 0], "think_s: row 0"),
    ],
)
def test_each_broken_promise_is_named_with_its_row(field: str, value: list[float], said: str) -> None:
    table = chain()
    array = np.array(value, dtype=getattr(table, field).dtype)
    if said == "session: row 1":
        said = "session: row 0"  # the row of the pair
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(table, **{field: array}).check()


def test_a_wrong_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="session: int32"):
        dataclasses.replace(chain(), session=np.zeros(3, dtype=np.int32)).check()


def test_taking_rows_relinks_and_cuts_tails() -> None:
    table = chain()
    assert table.take(np.array([0, 1])).next_turn.tolist() == [1, -1]
    cut = table.take(np.array([0, 2])).check()
    assert cut.next_turn.tolist() == [-1, -1]
    assert cut.think_s.tolist() == [0.0, 0.0], "nothing follows, so nobody thinks"
    with pytest.raises(ValueError, match="row 1: a later turn without"):
        table.take(np.array([1, 2]))


def test_concatenated_sessions_stay_apart() -> None:
    both = concatenated([chain(), chain()]).check()
    assert both.next_turn.tolist() == [1, -1, -1, 4, -1, -1]
    assert len(set(both.session.tolist())) == 4


def test_default_max_tokens_is_the_class_default_within_context_and_output() -> None:
    classes = np.array([ServiceClass.CHAT, ServiceClass.COPILOT, ServiceClass.CHAT, ServiceClass.COPILOT], np.uint8)
    prompt = np.array([100, 100, 130_000, 100])
    output = np.array([10, 10, 10, 900])
    assert default_max_tokens(classes, prompt, output).tolist() == [4096, 512, 1072, 900]
    limits = {
        **DEFAULT_LIMITS,
        ServiceClass.CHAT: ClassLimits(ttft_base_s=1, ttft_per_token_s=0, tpot_s=1, default_max_tokens=1024),
    }
    assert default_max_tokens(classes, prompt, output, limits).tolist() == [1024, 512, 1024, 900]


def test_endings_go_with_their_rows_and_are_unknown_where_only_others_have_them() -> None:
    silent = chain()
    told = dataclasses.replace(silent, ending=np.arange(len(silent), dtype=np.uint8) % len(Ending)).check()
    rows = np.flatnonzero(told.session == told.session[-1])
    assert told.take(rows).ending.tolist() == told.ending[rows].tolist()
    joined = concatenated([silent, told]).check()
    assert joined.ending.dtype == np.uint8
    assert joined.ending.tolist() == [Ending.UNKNOWN] * len(silent) + told.ending.tolist()
    assert concatenated([silent, silent]).ending is None
    with pytest.raises(ValueError, match="ending: row 0 holds 99"):
        dataclasses.replace(silent, ending=np.full(len(silent), 99, np.uint8)).check()
    with pytest.raises(ValueError, match="ending: int64"):
        dataclasses.replace(silent, ending=np.zeros(len(silent), np.int64)).check()
