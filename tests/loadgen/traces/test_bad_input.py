"""Whatever is wrong with a file, the user is told where, what was found and what was expected."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.traces import FORMATS, TraceError, read
from loadgen.workload import Workload, info, render
from tests.loadgen.traces.files import AZURE, MOONCAKE, SESSIONS, written


def replaced(text: str, line: int, by: str) -> str:
    lines = text.splitlines()
    lines[line - 1] = by
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("text", "line", "by", "column", "found"),
    [
        (AZURE, 3, "2023-11-16 18:15:47.6805900,many,109", "ContextTokens", "'many'"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,-5,109", "ContextTokens", "'-5'"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,1e300,109", "ContextTokens", "'1e300'"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,12.5,109", "ContextTokens", "'12.5'"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,nan,109", "ContextTokens", "'nan'"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,5,", "GeneratedTokens", "''"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,5", "GeneratedTokens", "2 cells"),
        (AZURE, 3, "2023-11-16 18:15:47.6805900,5,6,7", "after GeneratedTokens", "4 cells"),
        (AZURE, 3, "2023-11-16 25:15:47.6805900,5,6", "TIMESTAMP", "'2023-11-16 25:15:47.6805900'"),
        (AZURE, 3, "2023-02-30 18:15:47,5,6", "TIMESTAMP", "'2023-02-30 18:15:47'"),
        (AZURE, 3, "1999-11-16 18:15:47,5,6", "TIMESTAMP", "'1999-11-16 18:15:47'"),
        (AZURE, 3, "yesterday,5,6", "TIMESTAMP", "'yesterday'"),
        (MOONCAKE, 2, '{"timestamp": 0, "input_length": "6", "output_length": 5}', "input_length", "Expected `int`"),
        (MOONCAKE, 2, '{"timestamp": 0, "input_length": 6}', "output_length", "missing required field"),
        (MOONCAKE, 2, '{"timestamp": -1, "input_length": 6, "output_length": 5}', "timestamp", "'-1.0'"),
        (
            MOONCAKE,
            2,
            '{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": ["a"]}',
            "hash_ids",
            "Expected",
        ),
        (MOONCAKE, 2, "{half", "line", "malformed"),
        (MOONCAKE, 2, "[" * 100_000, "line", "'[[["),
        (SESSIONS, 3, "trace_0003,agent_001,inf,n,900,30,0.0,2.0,,tool_use,14,0", "t_s", "'inf'"),
        (SESSIONS, 3, "trace_0003,agent_001,2.0,n,900,30,-1,2.0,,tool_use,14,0", "think_time_s", "'-1'"),
        (SESSIONS, 3, "trace_0003,agent_001,2.0,n,900,30,1,2.0,,tool_use,14,x", "prefix_hit_blocks64", "'x'"),
        (SESSIONS, 3, ",agent_001,2.0,n,900,30,1,2.0,,tool_use,14,0", "trace_id", "an empty cell"),
    ],
)
def test_a_malformed_line_is_named_or_skipped(
    tmp_path: Path, text: str, line: int, by: str, column: str, found: str
) -> None:
    path = written(tmp_path, replaced(text, line, by))
    with pytest.raises(TraceError) as caught:
        read(path)
    error = caught.value
    assert (error.line, error.column) == (line, column)
    assert found in error.found
    assert f"{path}: line {line}: {column}: found " in str(error)
    assert ", expected " in str(error)
    assert "\n" not in str(error), "one line for the user"
    skipped = read(path, skip_bad=True)
    assert skipped.left_out["malformed lines"] == 1
    assert any(f"line {line}" in note for note in skipped.notes)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "an empty file"),
        (b"\n\n \n", "no line of text"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "no usable request"),
        (b"a,b,c\n1,2,3\n", "columns of a known format"),
        (b"\x00\x01\x02\xff\xfe" * 100, "expected"),
        (b"\x1f\x8b" + b"junk" * 20, "damaged gzip"),
        (gzip.compress(AZURE.encode())[:-12], "ends too early"),
        (b'{"id":"trace_0001","block_size":64,"requests":[]}\n', "the session table"),
    ],
)
@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: bytes, said: str, skip_bad: bool) -> None:
    with pytest.raises(TraceError, match=said):
        read(written(tmp_path, content), skip_bad=skip_bad)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read(tmp_path / "nowhere.csv")
    with pytest.raises(TraceError, match="directory"):
        read(tmp_path)


def test_a_named_format_says_which_columns_are_missing(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"line 1: header: .*also trace_id, t_s, prompt_tokens, output_tokens"):
        read(written(tmp_path, AZURE), format="sessions")


def test_when_every_line_is_bad_the_first_is_quoted(tmp_path: Path) -> None:
    path = written(tmp_path, "t_s,prompt_tokens,output_tokens\nx,1,1\n1,y,1\n")
    with pytest.raises(TraceError, match=r"no usable request \(2 malformed lines; .*line 2: t_s: found 'x'"):
        read(path, skip_bad=True)


def test_a_line_that_is_no_utf8_counts_as_one_bad_line(tmp_path: Path) -> None:
    path = written(tmp_path, AZURE.encode() + b"\xff\xfe,1,2\n")
    with pytest.raises(TraceError, match="line 5: text: found the byte 0xff at 0, expected UTF-8"):
        read(path)
    assert read(path, skip_bad=True).left_out["malformed lines"] == 1


def outcome(content: bytes, format: str | None, skip_bad: bool) -> None:
    """Read it: a checked workload that can be described, or a TraceError; anything else is a bug."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(content)
        try:
            whole = read(path, format, skip_bad)
        except TraceError:
            return
    assert isinstance(whole.check(), Workload)
    assert render(info(whole))


FORMAT = st.sampled_from([None, *FORMATS])
CELL = st.one_of(
    st.integers(-5, 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(["", "2023-11-16 18:15:46.68", "2024-05-10T00:00:00Z", "trace_1", '"', "0", "1_0", "١"]),
    st.text(max_size=5),
)
HEADERS = st.sampled_from([AZURE.splitlines()[0], SESSIONS.splitlines()[0], "t_s,prompt_tokens,output_tokens"])
NUMBER = st.one_of(st.integers(), st.floats(), st.none(), st.text(max_size=3))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), FORMAT, st.booleans())
def test_any_bytes_give_a_workload_or_a_trace_error(content: bytes, format: str | None, skip_bad: bool) -> None:
    outcome(content, format, skip_bad)


@settings(max_examples=80, deadline=None)
@given(HEADERS, st.lists(st.lists(CELL, min_size=1, max_size=12), max_size=8), FORMAT, st.booleans())
def test_any_cells_give_a_workload_or_a_trace_error(
    header: str, rows: list[list[str]], format: str | None, skip_bad: bool
) -> None:
    width = header.count(",") + 1
    text = "\n".join([header, *(",".join((row * 12)[:width]) for row in rows)])
    outcome(text.encode("utf-8", "surrogatepass"), format, skip_bad)


LINE = st.fixed_dictionaries(
    {"timestamp": NUMBER, "input_length": NUMBER, "output_length": NUMBER},
    optional={"hash_ids": st.lists(st.integers(0, 5), max_size=6)},
)
GOOD_LINE = st.fixed_dictionaries(
    {
        "timestamp": st.integers(0, 5).map(lambda step: step * 3000),
        "input_length": st.integers(0, 4000),
        "output_length": st.integers(0, 100),
        "hash_ids": st.lists(st.integers(0, 3), max_size=6),
    }
)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(LINE, GOOD_LINE), min_size=1, max_size=12), st.booleans())
def test_any_json_lines_give_a_workload_or_a_trace_error(lines: list[object], skip_bad: bool) -> None:
    outcome("\n".join(json.dumps(line) for line in lines).encode(), "mooncake", skip_bad)
