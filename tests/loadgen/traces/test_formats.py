"""What each reader makes of a good file."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadgen.traces import read, session_split, trace_info
from loadgen.traces.mooncake import linked
from loadgen.workload import info
from schemas.classes import ServiceClass
from schemas.endings import Ending
from services.errors import UserError
from tests.loadgen.traces.files import AZURE, AZURE_2024, MOONCAKE, SESSIONS, written


def test_azure_times_start_at_zero_and_keep_their_gaps(tmp_path: Path) -> None:
    whole = read(written(tmp_path, AZURE))
    assert whole.requests.arrival_s.tolist() == pytest.approx([0.0, 1.0, 3.5], abs=1e-9)
    assert whole.requests.prompt_tokens.tolist() == [374, 396, 879]
    assert whole.requests.output_tokens.tolist() == [44, 109, 55]
    assert whole.requests.max_tokens.tolist() == [4096] * 3
    assert whole.duration_s == pytest.approx(3.5 * 3 / 2), "one mean gap after the last, so that repeats fit"


def test_azure_times_with_a_zone_are_compared_across_zones(tmp_path: Path) -> None:
    whole = read(written(tmp_path, AZURE_2024))
    assert whole.requests.arrival_s.tolist() == pytest.approx([0.0, 1.0, 1.99007], abs=1e-9)


@pytest.mark.parametrize("name", ["trace.csv", "trace.csv.gz", "trace"])
@pytest.mark.parametrize("packed", [False, True])
def test_gzip_is_told_by_content_and_not_by_name(tmp_path: Path, name: str, packed: bool) -> None:
    assert len(read(written(tmp_path, AZURE, name, packed))) == 3


def test_line_ends_blank_lines_a_mark_and_quotes_do_no_harm(tmp_path: Path) -> None:
    odd = "\ufeff" + AZURE.replace("\n", "\r\n").replace("374", '"374"') + "\r\n\r\n"
    assert read(written(tmp_path, odd)).requests.prompt_tokens.tolist() == [374, 396, 879]


def test_rows_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    header, first, *rest = AZURE.splitlines()
    whole = read(written(tmp_path, "\n".join([header, *rest, first])))
    assert whole.requests.prompt_tokens.tolist() == [374, 396, 879]
    assert any("1 rows were earlier" in note for note in whole.notes)


def test_failed_calls_are_left_out_and_counted(tmp_path: Path) -> None:
    burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    burst += "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,1087,0,1087,Conversation log\n"
    whole = read(written(tmp_path, burst))
    assert len(whole) == 1
    assert whole.left_out == {"calls without output tokens (failed or cancelled)": 1}


def test_time_and_lengths_suffice(tmp_path: Path) -> None:
    whole = read(written(tmp_path, "t_s,client,prompt_tokens,output_tokens\n0.5,8,404,25\n2.5,8,402,38\n"))
    assert whole.requests.arrival_s.tolist() == [0.0, 2.0]


def test_mooncake_stamps_are_spread_inside_their_step(tmp_path: Path) -> None:
    whole = read(written(tmp_path, MOONCAKE))
    firsts = sorted(a for a in whole.requests.arrival_s.tolist() if a == a)
    assert firsts == [0.0, 1.0, 2.0]
    assert any("spread evenly" in note for note in whole.notes)


def test_mooncake_requests_with_one_prefix_are_turns_of_a_session(tmp_path: Path) -> None:
    table = read(written(tmp_path, MOONCAKE)).requests
    row = table.prompt_tokens.tolist().index(1300)
    later = table.next_turn[row]
    assert table.prompt_tokens[later] == 1900
    assert table.cached_tokens[later] == 2 * 512, "two equal leading blocks"
    assert table.think_s[row] == pytest.approx(30 - 1300 / 10_000 - 50 * 0.03), "what a nominal call leaves"


def test_a_template_that_many_share_is_no_session() -> None:
    template = [1, 2, 3]
    previous, _, seen = linked([[*template, 100 + client] for client in range(60)])
    assert (previous == -1).all()
    assert seen[1:].tolist() == [3] * 59, "the reuse is still counted"


def test_a_block_is_the_same_only_after_the_same_blocks() -> None:
    previous, _, seen = linked([[1, 2], [9, 2]])
    assert previous.tolist() == [-1, -1]
    assert seen.tolist() == [0, 0]


def test_sessions_keep_order_think_time_and_prefix_hits(tmp_path: Path) -> None:
    whole = read(written(tmp_path, SESSIONS))
    table = whole.requests
    row = table.prompt_tokens.tolist().index(1600)
    chain = [row]
    while table.next_turn[chain[-1]] >= 0:
        chain.append(int(table.next_turn[chain[-1]]))
    assert table.prompt_tokens[chain].tolist() == [1600, 2000, 1000], "the call without output is left out"
    assert table.cached_tokens[chain].tolist() == [0, 25 * 64, 4 * 64]
    assert table.think_s[chain].tolist() == [13.0, 12.5, 0.0], "an empty cell is what the clock leaves: 20 - 0 - 7"
    assert whole.left_out == {"calls without output tokens (failed or cancelled)": 1}
    assert (table.service_class == ServiceClass.AGENT).all()


def test_a_subagent_runs_beside_its_parent(tmp_path: Path) -> None:
    whole = read(written(tmp_path, SESSIONS))
    table = whole.requests
    parent, sub = (table.prompt_tokens.tolist().index(prompt) for prompt in (1600, 900))
    assert table.session[parent] != table.session[sub]
    assert whole.group[parent] == whole.group[sub] == 3, "one worker, thinned together; the name's number"
    assert table.arrival_s[sub] - table.arrival_s[parent] == pytest.approx(2.0)


def test_session_starts_follow_seed_and_rate(tmp_path: Path) -> None:
    path = written(tmp_path, SESSIONS)
    starts = [read(path, seed=seed, session_rate_per_s=1.0).requests.arrival_s for seed in (1, 1, 2)]
    assert starts[0].tolist() == pytest.approx(starts[1].tolist(), nan_ok=True)
    assert starts[0][0] != starts[2][0]


def test_a_table_without_optional_columns_is_read(tmp_path: Path) -> None:
    bare = "trace_id,t_s,prompt_tokens,output_tokens\na,0,100,10\na,5,150,10\nb,0,100,10\na,9,50,10\n"
    table = read(written(tmp_path, bare)).requests
    row = int(table.next_turn.argmax() - 0)
    chain = [next(i for i in range(4) if table.is_first[i] and table.next_turn[i] >= 0)]
    while table.next_turn[chain[-1]] >= 0:
        chain.append(int(table.next_turn[chain[-1]]))
    assert row in chain
    assert table.cached_tokens[chain].tolist() == [0, 110, 0], "a shorter prompt was rewritten"
    assert table.think_s[chain].tolist() == [5.0, 4.0, 0.0]


def test_how_turns_ended_is_carried_where_the_table_says_so(tmp_path: Path) -> None:
    table = read(written(tmp_path, SESSIONS.replace("3.5,1.9,tool_use", "3.5,1.9,"))).requests
    assert table.ending is not None
    told = dict(zip(table.prompt_tokens.tolist(), table.ending.tolist(), strict=True))
    assert told == {
        1600: Ending.TOOL, 900: Ending.TOOL, 1100: Ending.DONE, 2000: Ending.UNKNOWN, 1000: Ending.DONE,
        500: Ending.DONE,
    }  # fmt: skip
    named = read(written(tmp_path, SESSIONS.replace(",stop,", ",finish_reason,").replace("tool_use", "length"), "b"))
    assert named.requests.ending is not None
    assert (named.requests.ending == Ending.LENGTH).sum() == 3
    bare = "trace_id,t_s,prompt_tokens,output_tokens\na,0,100,10\na,5,150,10\n"
    for text in (bare, AZURE, MOONCAKE):
        assert read(written(tmp_path, text, "silent")).requests.ending is None, "nobody says: not 0 of anything"


def test_format_and_class_can_be_named(tmp_path: Path) -> None:
    path = written(tmp_path, SESSIONS)
    plain = read(path, format="servegen", service_class=ServiceClass.BATCH)
    assert info(plain).sessions == 0
    assert set(info(plain).classes) == {"batch"}
    with pytest.raises(UserError, match=r"found 'azur', expected one of: .* \(nearest: azure\)"):
        read(path, format="azur")


def test_trace_info_is_text(tmp_path: Path) -> None:
    text = trace_info(written(tmp_path, SESSIONS, "mine.csv"))
    assert text.startswith("mine.csv (session table; seed 0)")
    assert "left out       1 calls without output tokens" in text


def test_sessions_are_split_by_their_number(tmp_path: Path) -> None:
    rows = "".join(f"s_{number},0,100,10\n" for number in range(10))
    train, validate = session_split(read(written(tmp_path, "trace_id,t_s,prompt_tokens,output_tokens\n" + rows)))
    assert sorted(train.group.tolist()) == [0, 1, 2, 5, 6, 7]
    assert sorted(validate.group.tolist()) == [3, 8]
