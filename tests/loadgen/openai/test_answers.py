"""What is read out of the events of an answer."""

from __future__ import annotations

import json

import pytest

from loadgen.openai.answers import Answer, MalformedAnswer


def taken(*events: object) -> Answer:
    answer = Answer()
    for one in events:
        answer.take(one if isinstance(one, bytes) else json.dumps(one).encode())
    return answer


def test_completions_bring_text_ids_finish_and_usage() -> None:
    answer = taken(
        {"choices": [{"text": "a", "token_ids": [5, 6]}]},
        {"choices": [{"text": "", "token_ids": [7], "finish_reason": "stop"}]},
        {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 8}}},
        b"[DONE]",
    )  # fmt: skip
    assert (answer.text, answer.token_ids, answer.finish, answer.is_done) == ("a", [5, 6, 7], "stop", True)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens, answer.counted_by) == (9, 8, 3, "ids")
    assert not answer.is_contradicted


def test_a_chat_role_alone_is_no_token_and_reasoning_is_text() -> None:
    answer = Answer()
    assert answer.take(b'{"choices":[{"delta":{"role":"assistant","content":""}}]}') == 0, "TTFT must wait for text"
    assert answer.take(b'{"choices":[{"delta":{"reasoning_content":"hm"}}]}') == 1
    assert answer.take(b'{"choices":[{"delta":{"content":"yes"},"finish_reason":"stop"}]}') == 1
    assert answer.text == "hmyes"
    assert (answer.output_tokens, answer.counted_by) == (2, "chunks")


def test_usage_counts_where_there_are_no_ids() -> None:
    answer = taken({"choices": [{"text": "several at once"}]}, {"choices": [], "usage": {"completion_tokens": 4}})
    assert (answer.output_tokens, answer.counted_by) == (4, "usage")


def test_usage_that_contradicts_the_ids_is_said() -> None:
    assert taken({"choices": [{"token_ids": [1]}]}, {"choices": [], "usage": {"completion_tokens": 4}}).is_contradicted


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory"},
    ],
)
def test_an_error_in_the_stream_is_kept_in_its_own_words(event: object) -> None:
    answer = taken({"choices": [{"text": "a"}]}, event, {"choices": [{"text": "never read"}]})
    assert "out of memory" in answer.error
    assert answer.text == "a"


@pytest.mark.parametrize("data", [b"<html>", b"{", b"[]", b'{"choices": 3}', b"{}", b'{"choices":[{"text":"\xff"}]}'])
def test_what_is_no_part_of_the_api_is_malformed(data: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        taken(data)
