"""BurstGPT's CSV as its authors document it (github.com/HPMLL/BurstGPT): with and without the session columns."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.traces import TraceError, read, trace_info
from schemas.classes import ServiceClass
from tests.loadgen.traces.files import written

HEADER = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
ROWS = ("5,ChatGPT,472,18,490,Conversation log", "45,ChatGPT,1087,230,1317,Conversation log",
        "45,GPT-4,417,276,693,API log", "118.5,GPT-4,1360,647,2007,API log")  # fmt: skip
SESSIONS_HEADER = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"
SESSIONS_ROWS = ("5,a1,3.5,ChatGPT,472,18,490,Conversation log", "45,,,ChatGPT,1087,230,1317,API log")


def _text(header: str, *rows: str) -> str:
    return "\n".join([header, *rows]) + "\n"


def test_times_start_at_zero_and_lengths_are_request_and_response_tokens(tmp_path: Path) -> None:
    whole = read(written(tmp_path, _text(HEADER, *ROWS)))
    table = whole.requests
    assert whole.source == "burstgpt"
    assert table.arrival_s.tolist() == [0.0, 40.0, 40.0, 113.5]
    assert table.prompt_tokens.tolist() == [472, 1087, 417, 1360]
    assert table.output_tokens.tolist() == [18, 230, 276, 647]
    assert (table.service_class == ServiceClass.CHAT).all()
    table.check()


def test_the_later_release_with_session_and_elapsed_time_reads_the_same(tmp_path: Path) -> None:
    whole = read(written(tmp_path, _text(SESSIONS_HEADER, *SESSIONS_ROWS)))
    assert whole.source == "burstgpt"
    assert whole.requests.prompt_tokens.tolist() == [472, 1087]
    assert (whole.requests.next_turn == -1).all(), "what a session's turns share is not told: each stands alone"


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    whole = read(written(tmp_path, _text(HEADER, *ROWS, "130,GPT-4,100,0,100,API log")))
    assert len(whole) == len(ROWS)
    assert sum(whole.left_out.values()) == 1


def test_two_months_are_within_what_is_plausible(tmp_path: Path) -> None:
    late = f"{61 * 86_400 - 1},GPT-4,10,10,20,API log"
    assert read(written(tmp_path, _text(HEADER, ROWS[0], late))).duration_s > 60 * 86_400


def test_a_bad_cell_is_named_with_its_line_and_column(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 3.*Response tokens.*'many'"):
        read(written(tmp_path, _text(HEADER, ROWS[0], "45,ChatGPT,1087,many,1317,Conversation log")))
    found = read(written(tmp_path, _text(HEADER, ROWS[0], "45,ChatGPT,1087,many,1317,x")), skip_bad=True)
    assert len(found) == 1


def test_a_lookalike_that_lacks_a_column_is_told_which(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Response tokens"):
        read(written(tmp_path, "Timestamp,Model,Request tokens\n1,GPT-4,5\n"), "burstgpt")


def test_its_figures_can_be_looked_at(tmp_path: Path) -> None:
    assert "burstgpt" in trace_info(written(tmp_path, _text(HEADER, *ROWS)))
