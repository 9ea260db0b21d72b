"""Finish reasons of the engines and APIs that are met."""

from __future__ import annotations

import pytest

from schemas.endings import Ending, ending_of


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("stop", Ending.DONE), ("end_turn", Ending.DONE), ("tool_calls", Ending.TOOL), (" Tool_Use ", Ending.TOOL),
        ("length", Ending.LENGTH), ("max_tokens", Ending.LENGTH), ("abort", Ending.CUT),
    ],
)  # fmt: skip
def test_each_api_s_word_means_one_ending(word: str, meant: Ending) -> None:
    assert ending_of(word) is meant


@pytest.mark.parametrize("word", [None, "", "pause_turn"])
def test_what_nobody_said_is_unknown(word: str | None) -> None:
    assert ending_of(word) is Ending.UNKNOWN
